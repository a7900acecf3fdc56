"""The one door to flash-linear-attention: its entry points, imported on first use.

Owns the workaround that FLA needs. FLA memoises chunk indices and chunk offsets by the identity
of `cu_seqlens`; a buffer that is filled anew for the next batch would silently get the previous
batch's. Its memo is switched off here, and chunk indices are graph inputs (`chunks`).

    o, state = fla.chunk_gated_delta_rule()(q, k, v, g, beta, ...)

Nor are FLA's layers and models imported, which take its ops along with transformers, pandas and
scikit-learn to several seconds: without them the package is complete (`fla-core`), and says so.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

EXTENSIONS = ("fla.layers", "fla.models")  # which `import fla` does without if they are missing

_importing = threading.Lock()


def prepare() -> None:
    """Import FLA without its extensions and its memo; before any of its modules is imported."""
    with _importing:  # kernels are built in threads
        _prepare()


@functools.cache
def _prepare() -> None:
    first = "fla" not in sys.modules
    hidden = [name for name in EXTENSIONS if first and name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import fla.utils
    finally:
        for name in hidden:
            del sys.modules[name]  # whoever wants it imports it by its own name

    fla.utils.FLA_DISABLE_TENSOR_CACHE = True


@functools.cache
def causal_conv1d() -> Callable[..., Any]:
    """FLA's causal convolution over packed sequences."""
    prepare()
    from fla.modules.causal_conv1d import causal_conv1d as function

    return function


@functools.cache
def causal_conv1d_update() -> Callable[..., Any]:
    """FLA's one-token convolution; it changes the state it is given."""
    prepare()
    from fla.modules.causal_conv1d import causal_conv1d_update as function

    return function


@functools.cache
def chunk_gated_delta_rule() -> Callable[..., Any]:
    """FLA's chunked delta rule over packed sequences."""
    prepare()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function

    return function


@functools.cache
def fused_recurrent_gated_delta_rule() -> Callable[..., Any]:
    """FLA's token-by-token delta rule."""
    prepare()
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function

    return function
