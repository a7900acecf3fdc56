"""Kernel of `ops/qk_norm_rope.py`: one launch for the heads of q and of k.

A program takes some heads of some tokens, so that cos and sin are computed once for all of them. A
head is loaded as a whole, for its norm, and the two halves that turn once more, each as a tile of
its own: a rotation then needs no exchange between threads, and every access is 16 bytes wide.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, rows_of

# tokens and heads a program, warps: with few tokens latency counts, with many the instructions
TILE = 1, 2, 2
MANY_TOKENS = 256
TILE_OF_MANY = 8, 2, 4


@triton.jit
def _turn(
    source,
    weight,
    target,
    head_stride,
    exists,
    head,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalise and rotate the heads `head` of tokens, whose rows start at the pointers."""
    dtype: tl.constexpr = target.dtype.element_ty
    d = tl.arange(0, BLOCK_D)[None, None, :]
    i = tl.arange(0, BLOCK_HALF)[None, None, :]
    turns = exists & (i < HALF)
    source += head * head_stride
    target += head * D
    x = tl.load(source + d, mask=exists & (d < D), other=0.0).to(tl.float32)
    first = tl.load(source + i, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=turns, other=0.0).to(tl.float32)
    # of each row, so that it lies in the threads that need it
    place = weight + head * 0 + i
    w_first = 1.0 + tl.load(place, mask=turns, other=0.0).to(tl.float32)
    w_second = 1.0 + tl.load(place + HALF, mask=turns, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=2, keep_dims=True) / D + eps)
    if D > 2 * HALF:
        w = 1.0 + tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        passes = exists & (d >= 2 * HALF) & (d < D)
        tl.store(target + d, (x * scale * w).to(dtype), mask=passes)
    first = rounded(first * scale * w_first, dtype)
    second = rounded(second * scale * w_second, dtype)
    turned = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    tl.store(target + i, turned.to(dtype), mask=turns)
    turned = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    tl.store(target + HALF + i, turned.to(dtype), mask=turns)


@triton.jit(do_not_specialize=["tokens"])
def _qk_norm_rope_kernel(
    q,
    k,
    q_weight,
    k_weight,
    positions,
    inv_freq,
    q_out,
    k_out,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    dtype: tl.constexpr = q_out.dtype.element_ty
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    i = tl.arange(0, BLOCK_HALF)
    frequency = tl.load(inv_freq + i, mask=i < HALF, other=0.0)
    angle = position[:, None, None] * frequency[None, None, :]
    cos, sin = rounded(tl.cos(angle), dtype), rounded(tl.sin(angle), dtype)
    exists = (token < tokens)[:, None, None]
    row = token.to(tl.int64)[:, None, None]
    head = tl.arange(0, BLOCK_HEADS)[None, :, None]
    if block < q_blocks:
        head += block * BLOCK_HEADS
        _turn(
            q + row * q_token, q_weight, q_out + row * (HEADS * D), q_head,
            exists & (head < HEADS), head, cos, sin, eps, D, HALF,
            BLOCK_HALF, BLOCK_D,
        )  # fmt: skip
    else:
        head += (block - q_blocks) * BLOCK_HEADS
        _turn(
            k + row * k_token, k_weight, k_out + row * (KV_HEADS * D), k_head,
            exists & (head < KV_HEADS), head, cos, sin, eps, D, HALF,
            BLOCK_HALF, BLOCK_D,
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
    block_tokens, block_heads, warps = TILE_OF_MANY if q.shape[0] >= MANY_TOKENS else TILE
    blocks = triton.cdiv(q_rows.heads, block_heads) + triton.cdiv(k_rows.heads, block_heads)
    _qk_norm_rope_kernel[(triton.cdiv(q.shape[0], block_tokens), blocks)](
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        positions.contiguous(),
        inv_freq.contiguous(),
        q_out,
        k_out,
        q.shape[0],
        q_rows.token,
        q_rows.head,
        k_rows.token,
        k_rows.head,
        eps,
        HEADS=q_rows.heads,
        KV_HEADS=k_rows.heads,
        D=dim,
        HALF=half,
        BLOCK_TOKENS=block_tokens,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=warps,
        **pdl(),
    )
    return q_out, k_out
