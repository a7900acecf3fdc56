"""Kernel of `ops/chunked_delta_rule.py`: the WY representation of each chunk, from raw gates.

Within a chunk of 64 tokens the delta rule is a triangular system (Yang et al., Gated Delta
Networks, 2024). With k, v and beta of its tokens, the summed log decays g, and

    A_ij = beta_i exp(g_i - g_j) (k_i . k_j)  for j < i, else 0

this solves `(I + A) u = beta v` and `(I + A) w = beta exp(g) k`: u is what the chunk writes into
an empty state, w what it takes away from one (`kernels/chunk_states.py`). A program has one chunk
of one value head, and keeps the system to itself. Its four blocks of 16 on the diagonal are
inverted together in float32, row by row; products of the tensor cores (tf32) join them to two
blocks of 32 and to the whole. Beta and decays are multiplied into the inverse, so that keys and
values enter the last products as they lie in memory.

    wy = chunk_wy(k, v, a, b, A_log, dt_bias, cu_seqlens, chunk_indices)

Shapes: T tokens, N sequences, C chunks, HK key heads, HV value heads, K and V head dims.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.chunks import CHUNK_SIZE
from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, rows_of, sigmoid, softplus

LOG2_E = math.log2(math.e)
BLOCK = 16  # tokens: a warp has the rows of one block, so its inverse needs no other warp
NUM_WARPS = CHUNK_SIZE // BLOCK


class ChunkWy(NamedTuple):
    """What the later stages take, contiguous; not written where there is no token or chunk.

    Attributes:
        w: `[T, HV, K]`; u: `[T, HV, V]`, in k's dtype.
        decay: `[T, HV]` float32: the log decays summed from the chunk's start, in powers of two.
        chunk_offsets: `[N]` int32: the first row of `chunk_indices` of each sequence that has
            tokens.
    """

    w: Tensor
    u: Tensor
    decay: Tensor
    chunk_offsets: Tensor


@triton.jit
def chunk_at(row, cu_seqlens, chunk_indices):
    """Of a row of `chunk_indices`: its sequence, the chunk in it, and where that starts and how
    long it is, in tokens. The host has written both, so they may be read before a wait."""
    n = tl.load(chunk_indices + row * 2)
    chunk = tl.load(chunk_indices + row * 2 + 1)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1) - start.to(tl.int32)
    return n, chunk, start, length


@triton.jit
def _eliminated(inverse, blocks, row, column, i):
    """A step of the substitution in all blocks: row i is done, those below lose their part of it.

    Args:
        inverse, blocks: `[4, 16, 16]`.
    """
    of_column = tl.sum(tl.where(column == i, blocks, 0.0), axis=2)
    of_row = tl.sum(tl.where(row == i, inverse, 0.0), axis=1)
    return inverse - of_column[:, :, None] * of_row[:, None, :]


@triton.jit
def _merged(inverse, lower):
    """The inverse of blocks twice as large, from theirs and the quarters between them.

    `[[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]`, for all blocks of `[64, 64]` at once.
    """
    below = tl.dot(inverse, lower, input_precision="tf32")
    return inverse - tl.dot(below, inverse, input_precision="tf32")


@triton.jit
def _wy_kernel(
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    cu_seqlens,
    chunk_indices,
    w,
    u,
    decay,
    chunk_offsets,
    a_token,
    b_token,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOG2_E: tl.constexpr,
    PDL: tl.constexpr,
):
    c = tl.program_id(0)
    head = tl.program_id(1)
    n, chunk, start, length = chunk_at(c, cu_seqlens, chunk_indices)
    wait_for_inputs(PDL)
    if chunk * CHUNK < length:
        if (head == 0) & (chunk == 0):
            tl.store(chunk_offsets + n, c)
        dtype: tl.constexpr = k.dtype.element_ty
        i = tl.arange(0, CHUNK)
        exists = chunk * CHUNK + i < length
        token = start + chunk * CHUNK + i
        key, value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        key_mask = exists[:, None] & (key < K)[None, :]
        value_mask = exists[:, None] & (value < V)[None, :]
        place = token * HEADS + head
        write = tl.load(b + token * b_token + head, mask=exists, other=0.0).to(tl.float32)
        step = tl.load(a + token * a_token + head, mask=exists, other=0.0).to(tl.float32)
        step += tl.load(dt_bias + head).to(tl.float32)
        rate = -tl.exp(tl.load(A_log + head).to(tl.float32)) * LOG2_E
        keys = (token * (HEADS // GROUP) + head // GROUP)[:, None] * K + key[None, :]
        keys = tl.load(k + keys, mask=key_mask, other=0.0)
        values = tl.load(v + place[:, None] * V + value[None, :], mask=value_mask, other=0.0)

        beta = rounded(sigmoid(write), b.dtype.element_ty)
        g = tl.cumsum(rate * softplus(step), axis=0)
        tl.store(decay + place, g, mask=exists)

        row, column = i[:, None], i[None, :]
        products = tl.dot(keys, tl.trans(keys)) * beta[:, None]
        since = tl.minimum(g[:, None] - g[None, :], 0.0)  # above the diagonal it would overflow
        lower = tl.where(row > column, products * tl.exp2(since), 0.0)

        # the blocks on the diagonal one behind the other, their inverses back to where they were
        COUNT: tl.constexpr = CHUNK // BLOCK
        j = tl.arange(0, COUNT)
        own = j[:, None, None, None] == j[None, None, :, None]
        blocks = tl.reshape(lower, [COUNT, BLOCK, COUNT, BLOCK])
        blocks = tl.sum(tl.where(own, blocks, 0.0), axis=2)
        of_row = tl.arange(0, BLOCK)[None, :, None]
        of_column = tl.arange(0, BLOCK)[None, None, :]
        inverse = tl.where(of_row == of_column, 1.0, tl.zeros_like(blocks))
        for done in range(BLOCK - 1):
            inverse = _eliminated(inverse, blocks, of_row, of_column, done)
        inverse = tl.where(own, inverse[:, :, None, :], 0.0)
        inverse = tl.reshape(inverse, [CHUNK, CHUNK])

        size = BLOCK
        for _ in tl.static_range(2):
            between = (row // size != column // size) & (row // (2 * size) == column // (2 * size))
            inverse = _merged(inverse, tl.where(between, lower, 0.0))
            size *= 2

        solved = tl.dot((inverse * beta[None, :]).to(dtype), values)
        tl.store(u + place[:, None] * V + value[None, :], solved.to(dtype), mask=value_mask)
        solved = tl.dot((inverse * (beta * tl.exp2(g))[None, :]).to(dtype), keys)
        tl.store(w + place[:, None] * K + key[None, :], solved.to(dtype), mask=key_mask)


def chunk_wy(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> ChunkWy:
    """u, w and the summed decays of every chunk; `chunked_delta_rule` says what indices may hold.

    Args:
        k: `[T, HK, K]`, each row of length 1; v: `[T, HV, V]`, in one dtype.
        a, b: `[T, HV]`; A_log, dt_bias: `[HV]`.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[C, 2]`, int32.
    """
    (tokens, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]

    def empty(*shape: int, dtype: torch.dtype = k.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    wy = ChunkWy(
        w=empty(tokens, heads, key_dim),
        u=empty(tokens, heads, value_dim),
        decay=empty(tokens, heads, dtype=torch.float32),
        chunk_offsets=empty(cu_seqlens.shape[0] - 1, dtype=torch.int32),
    )
    _wy_kernel[(chunk_indices.shape[0], heads)](
        k.contiguous(),
        v.contiguous(),
        a,
        b,
        A_log.contiguous(),
        dt_bias.contiguous(),
        cu_seqlens.contiguous(),
        chunk_indices.contiguous(),
        *wy,
        rows_of(a).token,
        rows_of(b).token,
        HEADS=heads,
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        CHUNK=CHUNK_SIZE,
        BLOCK=BLOCK,
        BLOCK_K=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        LOG2_E=LOG2_E,
        num_warps=NUM_WARPS,
        **pdl(),
    )
    return wy
