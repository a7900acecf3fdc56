"""Kernel of `ops/qk_norm_rope.py`: one launch for the heads of q and of k.

A program takes some heads of one token, so that cos and sin are computed once for all of them. A
head is held in three parts (the two halves that turn, and the rest), so that a rotation needs no
exchange between threads.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, rows_of

BLOCK_HEADS = 4


@triton.jit
def _turn(
    source,
    weight,
    target,
    head_stride,
    head,
    heads,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Normalise and rotate the heads `head` of one token, whose rows start at the pointers."""
    dtype: tl.constexpr = target.dtype.element_ty
    exists = (head < heads)[:, None]
    i = tl.arange(0, BLOCK_HALF)
    mask = exists & (i < HALF)[None, :]
    place = source + (head * head_stride)[:, None] + i[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    rest_mask = exists
    rest = first
    j = i
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest_mask = exists & (j < D)[None, :]
        rest_place = source + (head * head_stride)[:, None] + j[None, :]
        rest = tl.load(rest_place, mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(squares / D + eps)[:, None]
    w = 1.0 + tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
    first = rounded(first * scale * w[None, :], dtype)
    w = 1.0 + tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    second = rounded(second * scale * w[None, :], dtype)
    place = target + (head * D)[:, None] + i[None, :]
    turned = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    tl.store(place, turned.to(dtype), mask=mask)
    turned = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    tl.store(place + HALF, turned.to(dtype), mask=mask)
    if D > 2 * HALF:
        w = 1.0 + tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)
        place = target + (head * D)[:, None] + j[None, :]
        tl.store(place, (rest * scale * w[None, :]).to(dtype), mask=rest_mask)


@triton.jit
def _qk_norm_rope_kernel(
    q,
    k,
    q_weight,
    k_weight,
    positions,
    inv_freq,
    q_out,
    k_out,
    q_token,
    q_head,
    k_token,
    k_head,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    dtype: tl.constexpr = q_out.dtype.element_ty
    i = tl.arange(0, BLOCK_HALF)
    frequency = tl.load(inv_freq + i, mask=i < HALF, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    cos = rounded(tl.cos(angle), dtype)[None, :]
    sin = rounded(tl.sin(angle), dtype)[None, :]
    head = tl.arange(0, BLOCK_HEADS)
    if block < q_blocks:
        _turn(
            q + token * q_token, q_weight, q_out + token * (HEADS * D), q_head,
            block * BLOCK_HEADS + head, HEADS, cos, sin, eps, D, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _turn(
            k + token * k_token, k_weight, k_out + token * (KV_HEADS * D), k_head,
            (block - q_blocks) * BLOCK_HEADS + head, KV_HEADS, cos, sin, eps, D, HALF,
            BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `ops.qk_norm_rope.define_qk_norm_rope`."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    q_rows, k_rows = rows_of(q), rows_of(k)
    dim, half = q.shape[-1], inv_freq.shape[0]
    blocks = triton.cdiv(q_rows.heads, BLOCK_HEADS) + triton.cdiv(k_rows.heads, BLOCK_HEADS)
    _qk_norm_rope_kernel[(q.shape[0], blocks)](
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        positions.contiguous(),
        inv_freq.contiguous(),
        q_out,
        k_out,
        q_rows.token,
        q_rows.head,
        k_rows.token,
        k_rows.head,
        eps,
        HEADS=q_rows.heads,
        KV_HEADS=k_rows.heads,
        D=dim,
        HALF=half,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * half)),
        num_warps=4,
        **pdl(),
    )
    return q_out, k_out
