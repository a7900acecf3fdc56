"""minivllm: an inference engine for MiniQwen (Qwen3.5) hybrid models, built as a compiler.

from minivllm import LLM, AsyncLLM, SamplingParams

`minivllm.compile(module)` runs the compiler's fusions on a module of one's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.compiler.front_door import compile
    from minivllm.runtime.async_llm import AsyncLLM
    from minivllm.runtime.llm import LLM
    from minivllm.runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__", "compile"]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    modules = {
        "AsyncLLM": "runtime.async_llm",
        "LLM": "runtime.llm",
        "SamplingParams": "runtime.sampling_params",
        "compile": "compiler.front_door",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"minivllm.{modules[name]}"), name)
