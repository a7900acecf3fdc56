"""Arithmetic that several kernels share, all in float32, and the blocks of row-wise kernels.

y = rounded(silu(gate), x.dtype.element_ty) * up
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x as a tensor of `dtype` would hold it, in float32 again."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, and x above 20, as `torch.nn.functional.softplus`.

    `log(1 + e)` alone loses the digits of a small e; dividing by what 1 + e really added gives
    them back.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = u == 1.0
    log1p = tl.where(small, e, tl.log(u) * (e / tl.where(small, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@dataclass(frozen=True)
class RowTile:
    """What one program of a row-wise kernel covers.

    Attributes:
        rows: rows a program.
        columns: a power of two, at least the row's length.
        num_warps: eight elements a thread: a 16-byte access in half precision.
    """

    rows: int
    columns: int
    num_warps: int


@functools.cache
def row_tile(length: int, elements: int = 1024) -> RowTile:
    """The tile of rows of `length`: short rows share a program of about `elements` elements.

    It depends on nothing that changes from call to call, so a model compiles one variant.
    """
    columns = triton.next_power_of_2(length)
    rows = max(1, elements // columns)
    return RowTile(rows, columns, min(16, max(1, rows * columns // 256)))


@dataclass(frozen=True)
class Rows:
    """`[T, D]` or `[T, H, D]` as rows of D elements.

    Attributes:
        count: T * H.
        heads: H; 1 for two dims.
        token, head: strides of the two outer dims, in elements.
    """

    count: int
    heads: int
    token: int
    head: int


def rows_of(x: Tensor) -> Rows:
    """The rows of x, whose last dim must be contiguous."""
    assert x.dim() in (2, 3) and (x.shape[-1] == 1 or x.stride(-1) == 1)
    if x.dim() == 2:
        return Rows(x.shape[0], 1, x.stride(0), 0)
    return Rows(x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
