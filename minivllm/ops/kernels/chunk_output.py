"""Kernel of `ops/chunked_delta_rule.py`: each token's output, from its chunk and the state before.

With the state S before the chunk, the corrections c (`kernels/chunk_states.py`) and the summed log
decays g of its tokens:

    o_i = scale (exp(g_i) S q_i + sum_j exp(g_i - g_j) (q_i . k_j) c_j)  over j <= i

    o = chunk_output(q, k, corrections, before, decay, cu_seqlens, chunk_indices)

Shapes: T tokens, N sequences, C chunks, HK key heads, HV value heads, K and V head dims.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.chunks import CHUNK_SIZE
from minivllm.ops.kernels.chunk_wy import chunk_at
from minivllm.ops.kernels.launch import pdl, wait_for_inputs

# Columns of values a program has, and of keys at a time, whose loads are on their way together.
# Measured on an H200 with K = V = 128, a sequence of 512 / 3,800 tokens, in us: 6.1 / 30.3; with 4
# warps 6.0 / 33.4, and all 128 columns of keys at once 6.0 / 32.7 (8 warps 5.7 / 49.3); FLA's
# kernel 6.7 / 33.3 at best. What it must move takes 21.5 of the 30.
COLUMNS, STEP = 128, 64
NUM_WARPS = 8


@triton.jit
def _output_kernel(
    q,
    k,
    corrections,
    before,
    decay,
    o,
    cu_seqlens,
    chunk_indices,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    c = tl.program_id(0)
    head = tl.program_id(1)
    _, chunk, start, length = chunk_at(c, cu_seqlens, chunk_indices)
    wait_for_inputs(PDL)
    if chunk * CHUNK < length:
        i = tl.arange(0, CHUNK)
        exists = chunk * CHUNK + i < length
        token = start + chunk * CHUNK + i
        place = token * HEADS + head
        row = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        keys = ((token * (HEADS // GROUP) + head // GROUP) * K)[:, None]
        states = before + (c.to(tl.int64) * HEADS + head) * (K * V) + row[None, :]
        values = place[:, None] * V + row[None, :]
        value_mask = exists[:, None] & (row < V)[None, :]

        g = tl.load(decay + place, mask=exists, other=0.0)
        y = tl.zeros([CHUNK, BLOCK_V], dtype=tl.float32)
        products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            column = first + tl.arange(0, BLOCK_K)
            mask = exists[:, None] & (column < K)[None, :]
            query = tl.load(q + keys + column[None, :], mask=mask, other=0.0)
            key = tl.load(k + keys + column[None, :], mask=mask, other=0.0)
            mask = (column < K)[:, None] & (row < V)[None, :]
            state = tl.load(states + column[:, None] * V, mask=mask, other=0.0)
            y = tl.dot(query, state, y)
            products = tl.dot(query, tl.trans(key), products)
        c_j = tl.load(corrections + values, mask=value_mask, other=0.0)
        since = tl.minimum(g[:, None] - g[None, :], 0.0)  # above the diagonal it would overflow
        products = tl.where(i[:, None] >= i[None, :], products * tl.exp2(since), 0.0)
        y = tl.dot(products.to(c_j.dtype), c_j, y * tl.exp2(g)[:, None]) * scale
        tl.store(o + values, y.to(o.dtype.element_ty), mask=value_mask)


def chunk_output(
    q: Tensor,
    k: Tensor,
    corrections: Tensor,
    before: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> Tensor:
    """o `[T, HV, V]`; `chunked_delta_rule` says what indices may hold.

    Args:
        q, k: `[T, HK, K]`, contiguous, each row of length 1; scaled by `K**-0.5` here.
        corrections: `[T, HV, V]`; before: `[C, HV, K, V]`; decay: `[T, HV]` float32, in powers of
            two: `chunk_states` and `chunk_wy` leave them.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[C, 2]`, int32.
    """
    (tokens, heads, value_dim), (key_heads, key_dim) = corrections.shape, k.shape[1:]
    o = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    block_v = max(16, min(COLUMNS, triton.next_power_of_2(value_dim)))
    grid = (chunk_indices.shape[0], heads, triton.cdiv(value_dim, block_v))
    _output_kernel[grid](
        q,
        k,
        corrections,
        before,
        decay,
        o,
        cu_seqlens,
        chunk_indices,
        key_dim**-0.5,
        HEADS=heads,
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        CHUNK=CHUNK_SIZE,
        BLOCK_K=max(16, min(STEP, triton.next_power_of_2(key_dim))),
        BLOCK_V=block_v,
        num_warps=NUM_WARPS,
        **pdl(),
    )
    return o
