"""Root-mean-square norms: alone, behind a residual addition, and gated.

Owns the arithmetic of a norm as one op. Three conventions of the weight are covered by two flags:

    offset=1, cast_first=False   x / rms(x) * (1 + w) in float32, cast last       Qwen3.5, Gemma
    offset=0, cast_first=False   x / rms(x) * w in float32, cast last
    offset=0, cast_first=True    w * (x / rms(x), cast)                           Llama

    y = torch.ops.minivllm.rms_norm(x, weight, 1e-6, 1.0, False)

Shapes: T tokens, H heads, D the normalised dim; x is `[T, D]` or, normalised head by head,
`[T, H, D]`. `rms(x) = sqrt(mean(x^2) + eps)` (Zhang and Sennrich, Root Mean Square Layer
Normalization, 2019), in float32. Weights have x's dtype. Rows may be strided; outputs are
contiguous. Every cast stands where the plain model has it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.examples import TOKENS, columns, vector
from minivllm.ops.kernels import kernel
from minivllm.ops.op import Implementation, define_op


def _normalized(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in float32."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)


def define_rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> Tensor:
    """One norm over the last dim.

    Args:
        x: `[T, D]` or `[T, H, D]`.
        weight: `[D]`, in x's dtype.
        eps: added to the mean of squares.
        offset: added to the weight in float32; 0 with `cast_first`.
        cast_first: round the normalised x to its dtype before the weight is applied.

    Returns:
        x's shape and dtype.
    """
    assert not (cast_first and offset), "cast_first knows no offset"
    normalized = _normalized(x, eps)
    if cast_first:
        return (weight * normalized.to(x.dtype)).contiguous()
    return (normalized * (offset + weight.float())).to(x.dtype).contiguous()


def _rms_norm_fake(
    x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> Tensor:
    return x.new_empty(x.shape)


def define_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    """A residual addition and the norm of its sum.

    Args:
        x, residual: `[T, D]` or `[T, H, D]`, in one dtype.
        weight, eps, offset, cast_first: as in `define_rms_norm`.

    Returns:
        the norm of the sum, and the sum rounded to x's dtype (which is what is normalised).
    """
    total = (residual + x).contiguous()
    return define_rms_norm(total, weight, eps, offset, cast_first), total


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def define_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of Gated DeltaNet: cast, times the plain weight, times silu(gate) in float32.

    Args:
        x, gate: `[T, H, D]` or `[T, D]`, in one dtype.
        weight: `[D]`, in x's dtype.

    Returns:
        x's shape and dtype.
    """
    y = weight * _normalized(x, eps).to(x.dtype)
    return (y * F.silu(gate.float())).to(x.dtype).contiguous()


def _gated_rms_norm_fake(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


EPS = 1e-6
CONVENTIONS = ((1.0, False), (0.0, False), (0.0, True))
SHAPES = ((36,), (2, 24))  # of a token's activations in the examples


def _rms_norm_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    conventions = itertools.cycle(CONVENTIONS)
    return [
        (
            *columns(generator, dtype, tokens, shape),
            vector(generator, dtype, shape[-1]),
            EPS,
            *next(conventions),
        )
        for shape in SHAPES
        for tokens in TOKENS
    ]


def _add_rms_norm_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [
        (*columns(generator, dtype, x.shape[0], tuple(x.shape[1:])), x, *rest)
        for x, *rest in _rms_norm_examples(generator, dtype)
    ]


def _gated_rms_norm_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    return [
        (
            *columns(generator, dtype, tokens, (3, size), (3, size)),
            vector(generator, dtype, size),
            EPS,
        )
        for tokens, size in zip(TOKENS, (24, 64, 36), strict=True)
    ]


# float32: a mean over D squares in another order and two approximate functions, a few ulps.
# Half precision: two roundings of half an ulp (three in the gated norm).
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

RMS_NORM = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset, bool cast_first) -> Tensor",
    definition=define_rms_norm,
    fake=_rms_norm_fake,
    implementations=(
        Implementation("torch", define_rms_norm),
        Implementation("triton", kernel("rms_norm", "rms_norm"), ("cuda",), package="triton"),
    ),
    examples=_rms_norm_examples,
    tolerance=_TOLERANCE,
)

ADD_RMS_NORM = define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset, "
    "bool cast_first) -> (Tensor, Tensor)",
    definition=define_add_rms_norm,
    fake=_add_rms_norm_fake,
    implementations=(
        Implementation("torch", define_add_rms_norm),
        Implementation("triton", kernel("rms_norm", "add_rms_norm"), ("cuda",), package="triton"),
    ),
    examples=_add_rms_norm_examples,
    tolerance=_TOLERANCE,
)

GATED_RMS_NORM = define_op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor",
    definition=define_gated_rms_norm,
    fake=_gated_rms_norm_fake,
    implementations=(
        Implementation("torch", define_gated_rms_norm),
        Implementation("triton", kernel("rms_norm", "gated_rms_norm"), ("cuda",), package="triton"),
    ),
    examples=_gated_rms_norm_examples,
    tolerance=_TOLERANCE,
)
