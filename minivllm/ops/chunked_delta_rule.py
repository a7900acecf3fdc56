"""The chunked delta rule, kernel by kernel, over indices that stay on the device.

FLA's own entry copies `cu_seqlens` to the host, and derives offsets from it with a handful of
launches a layer. Here the kernels are launched one after the other on buffers sized by shapes
alone: nothing waits for the device, so a prefill can be captured in a CUDA Graph and replayed with
other sequences of other lengths. Of FLA's kernels the last one is left, which makes the output. The
others are our own: the system of each chunk (`kernels/chunk_wy.py`), and the state from chunk to
chunk, read from a pool and written to it (`kernels/chunk_states.py`). Does not own these, nor the
indices (`fla.padded_chunk_lists`).

    o = delta_rule_by_chunks(q, k, v, a, b, A_log, dt_bias, state, slots, num_computed_tokens,
                             cu_seqlens, chunk_indices, chunk_slots)

What the kernels need of the indices, and do not check:

1. Every row of `chunk_indices` names a sequence in `[0, N)` and a chunk that is not negative.
2. Each chunk of each sequence has exactly one row. Rows of one sequence stand side by side, its
   chunks in order: `chunk_states` numbers a sequence's chunks on from its first row, the output
   reads the state under its own row.
3. A surplus row names a chunk past its sequence's end (its number of chunks is one). Every kernel
   masks or leaves such a row, so it writes nothing at all. Repeating a chunk would not do: two
   programs would write that chunk's output, one of them from a state that nobody has computed.
4. Tokens past the last sequence are left as they are, uninitialised. So whoever pads tokens gives
   them to a sequence of their own.

A sequence without tokens needs no row: its slot is left alone.

Shapes as in `gated_delta_rule`; C rows of `chunk_indices`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.ops.fla import CHUNK_SIZE, prepare
from minivllm.ops.kernels import kernel

unit_rows = kernel("unit_rows", "unit_rows")
chunk_wy = kernel("chunk_wy", "chunk_wy")
chunk_states = kernel("chunk_states", "chunk_states")


class Pinned:
    """A kernel of FLA's as its tuner left it, without the tuner.

    Args:
        kernel: with its heuristics around its tuner around itself.
        options: blocks, `num_warps` and `num_stages`.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        heuristics = importlib.import_module("triton.runtime.autotuner").Heuristics
        self.kernel = heuristics(kernel.fn.fn, kernel.arg_names, kernel.values)
        self.options = options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **self.options)


@functools.cache
def output_kernel() -> Any:
    """The installed FLA's (0.6) with its tuner: o, from the state before each chunk and its tokens.

    Imported on first use; launched as `output_kernel()[grid](...)`.
    """
    prepare()
    from fla.ops.common.chunk_o import chunk_fwd_kernel_o

    return chunk_fwd_kernel_o


@functools.cache
def tuned_output_kernel() -> Pinned:
    """In the best tile on an H200 for K = V = 128, which FLA's tuner does not try.

    A sequence of 512 / 3,800 tokens takes 6.7 / 33 µs, with the tuner's choice 7.2 / 36.
    """
    return Pinned(output_kernel(), BK=64, BV=128, num_warps=4, num_stages=2)


def output_kernel_for(key_dim: int, value_dim: int) -> Any:
    """The kernel for these head dims; FLA tunes those that are not known."""
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    known = key_dim == value_dim == 128 and hopper
    return tuned_output_kernel() if known else output_kernel()


def delta_rule_by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
    normalized: bool = False,
) -> Tensor:
    """Packed sequences from raw projections; beta is not rounded to its dtype.

    Args:
        q, k: `[T, HK, K]`; v: `[T, HV, V]`; a, b: `[T, HV]`; A_log, dt_bias: `[HV]`.
        state: `[S, HV, V, K]`; changed at the slots of sequences that have tokens.
        slots: `[N]` int64; num_computed_tokens: `[N]` int32; 0: the slot's content is not read.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[C, 2]`, int32, as the module says.
        chunk_slots: `[C]` int32: the pool's entry that keeps the state behind a chunk; 0: none.
        normalized: each row of q and k is of length 1 already.

    Returns:
        o `[T, HV, V]` in v's dtype.
    """
    (key_heads, key_dim), (tokens, heads, value_dim) = q.shape[1:], v.shape
    chunks = chunk_indices.shape[0]
    cu_seqlens, chunk_indices = cu_seqlens.contiguous(), chunk_indices.contiguous()
    if normalized:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    else:
        q, k, v = unit_rows(q, k, v)
    wy = chunk_wy(k, v, a, b, A_log, dt_bias, cu_seqlens, chunk_indices)
    before, corrections = chunk_states(
        k, wy.u, wy.w, wy.decay, state, slots, num_computed_tokens,
        cu_seqlens, wy.chunk_offsets, chunks, chunk_slots,
    )  # fmt: skip
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    def programs(meta: dict[str, int]) -> tuple[int, int]:  # a tile has some columns of V
        return -(-value_dim // meta["BV"]) * chunks, heads

    output_kernel_for(key_dim, value_dim)[programs](
        q=q, k=k, v=corrections, h=before, g=wy.decay, g_gamma=None, o=o,
        cu_seqlens=cu_seqlens, chunk_indices=chunk_indices, scale=key_dim**-0.5, T=tokens,
        H=key_heads, HV=heads, K=key_dim, V=value_dim, BT=CHUNK_SIZE, STATE_V_FIRST=False,
    )  # fmt: skip
    return o
