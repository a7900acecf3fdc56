"""Kernels of `ops/linear.py`: products with few rows of x, bound by reading the weight once.

    y = linear(x, w)                     # tile_for("linear", rows, dtype) says how it is cut

Two kernels. For one or a few rows, `_vector_kernel`: a program holds whole rows of the weight in
registers, multiplies and sums in float32. For up to 64 rows, `_dot_kernel`: the tensor cores, with
rows of the weight as their long side. Above, the vendor's product. A weight with few rows gives
too few tiles to occupy the device, so its columns are split as well and the parts are summed by
the kernel behind, which has an addition and a norm to do anyway.

x may have to be made first (a gated norm, a gate): each program does so for the columns it reads.

Shapes: M rows of x, `[N, K]` weight, S splits of K; K is H heads of D where x has heads.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.gating import sigmoid_mul, silu_mul
from minivllm.ops.kernels.launch import ask_for, is_hopper, let_next_start, pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rounded, row_tile, rows_of, sigmoid, silu
from minivllm.ops.kernels.rms_norm import _normalized, add_rms_norm, gated_rms_norm

# what is done to x before the product, and to the product
PLAIN, SIGMOID_GATE, GATED_NORM = (tl.constexpr(i) for i in range(3))
LINEAR, SILU_MUL, PARTS = (tl.constexpr(i) for i in range(3))


@dataclass(frozen=True)
class Tile:
    """How a product is cut.

    Attributes:
        kernel: "vector", "dot", or "torch" for the vendor's.
        rows: of x that a program computes; a power of two, at least 16 for "dot".
        block_n: rows of the weight that a program reads.
        num_warps: of a program.
        num_stages: steps of "dot" whose loads are under way at once.
        programs: K is split so that there are about so many of "dot"; 0: it is not split.
        early: steps of "dot" whose weights are in registers before x is there: at most 2.
        ahead: steps behind these whose weights are asked for in L2 before x is there.
    """

    kernel: str
    rows: int = 0
    block_n: int = 0
    num_warps: int = 4
    num_stages: int = 1
    programs: int = 0
    early: int = 0
    ahead: int = 0


TORCH = Tile("torch")
# By use, in order of the rows of x that a tile can take; behind the last one, TORCH. Measured on
# an H200 at the 0.8B's shapes (bench/linear.py prints the times, and those of other tiles).
TILES: dict[str, tuple[Tile, ...]] = {
    "linear": (
        Tile("vector", 1, 8, 2),
        Tile("dot", 16, 64, 4, 6, ahead=2),
        Tile("dot", 32, 64, 4, 6, ahead=2),
        Tile("dot", 64, 64, 4, 5, ahead=2),
    ),
    "head": (
        Tile("vector", 1, 8, 4),
        Tile("dot", 16, 64, 4, 4),
        Tile("dot", 32, 64, 4, 4),
        Tile("dot", 64, 64, 4, 3),
    ),
    "silu_mul": (
        Tile("vector", 1, 2, 2),
        Tile("dot", 16, 64, 4, 6, ahead=2),
        Tile("dot", 32, 64, 4, 6, ahead=2),
        Tile("dot", 64, 64, 4, 4, ahead=2),
    ),
    "add_rms_norm": (
        Tile("vector", 1, 4, 4),
        Tile("vector", 2, 4, 4),
        Tile("dot", 16, 64, 4, 4, 128, ahead=2),
        Tile("dot", 32, 64, 4, 4, 128, ahead=2),
        Tile("dot", 64, 64, 4, 4, 128, ahead=2),
    ),
    # with x made on the way
    "gated_add_rms_norm": (
        Tile("vector", 1, 8, 8),
        Tile("vector", 2, 4, 4),
        Tile("dot", 16, 64, 4, 2, 128, early=2),
        Tile("dot", 32, 64, 4, 4, 128, ahead=2),
    ),
}
HEAD = 65536  # rows of a weight from which on it is a head
BLOCK_K = 128  # columns a step of "dot"; where x has heads, a step is a head or a part of one
VECTOR_COLUMNS = 4096  # of the weight that a program of "vector" holds at once
OTHER_SHARED_MEMORY = 96 * 1024  # bytes that a program may take on other devices than Hopper's


@functools.cache
def tile_for(use: str, rows: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` rows of x, by the table; float32 is not for the tensor cores."""
    for tile in TILES[use]:
        if 0 < rows <= tile.rows and (tile.kernel != "dot" or dtype.itemsize == 2):
            return tile
    return TORCH


@triton.jit
def _made(
    values, gates, gate_weight, eps, D: tl.constexpr, MAKE: tl.constexpr, dtype: tl.constexpr
):
    """x, rounded, from its parts: rows of one head each."""
    if MAKE == GATED_NORM:
        normed = rounded(gate_weight[None, :] * rounded(_normalized(values, eps, D), dtype), dtype)
        return rounded(normed * silu(gates), dtype)
    return rounded(values * rounded(sigmoid(gates), dtype), dtype)


@triton.jit(do_not_specialize=["rows"])
def _vector_kernel(
    x,
    gate,
    gate_weight,
    w,
    y,
    rows,
    x_token,
    x_head,
    gate_token,
    gate_head,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    UP: tl.constexpr,
    MAKE: tl.constexpr,
    END: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    column = h[:, None] * D + d[None, :]
    d_mask = (d < D)[None, :]
    place = w + n[:, None, None] * K + column[None, :, :]
    n_mask = (n < N)[:, None, None]
    mask = n_mask & (d_mask & (column < K))[None, :, :]
    weights = tl.load(place, mask=mask, other=0.0)
    if END == SILU_MUL:
        ups = tl.load(place + UP * K, mask=mask, other=0.0)
    if MAKE == GATED_NORM:
        head_weight = tl.load(gate_weight + d, mask=d < D, other=0.0).to(tl.float32)
    else:
        head_weight = 0.0
    wait_for_inputs(PDL)
    m = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up_total = total
    for first in tl.static_range(0, K, BLOCK_H * D):
        if first > 0:
            mask = n_mask & (d_mask & (first + column < K))[None, :, :]
            weights = tl.load(place + first, mask=mask, other=0.0)
            if END == SILU_MUL:
                ups = tl.load(place + UP * K + first, mask=mask, other=0.0)
        x_mask = d_mask & (first + column < K)
        head = first // D + h
        for row in tl.static_range(ROWS):
            token = tl.minimum(row, rows - 1).to(tl.int64)
            source = x + token * x_token + head[:, None] * x_head + d[None, :]
            values = tl.load(source, mask=x_mask, other=0.0).to(tl.float32)
            if MAKE != PLAIN:
                source = gate + token * gate_token + head[:, None] * gate_head + d[None, :]
                gates = tl.load(source, mask=x_mask, other=0.0).to(tl.float32)
                values = _made(values, gates, head_weight, eps, D, MAKE, dtype)
            products = weights.to(tl.float32) * values[None, :, :]
            part = tl.sum(tl.sum(products, axis=2), axis=1)
            total += tl.where((m == row)[:, None], part[None, :], 0.0)
            if END == SILU_MUL:
                products = ups.to(tl.float32) * values[None, :, :]
                part = tl.sum(tl.sum(products, axis=2), axis=1)
                up_total += tl.where((m == row)[:, None], part[None, :], 0.0)
    if END == SILU_MUL:
        total = rounded(silu(rounded(total, dtype)), dtype) * rounded(up_total, dtype)
    target = y + m[:, None] * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _weights(w, n, n_mask, step, d, D: tl.constexpr, K: tl.constexpr):
    """The columns of one step of the rows n; the last step may reach behind K, or lie there."""
    columns = step * D + d
    mask = n_mask[:, None] & ((d < D) & (columns < K))[None, :]
    return tl.load(w + n[:, None] * K + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _columns(
    x,
    gate,
    head_weight,
    rows,
    m,
    step,
    d,
    x_token,
    x_head,
    gate_token,
    gate_head,
    eps,
    D: tl.constexpr,
    K: tl.constexpr,
    PER_HEAD: tl.constexpr,
    MAKE: tl.constexpr,
    dtype: tl.constexpr,
):
    """The columns of one step of x, made if need be; `[rows, D]`."""
    token = m.to(tl.int64)[:, None]
    mask = (m < rows)[:, None] & ((d < D) & (step * D + d < K))[None, :]
    head, inside = step // PER_HEAD, step % PER_HEAD * D + d[None, :]
    values = tl.load(x + token * x_token + head * x_head + inside, mask=mask, other=0.0)
    if MAKE != PLAIN:
        source = gate + token * gate_token + head * gate_head + inside
        gates = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        values = _made(values.to(tl.float32), gates, head_weight, eps, D, MAKE, dtype)
    return values.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x,
    gate,
    gate_weight,
    w,
    y,
    rows,
    x_token,
    x_head,
    gate_token,
    gate_head,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PER_HEAD: tl.constexpr,
    UP: tl.constexpr,
    MAKE: tl.constexpr,
    END: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    start = tl.program_id(1) * STEPS  # this program's first D columns of K
    r = tl.arange(0, BLOCK_N)
    if END == SILU_MUL:  # a row of the gate and one of up in turn: halves that a thread may hold
        n = tl.program_id(0) * (BLOCK_N // 2) + r // 2
        n_mask = n < N
        n = (n + (r % 2) * UP).to(tl.int64)
    else:
        n = (tl.program_id(0) * BLOCK_N + r).to(tl.int64)
        n_mask = n < N
    d = tl.arange(0, BLOCK_D)
    m = tl.arange(0, ROWS)
    if MAKE == GATED_NORM:
        head_weight = tl.load(gate_weight + d, mask=d < D, other=0.0).to(tl.float32)
    else:
        head_weight = 0.0
    if AHEAD > 0:
        places = w + tl.where(n_mask, n, 0) * K + (start + EARLY) * D
        ask_for(places, AHEAD * D * (dtype.primitive_bitwidth // 8))
    if EARLY > 0:
        first = _weights(w, n, n_mask, start, d, D, K)
    if EARLY > 1:
        second = _weights(w, n, n_mask, start + 1, d, D, K)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if EARLY > 0:
        columns = _columns(
            x, gate, head_weight, rows, m, start, d, x_token, x_head, gate_token, gate_head, eps,
            D, K, PER_HEAD, MAKE, dtype,
        )  # fmt: skip
        total = tl.dot(first, tl.trans(columns), total)
    if EARLY > 1:
        columns = _columns(
            x, gate, head_weight, rows, m, start + 1, d, x_token, x_head, gate_token, gate_head,
            eps, D, K, PER_HEAD, MAKE, dtype,
        )  # fmt: skip
        total = tl.dot(second, tl.trans(columns), total)
    for step in tl.range(EARLY, STEPS, num_stages=STAGES):  # bounds that the compiler knows
        weights = _weights(w, n, n_mask, start + step, d, D, K)
        columns = _columns(
            x, gate, head_weight, rows, m, start + step, d, x_token, x_head, gate_token, gate_head,
            eps, D, K, PER_HEAD, MAKE, dtype,
        )  # fmt: skip
        total = tl.dot(weights, tl.trans(columns), total)
    if END == SILU_MUL:
        pairs = tl.permute(tl.reshape(total, [BLOCK_N // 2, 2, ROWS]), [0, 2, 1])
        gates, ups = tl.split(pairs)
        total = rounded(silu(rounded(gates, dtype)), dtype) * rounded(ups, dtype)
        n = (tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)).to(tl.int64)
        n_mask = n < N
    part = tl.program_id(1).to(tl.int64) * rows
    target = y + (part + m)[None, :] * N + n[:, None]
    tl.store(target, total.to(y.dtype.element_ty), mask=n_mask[:, None] & (m < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _sum_add_rms_norm_kernel(
    parts,
    residual,
    weight,
    y,
    total,
    rows,
    residual_token,
    eps,
    offset,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    mask = (row < rows)[:, None] & (d < D)[None, :]
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = row.to(tl.int64)[:, None]
    added = tl.load(residual + token * residual_token + d[None, :], mask=mask, other=0.0)
    values = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for split in tl.static_range(SPLITS):
        source = parts + (split * rows + token) * D + d[None, :]
        values += tl.load(source, mask=mask, other=0.0)
    values = rounded(added.to(tl.float32) + rounded(values, dtype), dtype)
    target = token * D + d[None, :]
    tl.store(total + target, values.to(dtype), mask=mask)
    normalized = _normalized(values, eps, D)
    if CAST_FIRST:
        result = w[None, :] * rounded(normalized, dtype)
    else:
        result = normalized * (offset + w)[None, :]
    tl.store(y + target, result.to(dtype), mask=mask)


@dataclass(frozen=True)
class Operand:
    """x, or what it is made of.

    Attributes:
        x: `[M, K]`, or `[M, H, D]` with a gate.
        gate: x's shape; None: x as it is.
        norm_weight: `[D]`; None: x * sigmoid(gate).
        eps: of the norm.
    """

    x: Tensor
    gate: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 0.0

    @property
    def make(self) -> int:
        """What a kernel has to do to x."""
        if self.gate is None:
            return PLAIN.value
        return SIGMOID_GATE.value if self.norm_weight is None else GATED_NORM.value

    def made(self) -> Tensor:
        """`[M, K]`, by a kernel of its own if there is something to do."""
        if self.gate is None:
            return self.x
        if self.norm_weight is None:
            return sigmoid_mul(self.x, self.gate).flatten(1)
        return gated_rms_norm(self.x, self.gate, self.norm_weight, self.eps).flatten(1)


def product(tile: Tile, operand: Operand, w: Tensor, end: tl.constexpr, size: int) -> Tensor:
    """x @ w.T and what is done to it: `[M, size]`, or float32 parts `[S, M, size]`.

    Args:
        tile: not `TORCH`.
        end: `LINEAR`, `SILU_MUL` or `PARTS`.
        size: rows of the weight, or of its halves that count.
    """
    x, gate = operand.x, operand.x if operand.gate is None else operand.gate
    rows, gates = rows_of(x), rows_of(gate)
    w = w.contiguous()
    columns = w.shape[1]
    vector = tile.kernel == "vector"
    if operand.make == PLAIN.value:
        head_dim = min(VECTOR_COLUMNS, triton.next_power_of_2(columns)) if vector else BLOCK_K
        x_head = gate_head = head_dim
    else:
        head_dim, x_head, gate_head = x.shape[-1], rows.head, gates.head
    outputs = tile.block_n  # of a program
    splits, options = 1, {}
    if vector:
        block_d = triton.next_power_of_2(head_dim)
        heads = triton.next_power_of_2(triton.cdiv(columns, head_dim))
        options["BLOCK_H"] = min(heads, max(1, VECTOR_COLUMNS // block_d))
    else:
        # a norm needs its head in one piece, a gate does not
        per_head = head_dim // BLOCK_K if operand.norm_weight is None else 1
        per_head = max(1, per_head) if head_dim % BLOCK_K == 0 else 1
        head_dim //= per_head
        block_d = max(16, triton.next_power_of_2(head_dim))
        outputs //= 2 if end == SILU_MUL else 1
        pieces = triton.cdiv(columns, head_dim)
        steps = triton.cdiv(pieces, max(1, tile.programs // triton.cdiv(size, outputs)))
        splits, stages, early = triton.cdiv(pieces, steps), tile.num_stages, min(tile.early, steps)
        ahead = min(tile.ahead, steps - early)
        if splits * steps * head_dim != columns:
            ahead = 0  # the last steps end behind the weight
        if head_dim * w.element_size() % 16 or w.data_ptr() % 16:
            ahead = 0  # not what can be asked for
        if not pdl()["PDL"]:
            early = ahead = 0  # nothing to wait for
        if not is_hopper():
            step_bytes = (tile.block_n + 2 * tile.rows) * block_d * w.element_size()
            stages = max(1, min(stages, OTHER_SHARED_MEMORY // step_bytes))
        options |= {"PER_HEAD": per_head, "STEPS": steps, "STAGES": stages}
        options |= {"EARLY": early, "AHEAD": ahead}
    parts = end == PARTS
    shape = (splits, x.shape[0], size) if parts else (x.shape[0], size)
    y = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    kernel = _vector_kernel if vector else _dot_kernel
    kernel[(triton.cdiv(size, outputs), splits)](
        x,
        gate,
        w if operand.norm_weight is None else operand.norm_weight.contiguous(),
        w,
        y,
        x.shape[0],
        rows.token,
        x_head,
        gates.token,
        gate_head,
        operand.eps,
        N=size,
        K=columns,
        D=head_dim,
        UP=w.shape[0] // 2,
        MAKE=operand.make,
        END=end.value,
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        num_warps=tile.num_warps,
        **options,
        **pdl(),
    )
    return y


def product_add_rms_norm(
    tile: Tile,
    operand: Operand,
    w: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """`product`, the sum of its parts, the addition of the residual and the norm."""
    assert not (cast_first and offset), "cast_first knows no offset"
    if tile.kernel == "torch":
        y = F.linear(operand.made(), w)
        return add_rms_norm(y, residual, weight, eps, offset, cast_first)
    rows, size = operand.x.shape[0], w.shape[0]
    parts = product(tile, operand, w, PARTS, size)
    y = torch.empty((rows, size), dtype=w.dtype, device=w.device)
    total = torch.empty_like(y)
    row = row_tile(size)
    _sum_add_rms_norm_kernel[(triton.cdiv(rows, row.rows),)](
        parts,
        residual,
        weight.contiguous(),
        y,
        total,
        rows,
        rows_of(residual).token,
        eps,
        offset,
        D=size,
        SPLITS=parts.shape[0],
        CAST_FIRST=cast_first,
        BLOCK_ROWS=row.rows,
        BLOCK_D=row.columns,
        num_warps=row.num_warps,
        **pdl(),
    )
    return y, total


def linear(x: Tensor, w: Tensor) -> Tensor:
    """As `ops.linear.define_linear`."""
    tile = tile_for("head" if w.shape[0] >= HEAD else "linear", x.shape[0], w.dtype)
    if tile.kernel == "torch":
        return F.linear(x, w)
    return product(tile, Operand(x), w, LINEAR, w.shape[0])


def linear_silu_mul(x: Tensor, w: Tensor, size: int) -> Tensor:
    """As `ops.linear.define_linear_silu_mul`."""
    tile = tile_for("silu_mul", x.shape[0], w.dtype)
    if tile.kernel == "torch":
        both, half = F.linear(x, w), w.shape[0] // 2
        return silu_mul(both[:, :size], both[:, half : half + size])
    return product(tile, Operand(x), w, SILU_MUL, size)


def linear_add_rms_norm(
    x: Tensor,
    w: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """As `ops.linear.define_linear_add_rms_norm`."""
    tile = tile_for("add_rms_norm", x.shape[0], w.dtype)
    return product_add_rms_norm(tile, Operand(x), w, residual, norm_weight, eps, offset, cast_first)


def gated_rms_norm_linear_add_rms_norm(
    x: Tensor,
    gate: Tensor,
    gated_norm_weight: Tensor,
    gated_norm_eps: float,
    w: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """As `ops.linear.define_gated_rms_norm_linear_add_rms_norm`."""
    operand = Operand(x, gate, gated_norm_weight, gated_norm_eps)
    tile = tile_for("gated_add_rms_norm", x.shape[0], w.dtype)
    return product_add_rms_norm(tile, operand, w, residual, norm_weight, eps, offset, cast_first)


def sigmoid_mul_linear_add_rms_norm(
    x: Tensor,
    gate: Tensor,
    w: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """As `ops.linear.define_sigmoid_mul_linear_add_rms_norm`."""
    operand = Operand(x, gate)
    tile = tile_for("gated_add_rms_norm", x.shape[0], w.dtype)
    return product_add_rms_norm(tile, operand, w, residual, norm_weight, eps, offset, cast_first)
