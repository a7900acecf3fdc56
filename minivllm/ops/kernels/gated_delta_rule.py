"""Kernel of `ops/gated_delta_rule_slots.py`: one token a sequence on a pool of states.

A program holds some value rows of one head's state in registers, reads them once and writes them
once. One warp has whole rows of K, so both sums over K are shuffles and nothing waits at a
barrier; the norms of q and k and the gates are small enough for every program to repeat.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import let_next_start, pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, rows_of, sigmoid, softplus

BLOCK_BYTES = 32  # of a column: with K = 128, a program asks for 4 KiB of the state at once
BLOCK_ELEMENTS = 2048  # at most: 64 registers a thread
NUM_WARPS = 1


@triton.jit
def _unit(x, dtype: tl.constexpr):
    """`x / sqrt(sum(x^2) + 1e-6)`, rounded to `dtype`."""
    return rounded(x * tl.rsqrt(tl.sum(x * x) + 1e-6), dtype)


@triton.jit
def _decode_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    slots,
    o,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    a_token,
    b_token,
    state_slot,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if EARLY:
        let_next_start(PDL)
    else:
        wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    row_mask, column_mask = row < V, column < K
    mask = row_mask[:, None] & column_mask[None, :]
    slot = tl.load(slots + n).to(tl.int64)
    place = state + slot * state_slot + head * (V * K) + row[:, None] * K + column[None, :]
    s = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    if EARLY:
        wait_for_inputs(PDL)

    key_head = head // GROUP
    query = tl.load(q + n * q_token + key_head * q_head + column, mask=column_mask, other=0.0)
    key = tl.load(k + n * k_token + key_head * k_head + column, mask=column_mask, other=0.0)
    value = tl.load(v + n * v_token + head * v_head + row, mask=row_mask, other=0.0)
    query = _unit(query.to(tl.float32), q.dtype.element_ty) * scale
    key = _unit(key.to(tl.float32), k.dtype.element_ty)
    beta = rounded(sigmoid(tl.load(b + n * b_token + head).to(tl.float32)), b.dtype.element_ty)
    step = softplus(tl.load(a + n * a_token + head).to(tl.float32) + bias)
    decay = tl.exp(-rate * step)

    s = s * decay
    error = value.to(tl.float32) - tl.sum(s * key[None, :], axis=1)
    s = s + (beta * error)[:, None] * key[None, :]
    tl.store(place, s.to(state.dtype.element_ty), mask=mask)
    result = tl.sum(s * query[None, :], axis=1)
    tl.store(o + (n * HEADS + head) * V + row, result.to(o.dtype.element_ty), mask=row_mask)


def fused_gated_delta_rule_decode_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    early: bool = False,
) -> Tensor:
    """As `ops.gated_delta_rule_slots.define_decode_slots`; a slot of the pool is contiguous."""
    sequences, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1:]
    assert state[0].is_contiguous()
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    strides = [s for x in (q, k, v) for s in (rows_of(x).token, rows_of(x).head)]
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(BLOCK_BYTES // state.element_size(), BLOCK_ELEMENTS // block_k)
    _decode_kernel[(triton.cdiv(value_dim, block_v), heads, sequences)](
        q,
        k,
        v,
        a,
        b,
        A_log.contiguous(),
        dt_bias.contiguous(),
        state,
        slots.contiguous(),
        o,
        *strides,
        rows_of(a).token,
        rows_of(b).token,
        state.stride(0),
        key_dim**-0.5,
        HEADS=heads,
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        EARLY=early,
        num_warps=NUM_WARPS,
        **pdl(),
    )
    return o
