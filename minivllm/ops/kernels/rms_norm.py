"""Kernels of `ops/rms_norm.py`: a program normalises one long row, or several short ones."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, row_tile, rows_of, silu


@triton.jit
def _normalized(values, eps, D: tl.constexpr):
    """`x / rms(x)` of each row; columns beyond D hold zeros."""
    mean = tl.sum(values * values, axis=1) / D
    return values * tl.rsqrt(mean + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    rows,
    x_token,
    x_head,
    residual_token,
    residual_head,
    eps,
    offset,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ADD: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (d < D)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    source = (token * x_token + head * x_head)[:, None] + d[None, :]
    values = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    target = row.to(tl.int64)[:, None] * D + d[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if ADD:
        source = (token * residual_token + head * residual_head)[:, None] + d[None, :]
        added = tl.load(residual + source, mask=mask, other=0.0).to(tl.float32)
        values = rounded(added + values, dtype)
        tl.store(total + target, values.to(dtype), mask=mask)
    normalized = _normalized(values, eps, D)
    if CAST_FIRST:
        result = w[None, :] * rounded(normalized, dtype)
    else:
        result = normalized * (offset + w)[None, :]
    tl.store(y + target, result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm_kernel(
    x,
    gate,
    weight,
    y,
    rows,
    x_token,
    x_head,
    gate_token,
    gate_head,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (d < D)[None, :]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    source = (token * x_token + head * x_head)[:, None] + d[None, :]
    values = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    source = (token * gate_token + head * gate_head)[:, None] + d[None, :]
    gates = tl.load(gate + source, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    normalized = rounded(w[None, :] * rounded(_normalized(values, eps, D), dtype), dtype)
    target = row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(y + target, (normalized * silu(gates)).to(dtype), mask=mask)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    assert not (cast_first and offset), "cast_first knows no offset"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    rows, added = rows_of(x), rows_of(x if residual is None else residual)
    tile = row_tile(x.shape[-1])
    _rms_norm_kernel[(triton.cdiv(rows.count, tile.rows),)](
        x,
        residual,
        weight.contiguous(),
        y,
        total,
        rows.count,
        rows.token,
        rows.head,
        added.token,
        added.head,
        eps,
        offset,
        HEADS=rows.heads,
        D=x.shape[-1],
        ADD=residual is not None,
        CAST_FIRST=cast_first,
        BLOCK_ROWS=tile.rows,
        BLOCK_D=tile.columns,
        num_warps=tile.num_warps,
        **pdl(),
    )
    return y, total


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool) -> Tensor:
    """As `ops.rms_norm.define_rms_norm`."""
    return _launch(x, None, weight, eps, offset, cast_first)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    """As `ops.rms_norm.define_add_rms_norm`."""
    return _launch(x, residual, weight, eps, offset, cast_first)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.rms_norm.define_gated_rms_norm`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, gates = rows_of(x), rows_of(gate)
    tile = row_tile(x.shape[-1])
    _gated_rms_norm_kernel[(triton.cdiv(rows.count, tile.rows),)](
        x,
        gate,
        weight.contiguous(),
        y,
        rows.count,
        rows.token,
        rows.head,
        gates.token,
        gates.head,
        eps,
        HEADS=rows.heads,
        D=x.shape[-1],
        BLOCK_ROWS=tile.rows,
        BLOCK_D=tile.columns,
        num_warps=tile.num_warps,
        **pdl(),
    )
    return y
