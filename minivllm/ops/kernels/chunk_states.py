"""Kernel of `ops/chunked_delta_rule.py`: the state before each chunk, from a pool and back to it.

It stands in for FLA's kernel of this stage, which knows no slots: reads a sequence's state where
it lies, writes it there, and leaves snapshots of it on the way. A program goes through all chunks
of a sequence, for some value rows of one head; the state stays in its accumulators. For the
chunk's tokens i, with w and u (`kernels/chunk_wy.py`) and the summed log decays g:

    before = S;   c_i = u_i - S w_i;   S = exp(g_last) S + sum_i exp(g_last - g_i) c_i k_i^T
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.chunks import CHUNK_SIZE
from minivllm.ops.kernels.launch import is_hopper, pdl, wait_for_inputs


@dataclass(frozen=True)
class Tile:
    """Value rows of a program, its warps, and how many chunks' loads are under way at once."""

    rows: int
    num_warps: int
    num_stages: int


# Measured on an H200 with K = V = 128. A lone sequence of 3,776 tokens: 56 us with 16 rows, 71 with
# 32, 108 with 64, 76 by FLA's kernel. Four of 2,048 fill the card, so fewer programs do: 121, 79,
# 58 and 86 us.
FEW, MANY = Tile(16, 4, 4), Tile(64, 4, 3)
FEW_PROGRAMS = 264  # two for each of an H200's multiprocessors
# bytes that a program may take; what is not Hopper's may be a consumer's GPU, with 99 KiB
HOPPER_SHARED_MEMORY, OTHER_SHARED_MEMORY = 224 * 1024, 96 * 1024


def tile_for(sequences: int, heads: int, value_dim: int) -> Tile:
    """The tile for so many sequences: by shapes alone, which a CUDA Graph keeps."""
    programs = sequences * heads * triton.cdiv(value_dim, FEW.rows)
    return FEW if programs <= FEW_PROGRAMS else MANY


def stages_of(tile: Tile, key_dim: int, element_size: int) -> int:
    """The tile's stages, or as many as the device's shared memory holds beside a state."""
    state_bytes = key_dim * tile.rows * element_size
    step_bytes = CHUNK_SIZE * (2 * key_dim + tile.rows) * element_size
    room = (HOPPER_SHARED_MEMORY if is_hopper() else OTHER_SHARED_MEMORY) - state_bytes
    return max(1, min(tile.num_stages, room // step_bytes))


@triton.jit
def _state_kernel(
    k,
    u,
    w,
    decay,
    before,
    corrections,
    state,
    slots,
    num_computed_tokens,
    cu_seqlens,
    chunk_offsets,
    chunk_slots,
    state_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    n = tl.program_id(2)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1) - start.to(tl.int32)
    wait_for_inputs(PDL)
    if length > 0:
        dtype: tl.constexpr = k.dtype.element_ty
        first = tl.load(chunk_offsets + n).to(tl.int64)
        row = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        column = tl.arange(0, BLOCK_K)
        i = tl.arange(0, CHUNK)
        exists, is_row = (column < K)[:, None], (row < V)[None, :]
        pool = state + head * (V * K) + row[None, :] * K + column[:, None]
        place = pool + tl.load(slots + n).to(tl.int64) * state_slot
        # a bound: Triton 3.9's interpreter takes no mask that was combined with a scalar
        live = tl.where(tl.load(num_computed_tokens + n) > 0, V, 0)
        s = tl.load(place, mask=exists & (row < live)[None, :], other=0.0).to(tl.float32)

        k += (start * (HEADS // GROUP) + head // GROUP) * K
        u += (start * HEADS + head) * V
        w += (start * HEADS + head) * K
        decay += start * HEADS + head
        corrections += (start * HEADS + head) * V
        target = before + head * (V * K) + column[:, None] * V + row[None, :]
        for chunk in tl.range(0, tl.cdiv(length, CHUNK), num_stages=STAGES):
            rounded = s.to(dtype)
            tl.store(target + (first + chunk) * (HEADS * V * K), rounded, mask=exists & is_row)
            token = (chunk * CHUNK + i).to(tl.int64)
            inside = token < length
            ws = tl.load(
                w + token[:, None] * (HEADS * K) + column[None, :],
                mask=inside[:, None] & (column < K)[None, :],
                other=0.0,
            )
            mask = inside[:, None] & is_row
            at = token[:, None] * (HEADS * V) + row[None, :]
            c = tl.load(u + at, mask=mask, other=0.0).to(tl.float32) - tl.dot(ws, rounded)
            tl.store(corrections + at, c.to(dtype), mask=mask)
            last = tl.load(decay + (tl.minimum((chunk + 1) * CHUNK, length) - 1) * HEADS)
            g = tl.load(decay + token * HEADS, mask=inside, other=0.0)
            c *= tl.where(inside, tl.exp2(last - g), 0.0)[:, None]
            keys = tl.load(
                k + token[None, :] * (HEADS // GROUP * K) + column[:, None],
                mask=exists & inside[None, :],
                other=0.0,
            )
            s = tl.dot(keys, c.to(dtype), s * tl.exp2(last))
            if chunk_slots is not None:
                entry = tl.load(chunk_slots + first + chunk).to(tl.int64)
                if entry != 0:
                    kept = s.to(state.dtype.element_ty)
                    tl.store(pool + entry * state_slot, kept, mask=exists & is_row)
        tl.store(place, s.to(state.dtype.element_ty), mask=exists & is_row)


def chunk_states(
    k: Tensor,
    u: Tensor,
    w: Tensor,
    decay: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_offsets: Tensor,
    num_chunks: int,
    chunk_slots: Tensor | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run all sequences through their chunks; an empty one leaves its slot alone.

    Args:
        k: `[T, HK, K]`; u: `[T, HV, V]`; w: `[T, HV, K]`, in one dtype.
        decay: `[T, HV]` float32: log decays summed from the chunk's start, in powers of two.
        state: `[S, HV, V, K]`, an entry contiguous; changed at `slots` and `chunk_slots`.
        slots: `[N]` int64; num_computed_tokens: `[N]` int32; cu_seqlens: `[N + 1]` int32.
        chunk_offsets: `[N]` int32: the first chunk of each sequence that has tokens.
        num_chunks: C, of all sequences and padding.
        chunk_slots: `[C]` int32: the entry that keeps the state behind a chunk; 0, None: none.
        tile: None: by `tile_for`.

    Returns:
        The states before each chunk, transposed, `[C, HV, K, V]`, and the corrections
        `[T, HV, V]`, in k's dtype; of a chunk or token that does not exist, nothing is written.
    """
    (tokens, heads, value_dim), (key_heads, key_dim) = u.shape, k.shape[1:]
    assert state[:1].is_contiguous()
    before = torch.empty(num_chunks, heads, key_dim, value_dim, dtype=k.dtype, device=k.device)
    corrections = torch.empty(tokens, heads, value_dim, dtype=k.dtype, device=k.device)
    tile = tile or tile_for(slots.shape[0], heads, value_dim)
    block_k = max(16, triton.next_power_of_2(key_dim))
    grid = (triton.cdiv(value_dim, tile.rows), heads, slots.shape[0])
    _state_kernel[grid](
        k,
        u,
        w,
        decay,
        before,
        corrections,
        state,
        slots.contiguous(),
        num_computed_tokens.contiguous(),
        cu_seqlens.contiguous(),
        chunk_offsets,
        None if chunk_slots is None else chunk_slots.contiguous(),
        state.stride(0),
        HEADS=heads,
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        CHUNK=CHUNK_SIZE,
        BLOCK_K=block_k,
        BLOCK_V=tile.rows,
        STAGES=stages_of(tile, block_k, k.element_size()),
        num_warps=tile.num_warps,
        **pdl(),
    )
    return before, corrections
