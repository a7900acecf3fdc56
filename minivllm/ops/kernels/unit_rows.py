"""Rows of length 1, and the kernel that makes them of a delta rule's q and k.

In front of the chunked rule (`ops/chunked_delta_rule.py`), where the convolution has not left these
rows as it takes them (`passes/fuse_conv_qk_norm.py`): one launch instead of three copies of column
slices and two L2 norms.

    q, k, v = unit_rows(q, k, v)

Shapes: T tokens, HK key heads, HV value heads, K and V head dims.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.numerics import rows_of

TOKENS = 16  # of a program; 16 rows of 128 columns: 16 elements a thread
NUM_WARPS = 4


@triton.jit
def unit(x):
    """Rows of x over their length, `x / sqrt(sum(x^2) + 1e-6)`, in float32."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _copy_unit(x, y, mask):
    rows = unit(tl.load(x, mask=mask, other=0.0).to(tl.float32))
    tl.store(y, rows.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _unit_rows_kernel(
    q,
    k,
    v,
    unit_q,
    unit_k,
    values,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    exists = token < tokens
    token = token.to(tl.int64)
    value_column = tl.arange(0, BLOCK_V)
    value_mask = exists[:, None] & (value_column < V)[None, :]
    x = v + token[:, None] * v_token + head * v_head + value_column[None, :]
    of_values = (token * HEADS + head)[:, None] * V + value_column[None, :]
    tl.store(values + of_values, tl.load(x, mask=value_mask), mask=value_mask)
    if head % GROUP == 0:  # the first of the value heads that share a key head
        key_head = head // GROUP
        key_column = tl.arange(0, BLOCK_K)
        key_mask = exists[:, None] & (key_column < K)[None, :]
        of_keys = (token * (HEADS // GROUP) + key_head)[:, None] * K + key_column[None, :]
        queries = q + token[:, None] * q_token + key_head * q_head + key_column[None, :]
        _copy_unit(queries, unit_q + of_keys, key_mask)
        keys = k + token[:, None] * k_token + key_head * k_head + key_column[None, :]
        _copy_unit(keys, unit_k + of_keys, key_mask)


def unit_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, `[T, HK, K]`, with rows of length 1, and v, `[T, HV, V]`; all contiguous."""
    (tokens, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[1:]
    unit_q, unit_k, values = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    strides = [s for x in (q, k, v) for s in (rows_of(x).token, rows_of(x).head)]
    _unit_rows_kernel[(triton.cdiv(tokens, TOKENS), heads)](
        q,
        k,
        v,
        unit_q,
        unit_k,
        values,
        tokens,
        *strides,
        HEADS=heads,
        GROUP=heads // key_heads,
        K=key_dim,
        V=value_dim,
        TOKENS=TOKENS,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=NUM_WARPS,
    )
    return unit_q, unit_k, values
