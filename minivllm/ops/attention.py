"""Causal attention of one sequence with grouped query heads: the plain model's op.

Owns the definition that the paged forms (`paged_attention`) share. Does not own any cache.

    o = torch.ops.minivllm.attention(q, k, v, scale)

Shapes: T tokens, L keys, H query heads, HK key/value heads (H a multiple of HK), D head dim. A
query sees every key up to its own position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minivllm.ops.op import Implementation, define_op


def define_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last T queries of a sequence over all its keys, in float32.

    Args:
        q: `[T, H, D]`, the queries at the last T of the L positions.
        k, v: `[L, HK, D]`.

    Returns:
        `[T, H, D]` in q's dtype.
    """
    groups = q.shape[1] // k.shape[1]
    k32, v32 = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), k32) * scale
    position = torch.arange(k.shape[0], device=q.device)
    hidden = position[None, :] > position[k.shape[0] - q.shape[0] :, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v32).to(q.dtype)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`define_attention` through torch's own fused attention."""
    tokens, length = q.shape[0], k.shape[0]
    mask = None
    if 1 < tokens < length:
        position = torch.arange(length, device=q.device)
        mask = position[None, :] <= position[length - tokens :, None]
    # float32 on CUDA has to be float32: the fused kernels there may use TF32
    exact = q.is_cuda and q.dtype == torch.float32
    backends = [SDPBackend.MATH] if exact else _BACKENDS
    with sdpa_kernel(backends):
        o = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None and tokens > 1,
            scale=scale,
            enable_gqa=True,
        )
    return o[0].transpose(0, 1).contiguous()


_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape)


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32  # of the examples


def example_rows(generator: torch.Generator, dtype: torch.dtype, rows: int) -> tuple[Tensor, ...]:
    """q, k, v as slices of one row, as the model's merged projection makes them."""
    widths = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    mixed = torch.randn(rows, sum(widths), generator=generator).to(dtype)
    return tuple(x.unflatten(-1, (-1, HEAD_DIM)) for x in mixed.split(widths, dim=-1))


def _attention_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [(*example_rows(generator, dtype, t), HEAD_DIM**-0.5) for t in (1, 2, 37)]


# float32: a softmax over up to 340 keys, summed in another order. Half precision: the weights of
# the softmax and the output are rounded once each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}

ATTENTION = define_op(
    "attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor",
    definition=define_attention,
    fake=_attention_fake,
    implementations=(Implementation("torch", fused_attention),),
    examples=_attention_examples,
    tolerance=TOLERANCE,
)
