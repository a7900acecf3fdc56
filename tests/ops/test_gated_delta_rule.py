"""The gated delta rule against its formula, written down again in float64.

Shapes as in `minivllm.ops.gated_delta_rule`: a state is `[HV, V, K]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm.ops import OPS
from minivllm.ops.chunks import CHUNK_SIZE, chunk_metadata
from minivllm.ops.gated_delta_rule import define_varlen

ops = torch.ops.minivllm

KEY_DIM, VALUE_DIM = 16, 24
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 66, 127, 128, 129, 130, 191, 192, 193, 200)
TOLERANCE = 1e-5  # of the largest expected value


@dataclass
class Rows:
    """Arguments of the packed op, except for cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def part(self, start: int, end: int) -> tuple[Tensor, ...]:
        return tuple(x[start:end] for x in self.tokens)


def make(tokens: int, sequences: int = 1, heads: tuple[int, int] = (2, 4), seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    key_heads, value_heads = heads
    q, k = (
        torch.nn.functional.normalize(randn(tokens, key_heads, KEY_DIM), dim=-1) for _ in range(2)
    )
    return Rows(
        q,
        k,
        randn(tokens, value_heads, VALUE_DIM),
        -torch.rand(tokens, value_heads, generator=generator).mul(3).exp().sub(1).mul(0.3),
        torch.rand(tokens, value_heads, generator=generator),
        randn(sequences, value_heads, VALUE_DIM, KEY_DIM),
    )


def formula(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence in float64: S_t = a S + b k (v - a S^T k)^T, o = S_t^T q / sqrt(K).

    Written with S as [K, V], the transpose of the repository's, head by head.
    """
    q64, k64, v64, g64, beta64 = (x.double().numpy() for x in (q, k, v, g, beta))
    outputs = np.zeros(v64.shape)
    states = np.zeros(state.shape)
    for head in range(v.shape[1]):
        key_head = head * q.shape[1] // v.shape[1]
        S = state[head].double().numpy().T.copy()
        for t in range(v.shape[0]):
            key, decay = k64[t, key_head], math.exp(g64[t, head])
            S = decay * S
            S = S + beta64[t, head] * np.outer(key, v64[t, head] - S.T @ key)
            outputs[t, head] = S.T @ q64[t, key_head] / math.sqrt(q.shape[-1])
        states[head] = S.T
    return torch.from_numpy(outputs), torch.from_numpy(states)


def prefill(rows: Rows, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    return ops.gated_delta_rule_prefill(*rows.tokens, rows.state, *chunk_metadata(lengths))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    scale = max(float(expected.abs().max()), 1e-30)  # float32 underflows below
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_definition_and_formula_agree(length: int) -> None:
    rows = make(length, seed=length)
    o, state = prefill(rows, [length])
    expected_o, expected_state = formula(*rows.tokens, rows.state[0])
    assert_near(o, expected_o)
    assert_near(state[0], expected_state)
    loop_o, loop_state = define_varlen(*rows.tokens, rows.state, *chunk_metadata([length]))
    assert_near(loop_o, expected_o)
    assert_near(loop_state[0], expected_state)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 4), (2, 6)])
def test_equal_and_unequal_heads(heads: tuple[int, int]) -> None:
    rows = make(70, heads=heads)
    o, state = prefill(rows, [70])
    expected_o, expected_state = formula(*rows.tokens, rows.state[0])
    assert_near(o, expected_o)
    assert_near(state[0], expected_state)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_a_whole_sequence_starts_from_nothing(length: int) -> None:
    rows = make(length)
    expected, _ = formula(*rows.tokens, torch.zeros_like(rows.state[0]))
    assert_near(ops.gated_delta_rule(*rows.tokens), expected)
    assert_near(OPS["gated_delta_rule"].definition(*rows.tokens), expected)


@pytest.mark.parametrize("length", [1, 3, 64, 130])
def test_steps_reach_the_same_state(length: int) -> None:
    rows = make(length)
    o, final = prefill(rows, [length])
    state = rows.state
    steps = []
    for t in range(length):
        step, state = ops.gated_delta_rule_decode(*rows.part(t, t + 1), state)
        steps.append(step)
    assert_near(torch.cat(steps), o)
    assert_near(state, final)
    assert_near(state[0], formula(*rows.tokens, rows.state[0])[1])


@pytest.mark.parametrize("cuts", [(1,), (63,), (64,), (65,), (129,), (1, 2, 3), (64, 128), (0,)])
def test_a_state_carries_over_any_split(cuts: tuple[int, ...]) -> None:
    rows = make(130)
    whole_o, whole_state = prefill(rows, [130])
    state = rows.state
    pieces = []
    for start, end in zip((0, *cuts), (*cuts, 130), strict=True):
        piece = Rows(*rows.part(start, end), state)
        o, state = prefill(piece, [end - start])
        pieces.append(o)
    assert_near(torch.cat(pieces), whole_o)
    assert_near(state, whole_state)


def test_steps_of_several_sequences() -> None:
    rows = make(3, sequences=3)
    o, states = ops.gated_delta_rule_decode(*rows.tokens, rows.state)
    for n in range(3):
        expected_o, expected_state = formula(*rows.part(n, n + 1), rows.state[n])
        assert_near(o[n : n + 1], expected_o)
        assert_near(states[n], expected_state)


@pytest.mark.parametrize("lengths", [(5, 0, 129, 1), (0, 64), (3, 0), (0, 0, 2), (0, 0)])
def test_packed_sequences_and_empty_ones(lengths: tuple[int, ...]) -> None:
    rows = make(sum(lengths), sequences=len(lengths))
    o, states = prefill(rows, lengths)
    assert o.shape == rows.v.shape and states.shape == rows.state.shape
    start = 0
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(states[n], rows.state[n])
            continue
        expected_o, expected_state = formula(*rows.part(start, start + length), rows.state[n])
        assert_near(o[start : start + length], expected_o)
        assert_near(states[n], expected_state)
        start += length


DECAYS = {
    "none": lambda g: torch.zeros_like(g),
    "total": lambda g: torch.full_like(g, -30.0),
    "beyond_exp": lambda g: torch.full_like(g, -200.0),
    "now_and_then": lambda g: torch.where(torch.arange(g.numel()).view_as(g) % 7 > 0, -0.01, -80.0),
    "mixed": lambda g: g * torch.logspace(-4, 1.5, g.shape[0])[:, None],
}


@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_extreme_decays_and_betas(decay: str, beta: float | None) -> None:
    rows = make(130)
    rows.g = DECAYS[decay](rows.g)
    if beta is not None:
        rows.beta = torch.full_like(rows.beta, beta)
    o, state = prefill(rows, [130])
    expected_o, expected_state = formula(*rows.tokens, rows.state[0])
    if beta == 0.0 and decay == "none":
        assert torch.equal(state, rows.state)
    assert_near(o, expected_o)
    assert_near(state[0], expected_state)


def test_the_same_key_again_and_again() -> None:
    """With beta 1 each token overwrites the last one's value; the system is as dense as can be."""
    rows = make(130)
    rows.k = rows.k[:1].expand_as(rows.k)
    rows.beta = torch.ones_like(rows.beta)
    rows.g = torch.zeros_like(rows.g)
    o, state = prefill(rows, [130])
    expected_o, expected_state = formula(*rows.tokens, rows.state[0])
    assert_near(o, expected_o)
    assert_near(state[0], expected_state)
    recalled = torch.einsum("hvk,hk->hv", state[0], rows.k[0].repeat_interleave(2, dim=0))
    assert_near(recalled, rows.v[-1])


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_nan_stays_in_its_sequence(poisoned: int) -> None:
    lengths = (70, 1, 64)
    rows = make(135, sequences=3)
    clean_o, clean_states = prefill(rows, lengths)
    start = sum(lengths[:poisoned])
    mine = slice(start, start + lengths[poisoned])
    for x in rows.tokens:
        x[mine] = torch.nan
    rows.state[poisoned] = torch.nan
    o, states = prefill(rows, lengths)
    others = torch.ones(135, dtype=torch.bool)
    others[mine] = False
    assert torch.equal(o[others], clean_o[others])
    assert o[mine].isnan().all()
    for n in range(3):
        if n == poisoned:
            assert states[n].isnan().all()
        else:
            assert torch.equal(states[n], clean_states[n])


def test_nan_stays_in_its_row_of_a_step() -> None:
    rows = make(4, sequences=4)
    clean_o, clean_states = ops.gated_delta_rule_decode(*rows.tokens, rows.state)
    rows.state[2] = torch.nan
    rows.v[0] = torch.nan
    o, states = ops.gated_delta_rule_decode(*rows.tokens, rows.state)
    assert o[[0, 2]].isnan().all() and states[2].isnan().all()
    assert torch.equal(o[[1, 3]], clean_o[[1, 3]])
    assert torch.equal(states[[1, 3]], clean_states[[1, 3]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Only the output is rounded; a float32 state keeps its precision, a half one is cast last."""
    rows = make(130)
    for name in ("q", "k", "v", "beta"):
        setattr(rows, name, getattr(rows, name).to(dtype))
    o, state = prefill(rows, [130])
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    expected_o, expected_state = formula(*rows.tokens, rows.state[0])
    assert_near(o, expected_o, torch.finfo(dtype).eps)
    assert_near(state[0], expected_state)
    rows.state = rows.state.to(dtype)
    o, state = prefill(rows, [130])
    assert (o.dtype, state.dtype) == (dtype, dtype)
    _, half_state = formula(*rows.tokens, rows.state[0])
    assert_near(state[0], half_state, torch.finfo(dtype).eps)


def test_chunk_metadata() -> None:
    cu_seqlens, chunk_indices = chunk_metadata([0, CHUNK_SIZE, 1, 2 * CHUNK_SIZE + 1])
    assert cu_seqlens.dtype == chunk_indices.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 0, 64, 65, 194]
    assert chunk_indices.tolist() == [[1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert chunk_metadata([])[0].tolist() == [0]
    assert chunk_metadata([0])[1].shape == (0, 2)
