"""Multiplicative gates: the MLP's silu(gate) * up, and attention's x * sigmoid(gate).

    y = torch.ops.minivllm.silu_mul(gate, up)

Shapes: T tokens, I intermediate size, H heads, D head dim. The activation is rounded to its dtype
before the product, as `F.silu(gate) * up` and `x * gate.sigmoid()` round it. Rows (and heads, in
sigmoid_mul) may be strided; outputs are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.examples import TOKENS, columns
from minivllm.ops.kernels import kernel
from minivllm.ops.op import Implementation, define_op


def define_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` for `[T, I]`, in one dtype."""
    return (F.silu(gate) * up).contiguous()


def _silu_mul_fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def define_sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` for `[T, H, D]`, in one dtype; gate is half of each head's q_proj."""
    return (x * gate.sigmoid()).contiguous()


def _sigmoid_mul_fake(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _silu_mul_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [
        columns(generator, dtype, tokens, (size,), (size,))
        for tokens, size in zip(TOKENS, (1040, 36, 24), strict=True)
    ]


def _sigmoid_mul_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    for tokens in TOKENS:
        x, wide = columns(generator, dtype, tokens, (3, 24), (3, 48))
        examples.append((x, wide[..., 24:]))
    return examples


# float32: an exponential and a quotient, a few ulps. Half precision: two roundings.
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

SILU_MUL = define_op(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    definition=define_silu_mul,
    fake=_silu_mul_fake,
    implementations=(
        Implementation("torch", define_silu_mul),
        Implementation("triton", kernel("gating", "silu_mul"), ("cuda",), package="triton"),
    ),
    examples=_silu_mul_examples,
    tolerance=_TOLERANCE,
)

SIGMOID_MUL = define_op(
    "sigmoid_mul(Tensor x, Tensor gate) -> Tensor",
    definition=define_sigmoid_mul,
    fake=_sigmoid_mul_fake,
    implementations=(
        Implementation("torch", define_sigmoid_mul),
        Implementation("triton", kernel("gating", "sigmoid_mul"), ("cuda",), package="triton"),
    ),
    examples=_sigmoid_mul_examples,
    tolerance=_TOLERANCE,
)
