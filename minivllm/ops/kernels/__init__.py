"""Triton kernels and their launchers; this package itself imports neither triton nor a kernel.

    Implementation("triton", kernel("gating", "silu_mul"), ("cuda",), package="triton")

Each module holds kernels and, below them, launchers: plain functions with an op's signature that
allocate the outputs and pick blocks and warps from shapes alone. A launcher neither reads a
tensor nor waits for the device, so it can be captured in a CUDA Graph; handed meta tensors, it
makes the same choices (which is how the tests compile every kernel without a GPU).

Rules of the kernels: arithmetic in float32; offsets that a slot, block or token multiplies in
int64; row strides are arguments, so inputs may be column slices; a size that changes from call to
call (tokens, sequences) is never specialised on, so it compiles nothing anew.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def kernel(module: str, launcher: str) -> Callable[..., Any]:
    """`launcher` of the module beside this one, imported on its first call."""

    @functools.cache
    def load() -> Callable[..., Any]:
        loaded: Callable[..., Any] = getattr(
            importlib.import_module(f"{__name__}.{module}"), launcher
        )
        return loaded

    def call(*args: Any) -> Any:
        return load()(*args)

    call.__name__ = call.__qualname__ = f"{launcher}_triton"  # its name in generated code
    return call
