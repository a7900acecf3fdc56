"""Linears of a decode step: few rows of x, and what stands right before and behind the product.

    y = torch.ops.minivllm.linear(x, weight)

A linear of a few rows is bound by reading its weight, so each launch around it is time lost. The
five ops are a linear alone; gate and up projection with SwiGLU's activation; and a projection into
the residual stream with the addition and the norm behind it, of an x as it is, of one behind the
gated norm of Gated DeltaNet, or of one behind attention's output gate. Each is the composition of
ops that have names of their own, with their roundings; torch is exactly that composition. The
kernels (`kernels/linear.py`) are for at most `MAX_ROWS` rows and compose as well above.

Shapes: T tokens, K input and N output features, H heads of D (K = H * D), I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.examples import columns, vector
from minivllm.ops.gating import define_sigmoid_mul, define_silu_mul
from minivllm.ops.kernels import kernel
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op
from minivllm.ops.rms_norm import CONVENTIONS, EPS, define_add_rms_norm, define_gated_rms_norm

MAX_ROWS = 64  # above, the vendor's product is as fast
MAX_GATED_ROWS = 32  # above, with what gates x: each program of the product repeats it


def define_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for `[T, K]` and `[N, K]`; `[T, N]`."""
    return F.linear(x, weight).contiguous()


def _linear_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def define_linear_silu_mul(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """`silu(gate) * up` of a merged projection.

    Args:
        x: `[T, K]`.
        weight: `[2 * P, K]`: rows from 0 are the gate's, those from P up's.
        size: I, at most P; rows behind it are padding.

    Returns:
        `[T, I]`.
    """
    both, half = F.linear(x, weight), weight.shape[0] // 2
    return define_silu_mul(both[:, :size], both[:, half : half + size])


def _linear_silu_mul_fake(x: Tensor, weight: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[0], size))


def define_linear_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """A projection into the residual stream, and the norm of the sum.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        residual: `[T, N]`.
        norm_weight, eps, offset, cast_first: as in `rms_norm.define_rms_norm`.

    Returns:
        the norm of the sum, and the sum rounded to x's dtype, both `[T, N]`.
    """
    y = F.linear(x, weight)
    return define_add_rms_norm(y, residual, norm_weight, eps, offset, cast_first)


def _linear_add_rms_norm_fake(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(residual.shape), x.new_empty(residual.shape)


def define_gated_rms_norm_linear_add_rms_norm(
    x: Tensor,
    gate: Tensor,
    gated_norm_weight: Tensor,
    gated_norm_eps: float,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """`define_linear_add_rms_norm` of what `rms_norm.define_gated_rms_norm` gives.

    Args:
        x, gate: `[T, H, D]`, in one dtype.
        gated_norm_weight: `[D]`.
        gated_norm_eps: of the norm of x.
    """
    normed = define_gated_rms_norm(x, gate, gated_norm_weight, gated_norm_eps).flatten(1)
    return define_linear_add_rms_norm(
        normed, weight, residual, norm_weight, eps, offset, cast_first
    )


def _gated_rms_norm_linear_add_rms_norm_fake(
    x: Tensor,
    gate: Tensor,
    gated_norm_weight: Tensor,
    gated_norm_eps: float,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(residual.shape), x.new_empty(residual.shape)


def define_sigmoid_mul_linear_add_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    """`define_linear_add_rms_norm` of what `gating.define_sigmoid_mul` gives.

    Args:
        x, gate: `[T, H, D]`, in one dtype.
    """
    gated = define_sigmoid_mul(x, gate).flatten(1)
    return define_linear_add_rms_norm(gated, weight, residual, norm_weight, eps, offset, cast_first)


def _sigmoid_mul_linear_add_rms_norm_fake(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(residual.shape), x.new_empty(residual.shape)


def launches(name: str, tokens: int, dtype: torch.dtype) -> int:
    """How many kernels one of these ops is, on CUDA: the norm is always one of its own.

    Above `MAX_ROWS` rows the parts are what they are without the fusion, and in float32 above one
    row (or two), for which the tensor cores are not exact.
    """
    half = dtype in HALF_DTYPES
    if name == "linear":
        return 1
    if name == "linear_silu_mul":
        return 1 if tokens <= (MAX_ROWS if half else 1) else 2
    if name == "linear_add_rms_norm":
        return 2
    return 2 if tokens <= (MAX_GATED_ROWS if half else 2) else 3


ROWS = (1, 3, 17, 65)  # one of each kernel and tile
_HEADS = ((3, 24), (5, 8), (2, 36), (3, 24))
_OUTPUTS = (40, 136, 75, 24)


def _weight(generator: torch.Generator, dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    """Of a size that keeps the activations'."""
    return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)


def _linear_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [
        (*columns(generator, dtype, rows, (h * d,)), _weight(generator, dtype, outputs, h * d))
        for rows, (h, d), outputs in zip(ROWS, _HEADS, _OUTPUTS, strict=True)
    ]


def _linear_silu_mul_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    return [
        (x, torch.cat([weight, _weight(generator, dtype, *weight.shape)]), size)
        for (x, weight), size in zip(
            _linear_examples(generator, dtype), (40, 130, 72, 21), strict=True
        )
    ]


def _tails(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """weight, residual, norm_weight, eps, offset, cast_first."""
    settings = zip(ROWS, _HEADS, _OUTPUTS, (*CONVENTIONS, CONVENTIONS[0]), strict=True)
    return [
        (
            _weight(generator, dtype, outputs, h * d),
            *columns(generator, dtype, rows, (outputs,)),
            vector(generator, dtype, outputs),
            EPS,
            *convention,
        )
        for rows, (h, d), outputs, convention in settings
    ]


def _linear_add_rms_norm_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    xs = [x for x, _ in _linear_examples(generator, dtype)]
    return [(x, *tail) for x, tail in zip(xs, _tails(generator, dtype), strict=True)]


def _gates(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """x and a gate that is half of each head of a wider projection."""
    pairs = []
    for rows, (h, d) in zip(ROWS, _HEADS, strict=True):
        x, wide = columns(generator, dtype, rows, (h, d), (h, 2 * d))
        pairs.append((x, wide[..., d:]))
    return pairs


def _gated_rms_norm_linear_add_rms_norm_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    return [
        (x, gate, vector(generator, dtype, x.shape[-1]), EPS, *tail)
        for (x, gate), tail in zip(_gates(generator, dtype), _tails(generator, dtype), strict=True)
    ]


def _sigmoid_mul_linear_add_rms_norm_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    return [
        (*pair, *tail)
        for pair, tail in zip(_gates(generator, dtype), _tails(generator, dtype), strict=True)
    ]


# float32: up to a hundred products in another order, and a norm. Half precision: two roundings
# of half an ulp; with a norm or a gate before and behind up to five, two of them of the x that
# the product averages.
_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
_TWICE = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def _implementations(name: str, definition: Any) -> tuple[Implementation, ...]:
    return (
        Implementation("torch", definition),
        Implementation("triton", kernel("linear", name), ("cuda",), package="triton"),
    )


_TAIL = "Tensor weight, Tensor residual, Tensor norm_weight, float eps, float offset, "
_RESULT = "bool cast_first) -> (Tensor, Tensor)"

LINEAR = define_op(
    "linear(Tensor x, Tensor weight) -> Tensor",
    definition=define_linear,
    fake=_linear_fake,
    implementations=_implementations("linear", define_linear),
    examples=_linear_examples,
    tolerance=_TOLERANCE,
)

LINEAR_SILU_MUL = define_op(
    "linear_silu_mul(Tensor x, Tensor weight, int size) -> Tensor",
    definition=define_linear_silu_mul,
    fake=_linear_silu_mul_fake,
    implementations=_implementations("linear_silu_mul", define_linear_silu_mul),
    examples=_linear_silu_mul_examples,
    tolerance=_TWICE,
)

LINEAR_ADD_RMS_NORM = define_op(
    f"linear_add_rms_norm(Tensor x, {_TAIL}{_RESULT}",
    definition=define_linear_add_rms_norm,
    fake=_linear_add_rms_norm_fake,
    implementations=_implementations("linear_add_rms_norm", define_linear_add_rms_norm),
    examples=_linear_add_rms_norm_examples,
    tolerance=_TWICE,
)

GATED_RMS_NORM_LINEAR_ADD_RMS_NORM = define_op(
    "gated_rms_norm_linear_add_rms_norm(Tensor x, Tensor gate, Tensor gated_norm_weight, "
    f"float gated_norm_eps, {_TAIL}{_RESULT}",
    definition=define_gated_rms_norm_linear_add_rms_norm,
    fake=_gated_rms_norm_linear_add_rms_norm_fake,
    implementations=_implementations(
        "gated_rms_norm_linear_add_rms_norm", define_gated_rms_norm_linear_add_rms_norm
    ),
    examples=_gated_rms_norm_linear_add_rms_norm_examples,
    tolerance=_TWICE,
)

SIGMOID_MUL_LINEAR_ADD_RMS_NORM = define_op(
    f"sigmoid_mul_linear_add_rms_norm(Tensor x, Tensor gate, {_TAIL}{_RESULT}",
    definition=define_sigmoid_mul_linear_add_rms_norm,
    fake=_sigmoid_mul_linear_add_rms_norm_fake,
    implementations=_implementations(
        "sigmoid_mul_linear_add_rms_norm", define_sigmoid_mul_linear_add_rms_norm
    ),
    examples=_sigmoid_mul_linear_add_rms_norm_examples,
    tolerance=_TWICE,
)
