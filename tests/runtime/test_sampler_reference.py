"""The sampler against transformers' logits processors, in float64, over random parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_penalties import by_the_book
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minivllm.runtime import sampler
from minivllm.runtime.penalties import History
from minivllm.runtime.sampling_batch import SamplingBatch
from minivllm.runtime.sampling_params import SamplingParams

STEPS = 997
SIZE = 30
MARGIN = 1e-5  # of a filter's bound, within which float32 and float64 may decide differently
EOS = (1,)


def probabilities(logits: Tensor, p: SamplingParams, history: History) -> Tensor | None:
    """[SIZE] float64: the law of the draw, by transformers' processors in their order.

    None where a filter's bound is too close to call.
    """
    rows = by_the_book(logits, p, history, EOS).unsqueeze(0)
    if p.greedy:
        return torch.nn.functional.one_hot(rows[0].argmax(), SIZE).double()
    ids = torch.tensor([history.token_ids])
    rows = TemperatureLogitsWarper(p.temperature)(ids, rows)
    if p.top_k > 0:
        rows = TopKLogitsWarper(p.top_k)(ids, rows)
    if p.top_p < 1:
        mass = rows.softmax(-1).sort(descending=True).values.cumsum(-1)
        if bool(((mass - p.top_p).abs() <= MARGIN).any()):
            return None
        rows = TopPLogitsWarper(p.top_p)(ids, rows)
    if p.min_p > 0:
        weights = (rows - rows.max()).exp()
        if bool((((weights - p.min_p).abs() <= MARGIN) & (weights < 1)).any()):
            return None
        rows = MinPLogitsWarper(p.min_p)(ids, rows)
    return rows.softmax(-1)[0]


def law(logits: Tensor, p: SamplingParams, history: History) -> Tensor:
    """[SIZE] the share of the uniform numbers, STEPS of them evenly in [0, 1), that draws an id."""
    batch = SamplingBatch.build(
        [p] * STEPS, range(STEPS), [0] * STEPS, [history] * STEPS, EOS, "cpu", SIZE
    )
    sampled = sampler.sample(logits.expand(STEPS, -1), batch)
    assert sampled.valid.all()
    return torch.bincount(sampled.token_ids, minlength=SIZE).double() / STEPS


def check(seed: int, fields: dict[str, Any], length: int, patch: pytest.MonkeyPatch) -> bool:
    """Whether the case was clear enough to be checked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, SIZE, generator=generator) * 2.5
    ids = torch.randint(SIZE, (length,), generator=generator).tolist()
    history = History(ids, 1 + seed % length)
    p = SamplingParams(**fields)
    expected = probabilities(logits[0], p, history)
    if expected is None:
        return False
    patch.setattr(sampler, "uniforms", lambda seeds, _: (seeds.double() + 0.5) / STEPS)
    # each id takes one piece of [0, 1), which holds its share of the steps but for one at most
    torch.testing.assert_close(law(logits, p, history), expected, atol=1.01 / STEPS, rtol=0)
    return True


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.9])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 4},
        {"top_k": 29},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.02},
        {"min_p": 0.3},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.1},
        {"frequency_penalty": -0.8},
        {"logit_bias": {3: 4.0, 11: -100.0}},
        {"min_tokens": 16, "stop_token_ids": [2, 9]},
    ],
    ids=str,
)
def test_each_parameter(
    fields: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = [
        check(seed, fields | {"temperature": temperature}, 12, monkeypatch) for seed in range(3)
    ]
    assert any(checked)


def some(default: float, low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(default), st.floats(low, high, allow_nan=False))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 40),
    fields=st.fixed_dictionaries(
        {
            "temperature": some(0.0, 0.05, 3.0),
            "top_k": st.sampled_from([0, 1, 2, 5, 20, 30, 99]),
            "top_p": some(1.0, 0.01, 1.0),
            "min_p": some(0.0, 0.0, 1.0),
            "repetition_penalty": some(1.0, 0.2, 4.0),
            "presence_penalty": some(0.0, -2.0, 2.0),
            "frequency_penalty": some(0.0, -2.0, 2.0),
            "logit_bias": st.dictionaries(
                st.integers(0, SIZE - 1), st.floats(-100, 100, allow_nan=False), max_size=4
            ),
            "min_tokens": st.sampled_from([0, 3, 16]),
            "stop_token_ids": st.lists(st.integers(0, SIZE - 1), max_size=3),
        }
    ),
)
def test_random_combinations(seed: int, length: int, fields: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assume(check(seed, fields, length, patch))
