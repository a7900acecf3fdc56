"""Kernels of `ops/gating.py`: elementwise over rows whose sources are strided."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, row_tile, rows_of, sigmoid, silu

SILU_BLOCK = 1024  # columns a program; a row of the MLP is several thousand wide
SILU_WARPS = 4


@triton.jit
def _silu_mul_kernel(
    gate, up, y, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gates = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * SIZE + column, (rounded(silu(gates), dtype) * ups).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _sigmoid_mul_kernel(
    x,
    gate,
    y,
    rows,
    x_token,
    x_head,
    gate_token,
    gate_head,
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
    target = row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(y + target, (values * rounded(sigmoid(gates), dtype)).to(dtype), mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As `ops.gating.define_silu_mul`."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    tokens, size = gate.shape
    _silu_mul_kernel[(tokens, triton.cdiv(size, SILU_BLOCK))](
        gate,
        up,
        y,
        rows_of(gate).token,
        rows_of(up).token,
        SIZE=size,
        BLOCK=SILU_BLOCK,
        num_warps=SILU_WARPS,
        **pdl(),
    )
    return y


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """As `ops.gating.define_sigmoid_mul`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, gates = rows_of(x), rows_of(gate)
    tile = row_tile(x.shape[-1])
    _sigmoid_mul_kernel[(triton.cdiv(rows.count, tile.rows),)](
        x,
        gate,
        y,
        rows.count,
        rows.token,
        rows.head,
        gates.token,
        gates.head,
        HEADS=rows.heads,
        D=x.shape[-1],
        BLOCK_ROWS=tile.rows,
        BLOCK_D=tile.columns,
        num_warps=tile.num_warps,
        **pdl(),
    )
    return y
