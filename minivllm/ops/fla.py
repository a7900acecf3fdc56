"""The one door to flash-linear-attention: its entry points, imported on first use.

Owns the workaround that FLA needs. FLA memoises chunk indices and chunk offsets by the identity
of `cu_seqlens`; a buffer that is filled anew for the next batch would silently get the previous
batch's. Its memo is switched off here, and chunk indices are graph inputs.

    o, state = fla.chunk_gated_delta_rule()(q, k, v, g, beta, ...)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_SIZE = 64


@functools.cache
def _without_memo() -> None:
    import fla.utils

    fla.utils.FLA_DISABLE_TENSOR_CACHE = True


@functools.cache
def causal_conv1d() -> Callable[..., Any]:
    """FLA's causal convolution over packed sequences."""
    _without_memo()
    from fla.modules.causal_conv1d import causal_conv1d as function

    return function


@functools.cache
def causal_conv1d_update() -> Callable[..., Any]:
    """FLA's one-token convolution; it changes the state it is given."""
    _without_memo()
    from fla.modules.causal_conv1d import causal_conv1d_update as function

    return function


@functools.cache
def chunk_gated_delta_rule() -> Callable[..., Any]:
    """FLA's chunked delta rule over packed sequences."""
    _without_memo()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function

    return function


@functools.cache
def fused_recurrent_gated_delta_rule() -> Callable[..., Any]:
    """FLA's token-by-token delta rule."""
    _without_memo()
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function

    return function


def chunk_metadata(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` `[N + 1]` and `chunk_indices` `[chunks, 2]` (sequence, chunk), int32, on CPU.

    A sequence of length L has ceil(L / 64) chunks; an empty one has none.
    """
    starts = [0]
    chunks = []
    for n, length in enumerate(lengths):
        starts.append(starts[-1] + length)
        chunks += [(n, c) for c in range(-(-length // CHUNK_SIZE))]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    return cu_seqlens, torch.tensor(chunks, dtype=torch.int32).reshape(-1, 2)
