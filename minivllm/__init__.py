"""minivllm: an inference engine for MiniQwen (Qwen3.5) hybrid models, built as a compiler.

from minivllm import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.runtime.llm import LLM
    from minivllm.runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch only when `LLM` or `SamplingParams` is asked for."""
    if name == "LLM":
        from minivllm.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from minivllm.runtime.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
