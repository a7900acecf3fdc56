"""The causal convolution on a pool of states: read at a slot, written at a slot, in place.

Owns the forms that change the pool. What they compute is `causal_conv1d`'s; one of them leaves its
channels as the delta rule takes them.

    y = torch.ops.minivllm.causal_conv1d_decode_slots(x, weight, state, slots)

Shapes: T tokens, N sequences, C channels, W taps, S slots; the pool is `[S, C, W]` in x's dtype.
The delta rule has HK key heads, HV value heads, K and V head dims; C is 2 * HK * K + HV * V.
Real sequences have slots of their own; padding rows may all name slot 0, whose content and whose
outputs mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.causal_conv1d import CAUSAL_CONV1D_PREFILL, define_update, define_varlen
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.examples import columns, pool, scattered_slots, vector
from minivllm.ops.fused_gated_delta_rule import unit
from minivllm.ops.kernels import kernel
from minivllm.ops.op import Implementation, define_op
from minivllm.ops.slots import by_segments


def define_decode_slots(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, early: bool = False
) -> Tensor:
    """One more token for each sequence.

    Args:
        x: `[N, C]`, one token a sequence.
        weight: `[C, W]`.
        state: `[S, C, W]`; changed at `slots`.
        slots: `[N]`, int64.
        early: as of `gated_delta_rule_slots.define_decode_slots`, of slots, states and weight.

    Returns:
        y `[N, C]` in x's dtype.
    """
    y, new_state = define_update(x, weight, state[slots])
    state[slots] = new_state
    return y.contiguous()


def _decode_slots_fake(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, early: bool = False
) -> Tensor:
    return x.new_empty(x.shape)


def define_prefill_slots(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
) -> Tensor:
    """Packed sequences.

    Args:
        x: `[T, C]`; weight: `[C, W]`.
        state: `[S, C, W]`; changed at the slots of sequences that have tokens.
        slots: `[N]`, int64.
        num_computed_tokens: `[N]`, int32; 0: starts from zeros, whatever the slot holds.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[chunks, 2]`, int32.
        chunk_slots: `[chunks]`, int32: an entry of the pool that also gets the state behind a
            chunk, all different and none of `slots`; 0: none.

    Returns:
        y `[T, C]` in x's dtype.
    """

    def run(places: Tensor, initial: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        return define_varlen(x[places], weight, initial, *metadata)

    return by_segments(
        run, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots
    ).contiguous()


def _prefill_slots(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
) -> Tensor:
    """All sequences at once."""

    def run(places: Tensor, initial: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
        y, final = CAUSAL_CONV1D_PREFILL.overload(x[places], weight, initial, *metadata)
        return y, final

    return by_segments(
        run, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots
    )


def _prefill_slots_fake(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape)


def _parts(
    y: Tensor, key_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the convolution's output, contiguous; q and k of length 1."""
    keys = key_heads * key_dim
    q, k, v = y.split([keys, keys, y.shape[1] - 2 * keys], dim=-1)
    q, k = (unit(x.unflatten(-1, (key_heads, key_dim))) for x in (q, k))
    # not `contiguous`, which keeps what strides there are if T is 1
    return q, k, v.unflatten(-1, (-1, value_dim)).clone(memory_format=torch.contiguous_format)


def define_qkv_prefill_slots(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    chunk_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed sequences, to what `fused_gated_delta_rule_prefill_slots` takes as `normalized`.

    Args:
        x, weight, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots: as in
            `define_prefill_slots`; a row of x has the channels of q, those of k, those of v.
        key_heads: HK; key_dim: K; value_dim: V.

    Returns:
        q, k `[T, HK, K]` and v `[T, HV, V]`, contiguous, in x's dtype. Each row of q and k is over
        its length, as `fused_gated_delta_rule` says: the convolution's output is rounded before.
    """
    places = (slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots)
    return _parts(define_prefill_slots(x, weight, state, *places), key_heads, key_dim, value_dim)


def _qkv_prefill_slots(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    chunk_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All sequences at once."""
    places = (slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots)
    return _parts(_prefill_slots(x, weight, state, *places), key_heads, key_dim, value_dim)


def _qkv_prefill_slots_fake(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    chunk_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, keys = x.shape[0], (key_heads, key_dim)
    values = ((x.shape[1] - 2 * key_heads * key_dim) // value_dim, value_dim)
    q, k, v = (x.new_empty((tokens, *heads)) for heads in (keys, keys, values))
    return q, k, v


CHANNELS, TAPS, SLOTS = 40, 4, 12  # of the examples; slots that no sequence has are NaN


def _decode_slots_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    for sequences, early in ((1, False), (3, True), (5, False)):
        (x,) = columns(generator, dtype, sequences, (CHANNELS,))
        slots = scattered_slots(generator, sequences, SLOTS)
        states = vector(generator, dtype, sequences, CHANNELS, TAPS)
        weight = vector(generator, dtype, CHANNELS, TAPS)
        examples.append((x, weight, pool(states, slots, SLOTS), slots, early))
    return examples


def _prefill_slots_examples(
    generator: torch.Generator,
    dtype: torch.dtype,
    channels: int = CHANNELS,
    heads: tuple[int, ...] = (),
) -> list[tuple[Any, ...]]:
    examples = []
    for lengths, computed, kept in (
        ((1,), (0,), None),
        ((7, 1, 64), (9, 0, 64), None),
        ((130, 66), (64, 0), (0, 1, 2, 3, 0)),
        ((2, 1, 64), (9, 0, 64), (1, 2, 3)),
        ((3, 0, 130, 2), (0, 7, 64, 3), (1, 2, 3, 4, 0)),
    ):
        (x,) = columns(generator, dtype, sum(lengths), (channels,))
        entries = scattered_slots(generator, len(lengths) + max(kept or (0,)), SLOTS)
        slots, entries = entries[: len(lengths)], F.pad(entries[len(lengths) :], (1, 0))
        states = vector(generator, dtype, len(lengths), channels, TAPS)
        num_computed_tokens = torch.tensor(computed, dtype=torch.int32)
        states[num_computed_tokens == 0] = torch.nan  # a recycled slot
        weight = vector(generator, dtype, channels, TAPS)
        examples.append(
            (x, weight, pool(states, slots, SLOTS), slots, num_computed_tokens,
             *chunk_metadata(lengths), *heads, kept and entries[list(kept)].int())
        )  # fmt: skip
    return examples


def _qkv_prefill_slots_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    """Heads of a kernel's power of two and of less, more heads than a program holds, and one."""
    examples: list[tuple[Any, ...]] = []
    for key_heads, key_dim, value_heads, value_dim in (
        (1, 8, 1, 8),
        (2, 24, 4, 12),
        (3, 128, 3, 40),
        (17, 16, 34, 16),
        (2, 12, 6, 20),
    ):
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        heads = (key_heads, key_dim, value_dim)
        examples.append(_prefill_slots_examples(generator, dtype, channels, heads)[len(examples)])
    return examples


# float32: W products and a SiLU, a few ulps. Half precision: the output's own rounding.
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# A row's three roundings: the convolution's, those in its length, its own.
_QKV_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}

CAUSAL_CONV1D_DECODE_SLOTS = define_op(
    "causal_conv1d_decode_slots(Tensor x, Tensor weight, Tensor(a!) state, Tensor slots, "
    "bool early=False) -> Tensor",
    definition=define_decode_slots,
    fake=_decode_slots_fake,
    implementations=(
        Implementation("torch", define_decode_slots),
        Implementation(
            "triton",
            kernel("causal_conv1d", "causal_conv1d_decode_slots"),
            ("cuda",),
            package="triton",
        ),
    ),
    examples=_decode_slots_examples,
    tolerance=_TOLERANCE,
)

CAUSAL_CONV1D_PREFILL_SLOTS = define_op(
    "causal_conv1d_prefill_slots(Tensor x, Tensor weight, Tensor(a!) state, Tensor slots, "
    "Tensor num_computed_tokens, Tensor cu_seqlens, Tensor chunk_indices, "
    "Tensor? chunk_slots=None) -> Tensor",
    definition=define_prefill_slots,
    fake=_prefill_slots_fake,
    implementations=(
        Implementation("torch", _prefill_slots, capturable=False),
        Implementation(
            "triton",
            kernel("causal_conv1d", "causal_conv1d_prefill_slots"),
            ("cuda",),
            package="triton",
        ),
    ),
    examples=_prefill_slots_examples,
    tolerance=_TOLERANCE,
)

CAUSAL_CONV1D_QKV_PREFILL_SLOTS = define_op(
    "causal_conv1d_qkv_prefill_slots(Tensor x, Tensor weight, Tensor(a!) state, Tensor slots, "
    "Tensor num_computed_tokens, Tensor cu_seqlens, Tensor chunk_indices, int key_heads, "
    "int key_dim, int value_dim, Tensor? chunk_slots=None) -> (Tensor, Tensor, Tensor)",
    definition=define_qkv_prefill_slots,
    fake=_qkv_prefill_slots_fake,
    implementations=(
        Implementation("torch", _qkv_prefill_slots, capturable=False),
        Implementation(
            "triton",
            kernel("causal_conv1d", "causal_conv1d_qkv_prefill_slots"),
            ("cuda",),
            package="triton",
        ),
    ),
    examples=_qkv_prefill_slots_examples,
    tolerance=_QKV_TOLERANCE,
)
