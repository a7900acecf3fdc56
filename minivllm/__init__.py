"""minivllm: an inference engine for MiniQwen (Qwen3.5) hybrid models, built as a compiler.

from minivllm import LLM, AsyncLLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.runtime.async_llm import AsyncLLM
    from minivllm.runtime.llm import LLM
    from minivllm.runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    modules = {"AsyncLLM": "async_llm", "LLM": "llm", "SamplingParams": "sampling_params"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"minivllm.runtime.{modules[name]}"), name)
