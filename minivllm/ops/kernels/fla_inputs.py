"""Kernel in front of FLA's stages: everything that they take, from what the projections gave.

A program has one chunk of one value head. One launch stands for some fifteen: copies of the column
slices q, k, v, a and b, two L2 norms, the sigmoid, the gate with its running sum, a fill with
zeros, and the arithmetic that finds where each sequence's chunks start. What the convolution leaves
as FLA takes it (`normalized`) is not touched: 94 MB less for 3,840 tokens of the 0.8B shape.

    inputs = fla_inputs(q, k, v, a, b, A_log, dt_bias, cu_seqlens, chunk_indices, normalized)

Shapes: T tokens, N sequences, HK key heads, HV value heads, K and V head dims.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.fla import CHUNK_SIZE, SOLVE_BLOCK
from minivllm.ops.kernels.numerics import rows_of, sigmoid, softplus

LOG2_E = math.log2(math.e)
NUM_WARPS = 8  # 64 rows of 128 columns: 32 elements a thread, 16 bytes a load
GATE_WARPS = 4  # without rows to copy


class FlaInputs(NamedTuple):
    """What FLA's stages take, contiguous.

    Attributes:
        q, k: `[T, HK, K]`, each row of length 1.
        v: `[T, HV, V]`.
        decay: `[T, HV]` float32: the log decays summed from the chunk's start, in powers of two.
        beta: `[T, HV]` float32.
        inverse: `[T, HV, 64]` in k's dtype, to be filled with the inverse of each chunk's
            triangular system; what lies above its diagonal blocks is zero already.
        chunk_offsets: `[N]` int32: the first row of `chunk_indices` of each sequence; not written
            for a sequence without tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    inverse: Tensor
    chunk_offsets: Tensor


@triton.jit
def unit_rows(x):
    """Rows of x over their length, `x / sqrt(sum(x^2) + 1e-6)`, in float32."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _copy_unit(x, y, mask):
    rows = unit_rows(tl.load(x, mask=mask, other=0.0).to(tl.float32))
    tl.store(y, rows.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _inputs_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    cu_seqlens,
    chunk_indices,
    unit_q,
    unit_k,
    values,
    decay,
    beta,
    inverse,
    chunk_offsets,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    a_token,
    b_token,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SOLVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOG2_E: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    n = tl.load(chunk_indices + row * 2)
    chunk = tl.load(chunk_indices + row * 2 + 1)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1) - start.to(tl.int32)
    if (head == 0) & (chunk == 0) & (length > 0):
        tl.store(chunk_offsets + n, row)

    i = tl.arange(0, CHUNK)
    exists = chunk * CHUNK + i < length
    token = start + chunk * CHUNK + i

    place = token * HEADS + head
    if not NORMALIZED:
        value_column = tl.arange(0, BLOCK_V)
        mask_v = exists[:, None] & (value_column < V)[None, :]
        x = v + token[:, None] * v_token + head * v_head + value_column[None, :]
        x = tl.load(x, mask=mask_v)
        tl.store(values + place[:, None] * V + value_column[None, :], x, mask=mask_v)

        if head % GROUP == 0:  # the first of the value heads that share a key head
            key_head = head // GROUP
            key_column = tl.arange(0, BLOCK_K)
            mask_k = exists[:, None] & (key_column < K)[None, :]
            unit = (token * (HEADS // GROUP) + key_head)[:, None] * K + key_column[None, :]
            queries = q + token[:, None] * q_token + key_head * q_head + key_column[None, :]
            _copy_unit(queries, unit_q + unit, mask_k)
            keys = k + token[:, None] * k_token + key_head * k_head + key_column[None, :]
            _copy_unit(keys, unit_k + unit, mask_k)

    write = sigmoid(tl.load(b + token * b_token + head, mask=exists, other=0.0).to(tl.float32))
    tl.store(beta + place, write, mask=exists)
    step = tl.load(a + token * a_token + head, mask=exists, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head).to(tl.float32))
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32)) * LOG2_E
    tl.store(decay + place, tl.cumsum(rate * step, axis=0), mask=exists)

    above = (i // SOLVE)[None, :] > (i // SOLVE)[:, None]
    zeros = tl.zeros([CHUNK, CHUNK], dtype=inverse.dtype.element_ty)
    tl.store(inverse + place[:, None] * CHUNK + i[None, :], zeros, mask=exists[:, None] & above)


def fla_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    normalized: bool = False,
) -> FlaInputs:
    """Arguments as in `fused_gated_delta_rule.define_varlen`; rows past a sequence are skipped.

    Args:
        normalized: q and k are of length 1 already; then they and v stay where they are, or are
            made contiguous.
    """
    (tokens, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[1:]
    device = q.device

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    inputs = FlaInputs(
        q=q.contiguous() if normalized else empty(tokens, key_heads, key_dim, dtype=q.dtype),
        k=k.contiguous() if normalized else empty(tokens, key_heads, key_dim, dtype=k.dtype),
        v=v.contiguous() if normalized else empty(tokens, heads, value_dim, dtype=v.dtype),
        decay=empty(tokens, heads, dtype=torch.float32),
        beta=empty(tokens, heads, dtype=torch.float32),
        inverse=empty(tokens, heads, CHUNK_SIZE, dtype=k.dtype),
        chunk_offsets=empty(cu_seqlens.shape[0] - 1, dtype=torch.int32),
    )
    strides = [s for x in (q, k, v) for s in (rows_of(x).token, rows_of(x).head)]
    _inputs_kernel[(chunk_indices.shape[0], heads)](
        q,
        k,
        v,
        a,
        b,
        A_log.contiguous(),
        dt_bias.contiguous(),
        cu_seqlens.contiguous(),
        chunk_indices.contiguous(),
        *inputs,
        *strides,
        rows_of(a).token,
        rows_of(b).token,
        HEADS=heads,
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        CHUNK=CHUNK_SIZE,
        SOLVE=SOLVE_BLOCK,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=triton.next_power_of_2(value_dim),
        LOG2_E=LOG2_E,
        NORMALIZED=normalized,
        num_warps=GATE_WARPS if normalized else NUM_WARPS,
    )
    return inputs
