"""From the projections to what attention reads: per-head norms of q and k, then the rotation.

    q, k = torch.ops.minivllm.qk_norm_rope(q, k, q_weight, k_weight, positions, inv_freq, eps)

Shapes: T tokens, H query heads, HK key heads, D head dim, R rotated dims (the first R of each
head, half against half; R <= D). A norm is `x / rms(x) * (1 + w)` in float32, cast last. Angles
are `position * inv_freq` in float32; their cos and sin are rounded to q's dtype, and so are the
two products of a rotation and their sum, as torch's own ops round them (Su et al., RoFormer,
2021, in the half-split form).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.ops.examples import TOKENS, columns, vector
from minivllm.ops.kernels import kernel
from minivllm.ops.op import Implementation, define_op
from minivllm.ops.rms_norm import define_rms_norm


def define_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate each head.

    Args:
        q: `[T, H, D]`, k: `[T, HK, D]`, in one dtype; rows and heads may be strided.
        q_weight, k_weight: `[D]`, in q's dtype.
        positions: `[T]`, int64.
        inv_freq: `[R / 2]`, float32.

    Returns:
        q and k, contiguous, in their dtype.
    """
    angles = positions.float()[:, None, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    return (
        _rotated(define_rms_norm(q, q_weight, eps, 1.0, False), cos, sin),
        _rotated(define_rms_norm(k, k_weight, eps, 1.0, False), cos, sin),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, passed], dim=-1).contiguous()


def _qk_norm_rope_fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    sizes = ((6, 2, 64, 16), (5, 5, 32, 32), (2, 1, 24, 12))
    for tokens, (heads, kv_heads, dim, rotary_dim) in zip(TOKENS, sizes, strict=True):
        # q is the first half of each head's q_proj; the gate follows it
        wide, k = columns(generator, dtype, tokens, (heads, 2 * dim), (kv_heads, dim))
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        examples.append(
            (
                wide[..., :dim],
                k,
                vector(generator, dtype, dim),
                vector(generator, dtype, dim),
                torch.randint(0, 5000, (tokens,), generator=generator),
                1.0 / 10000.0**exponent,
                1e-6,
            )
        )
    return examples


# float32: the norm's few ulps; cos and sin are held to the same angle, rounded once. Half
# precision: a norm, cos and sin, two products and a sum are rounded, each by half an ulp.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}

QK_NORM_ROPE = define_op(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor positions, "
    "Tensor inv_freq, float eps) -> (Tensor, Tensor)",
    definition=define_qk_norm_rope,
    fake=_qk_norm_rope_fake,
    implementations=(
        Implementation("torch", define_qk_norm_rope),
        Implementation(
            "triton", kernel("qk_norm_rope", "qk_norm_rope"), ("cuda",), package="triton"
        ),
    ),
    examples=_examples,
    tolerance=_TOLERANCE,
)
