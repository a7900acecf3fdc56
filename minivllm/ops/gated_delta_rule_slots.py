"""The folded gated delta rule on a pool of states: read at a slot, written at a slot, in place.

Owns the forms that change the pool. What they compute is `fused_gated_delta_rule`'s.

    o = torch.ops.minivllm.fused_gated_delta_rule_decode_slots(
        q, k, v, a, b, A_log, dt_bias, state, slots)

Shapes as there; S slots, the pool is `[S, HV, V, K]`, float32 or bfloat16 (the arithmetic is
float32 either way). Real sequences have slots of their own; padding rows may all name slot 0,
whose content and whose outputs mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.ops import gated_delta_rule
from minivllm.ops.chunked_delta_rule import chunked_delta_rule_triton
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.examples import pool, scattered_slots
from minivllm.ops.fused_gated_delta_rule import (
    TOLERANCE,
    define_decode,
    example_rows,
    example_states,
    unfolded,
    unit,
)
from minivllm.ops.kernels import kernel
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op
from minivllm.ops.slots import by_segments


def define_decode_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    early: bool = False,
) -> Tensor:
    """One more token for each of N sequences.

    Args:
        q, k: `[N, HK, K]`; v: `[N, HV, V]`; a, b: `[N, HV]`; A_log, dt_bias: `[HV]`.
        state: `[S, HV, V, K]`; changed at `slots`.
        slots: `[N]`, int64.
        early: neither slots and states nor A_log and dt_bias are written by what was launched since
            the last kernel that waits for all earlier ones; a kernel may then read them before q, k
            and v are there.

    Returns:
        o `[N, HV, V]` in v's dtype.
    """
    o, new_state = define_decode(q, k, v, a, b, A_log, dt_bias, state[slots])
    state[slots] = new_state
    return o


def _decode_slots_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    early: bool = False,
) -> Tensor:
    return v.new_empty(v.shape)


def define_prefill_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
    normalized: bool = False,
) -> Tensor:
    """Packed sequences.

    Args:
        q, k: `[T, HK, K]`; v: `[T, HV, V]`; a, b: `[T, HV]`; A_log, dt_bias: `[HV]`.
        state: `[S, HV, V, K]`; changed at the slots of sequences that have tokens.
        slots: `[N]`, int64.
        num_computed_tokens: `[N]`, int32; 0: starts from zeros, whatever the slot holds.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[chunks, 2]`, int32.
        chunk_slots: `[chunks]`, int32: an entry of the pool that also gets the state behind a
            chunk, all different and none of `slots`; 0: none.
        normalized: each row of q and k is of length 1 already, and is taken as it is.

    Returns:
        o `[T, HV, V]` in v's dtype.
    """

    def run(
        places: Tensor, initial: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
    ) -> tuple[Tensor, Tensor]:
        raw = (q[places], k[places], v[places], a[places], b[places], A_log, dt_bias)
        rows = unfolded(*raw, normalized)
        return gated_delta_rule.define_varlen(*rows, initial, cu_seqlens, chunk_indices)

    return by_segments(
        run, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots
    )


def _prefill_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
    normalized: bool = False,
) -> Tensor:
    """`define_prefill_slots` by chunks."""

    def run(places: Tensor, *initial: Tensor) -> tuple[Tensor, Tensor]:
        raw = (q[places], k[places], v[places], a[places], b[places], A_log, dt_bias)
        rows = unfolded(*raw, normalized)
        o, final = gated_delta_rule.GATED_DELTA_RULE_PREFILL.overload(*rows, *initial)
        return o, final

    return by_segments(
        run, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots
    )


def _prefill_slots_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
    normalized: bool = False,
) -> Tensor:
    return v.new_empty(v.shape)


SLOTS = 9  # of the examples' pools; those that no sequence has are NaN


def _decode_slots_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    # a float32 pool, and one in the activations' dtype
    for sequences, key_heads, state_dtype in ((1, 4, torch.float32), (5, 2, dtype)):
        rows = example_rows(generator, dtype, sequences, key_heads)
        slots = scattered_slots(generator, sequences, SLOTS)
        states = example_states(generator, sequences).to(state_dtype)
        examples.append((*rows, pool(states, slots, SLOTS), slots, sequences > 1))
    return examples


def _prefill_slots_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    examples = []
    for lengths, computed, state_dtype, kept, normalized in (
        ((1,), (0,), torch.float32, None, False),
        ((64, 3), (64, 0), dtype, None, True),
        ((5, 0, 129, 1), (0, 7, 64, 3), torch.float32, None, False),
        ((65,), (64,), torch.float32, (1, 0), True),
        ((5, 0, 192, 64), (0, 7, 64, 0), dtype, (1, 2, 0, 3, 4), False),
    ):
        q, k, *rows = example_rows(generator, dtype, sum(lengths), 2)
        if normalized:
            q, k = unit(q), unit(k)
        places = scattered_slots(generator, len(lengths) + (max(kept) if kept else 0), SLOTS)
        slots, entries = places[: len(lengths)], torch.cat([torch.zeros(1), places[len(lengths) :]])
        states = example_states(generator, len(lengths)).to(state_dtype)
        num_computed_tokens = torch.tensor(computed, dtype=torch.int32)
        states[num_computed_tokens == 0] = torch.nan  # a recycled slot
        chunk_slots = None if kept is None else entries.int()[list(kept)]
        examples.append(
            (q, k, *rows, pool(states, slots, SLOTS), slots, num_computed_tokens,
             *chunk_metadata(lengths), chunk_slots, normalized)
        )  # fmt: skip
    return examples


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "Tensor(a!) state, Tensor slots"
)

FUSED_GATED_DELTA_RULE_DECODE_SLOTS = define_op(
    f"fused_gated_delta_rule_decode_slots({_ARGUMENTS}, bool early=False) -> Tensor",
    definition=define_decode_slots,
    fake=_decode_slots_fake,
    implementations=(
        Implementation("torch", define_decode_slots),
        Implementation(
            "triton",
            kernel("gated_delta_rule", "fused_gated_delta_rule_decode_slots"),
            ("cuda",),
            package="triton",
        ),
    ),
    examples=_decode_slots_examples,
    tolerance=TOLERANCE,
)

FUSED_GATED_DELTA_RULE_PREFILL_SLOTS = define_op(
    f"fused_gated_delta_rule_prefill_slots({_ARGUMENTS}, Tensor num_computed_tokens, "
    "Tensor cu_seqlens, Tensor chunk_indices, Tensor? chunk_slots=None, "
    "bool normalized=False) -> Tensor",
    definition=define_prefill_slots,
    fake=_prefill_slots_fake,
    implementations=(
        Implementation("torch", _prefill_slots, capturable=False),
        Implementation(
            "triton", chunked_delta_rule_triton, ("cuda",), HALF_DTYPES, package="triton"
        ),
    ),
    examples=_prefill_slots_examples,
    tolerance=TOLERANCE,
)
