"""The gated delta rule from the raw projections: L2 norms, decay and write strength inside.

Owns the folded twins of `gated_delta_rule`: a whole sequence, packed sequences with state
(prefill), one token a sequence with state (decode). Does not own the rule itself, nor where
states live (`gated_delta_rule_slots`).

    o = torch.ops.minivllm.fused_gated_delta_rule(q, k, v, a, b, A_log, dt_bias)

Shapes as in `gated_delta_rule`; a and b are `[T, HV]`, A_log and dt_bias `[HV]`. q and k are
rows of the convolution's output, not normalised. Before the rule (Yang et al., Gated Delta
Networks, 2024), in float32:

    q = q / sqrt(sum(q^2) + 1e-6), rounded to its dtype; k likewise
    g = -exp(A_log) * softplus(a + dt_bias)
    beta = sigmoid(b), rounded to its dtype
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops import fla, gated_delta_rule
from minivllm.ops.chunked_delta_rule import chunked_delta_rule_triton
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.examples import columns, vector
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op

L2_EPS = 1e-6


def unit(x: Tensor) -> Tensor:
    """Each row over its length, rounded to its dtype."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def unfolded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    normalized: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `gated_delta_rule` takes: q and k normalised, v, the log decay g, beta.

    Args:
        normalized: q and k are so already.
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    if not normalized:
        q, k = unit(q), unit(k)
    return q, k, v, g, b.sigmoid()


def define_sequence(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """A whole sequence from an empty state; returns o `[T, HV, V]` in v's dtype."""
    return gated_delta_rule.define_sequence(*unfolded(q, k, v, a, b, A_log, dt_bias))


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    rule = gated_delta_rule.GATED_DELTA_RULE.overload
    return rule(*unfolded(q, k, v, a, b, A_log, dt_bias))


def _sequence_fake(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    return v.new_empty(v.shape)


def define_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """The packed form; states and metadata as in `gated_delta_rule.define_varlen`."""
    rows = unfolded(q, k, v, a, b, A_log, dt_bias)
    return gated_delta_rule.define_varlen(*rows, initial_state, cu_seqlens, chunk_indices)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    rule = gated_delta_rule.GATED_DELTA_RULE_PREFILL.overload
    rows = unfolded(q, k, v, a, b, A_log, dt_bias)
    return rule(*rows, initial_state, cu_seqlens, chunk_indices)


def _varlen_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """By chunks, over states of its own."""
    sequences = initial_state.shape[0]
    final_state = initial_state.clone(memory_format=torch.contiguous_format)
    slots = torch.arange(sequences, device=v.device)
    started = torch.ones(sequences, dtype=torch.int32, device=v.device)
    o = chunked_delta_rule_triton(
        q, k, v, a, b, A_log, dt_bias, final_state, slots, started, cu_seqlens, chunk_indices
    )
    return o, final_state


def _varlen_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), initial_state.new_empty(initial_state.shape)


def define_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """One more token for each of N sequences.

    Args:
        q, k: `[N, HK, K]`; v: `[N, HV, V]`; a, b: `[N, HV]`; A_log, dt_bias: `[HV]`.
        state: `[N, HV, V, K]`; not changed.

    Returns:
        o `[N, HV, V]` in v's dtype, and the new states in state's dtype.
    """
    return gated_delta_rule.define_decode(*unfolded(q, k, v, a, b, A_log, dt_bias), state)


def _decode_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    o, new_state = fla.fused_recurrent_gated_delta_rule()(
        q[:, None],
        k[:, None],
        v[:, None],
        a[:, None],
        beta=b[:, None],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )
    return o[:, 0], new_state.to(state.dtype)


def _decode_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


KEY_DIM, VALUE_DIM, VALUE_HEADS = 16, 24, 4  # of the examples


def example_rows(
    generator: torch.Generator, dtype: torch.dtype, rows: int, key_heads: int
) -> tuple[Tensor, ...]:
    """q, k, v, a, b as slices of one row, A_log and dt_bias."""
    heads = (VALUE_HEADS,)
    keys, values = (key_heads, KEY_DIM), (VALUE_HEADS, VALUE_DIM)
    return (
        *columns(generator, dtype, rows, keys, keys, values, heads, heads),
        torch.rand(heads, generator=generator).to(dtype),
        vector(generator, dtype, *heads),
    )


def example_states(generator: torch.Generator, sequences: int) -> Tensor:
    """States of N sequences, `[N, HV, V, K]` float32."""
    return torch.randn(sequences, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=generator)


def _sequence_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [
        example_rows(generator, dtype, tokens, key_heads)
        for tokens, key_heads in ((1, 4), (63, 2), (130, 4))
    ]


def _varlen_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [
        (
            *example_rows(generator, dtype, sum(lengths), 2),
            example_states(generator, len(lengths)),
            *chunk_metadata(lengths),
        )
        for lengths in ((1,), (64, 3), (5, 0, 129, 1))
    ]


def _decode_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [
        (*example_rows(generator, dtype, n, key_heads), example_states(generator, n))
        for n, key_heads in ((1, 4), (5, 2))
    ]


# As the rule's own; in half precision the roundings of q, k and beta come before it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

_RAW = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias"

FUSED_GATED_DELTA_RULE = define_op(
    f"fused_gated_delta_rule({_RAW}) -> Tensor",
    definition=define_sequence,
    fake=_sequence_fake,
    implementations=(Implementation("torch", _sequence),),
    examples=_sequence_examples,
    tolerance=TOLERANCE,
)

FUSED_GATED_DELTA_RULE_PREFILL = define_op(
    f"fused_gated_delta_rule_prefill({_RAW}, Tensor initial_state, Tensor cu_seqlens, "
    "Tensor chunk_indices) -> (Tensor, Tensor)",
    definition=define_varlen,
    fake=_varlen_fake,
    implementations=(
        Implementation("torch", _varlen, capturable=False),
        Implementation("triton", _varlen_triton, ("cuda",), HALF_DTYPES, package="triton"),
    ),
    examples=_varlen_examples,
    tolerance=TOLERANCE,
)

FUSED_GATED_DELTA_RULE_DECODE = define_op(
    f"fused_gated_delta_rule_decode({_RAW}, Tensor state) -> (Tensor, Tensor)",
    definition=define_decode,
    fake=_decode_fake,
    implementations=(
        Implementation("torch", define_decode),
        Implementation("fla", _decode_fla, ("cuda",), HALF_DTYPES, "fla", capturable=False),
    ),
    examples=_decode_examples,
    tolerance=TOLERANCE,
)
