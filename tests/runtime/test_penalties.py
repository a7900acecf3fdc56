"""Counts of tokens, and the edits of logits against plain loops and transformers' processors."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from minivllm.runtime.penalties import History, TokenCounts
from minivllm.runtime.sampling_batch import SamplingBatch
from minivllm.runtime.sampling_params import SamplingParams

SIZE = 50


def edited(
    logits: Tensor,
    params: list[SamplingParams],
    histories: list[History | None],
    eos: tuple[int, ...] = (),
    size: int = SIZE,
) -> dict[int, Tensor]:
    """Row to its edited logits, for the rows that have any edit."""
    n = len(params)
    batch = SamplingBatch.build(params, [0] * n, [0] * n, histories, eos, "cpu", size)
    if batch.edits is None:
        return {}
    before = logits.clone()
    found = batch.edits.apply(logits[:, :size])
    assert torch.equal(logits, before)
    assert found.dtype == torch.float32
    return dict(zip(batch.edits.rows.tolist(), found, strict=True))


def by_the_book(
    logits: Tensor, p: SamplingParams, history: History, eos: tuple[int, ...] = ()
) -> Tensor:
    """One row in float64; repetition by transformers, the rest by plain loops."""
    row = logits.double().clone()
    prompt = history.token_ids[: history.num_prompt_tokens]
    output = history.token_ids[history.num_prompt_tokens :]
    if len(output) < p.min_tokens:
        for token_id in (*eos, *(p.stop_token_ids or ())):
            row[token_id] = -torch.inf
    for token_id, bias in (p.logit_bias or {}).items():
        row[token_id] += bias
    seen = torch.tensor([[*prompt, *output]])
    row = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(seen, row.unsqueeze(0))[0]
    for token_id in output:
        row[token_id] -= p.frequency_penalty
    for token_id in set(output):
        row[token_id] -= p.presence_penalty
    return row


def history(rng: random.Random, longest: int = 60) -> History:
    ids = [rng.randrange(SIZE) for _ in range(rng.randrange(1, longest))]
    return History(ids, rng.randrange(1, len(ids) + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.25},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.75},
        {"frequency_penalty": -0.5},
        {"logit_bias": {0: 3.5, 49: -100.0, 7: 100.0}},
        {"min_tokens": 10, "stop_token_ids": [4, 5]},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {
            "repetition_penalty": 3.0,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "logit_bias": {token_id: -token_id / 2 for token_id in range(20)},
            "min_tokens": 16,
            "stop_token_ids": [3],
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_by_the_book(fields: dict[str, Any], dtype: torch.dtype) -> None:
    rng = random.Random(1)
    n = 30
    logits = (torch.randn(n, SIZE + 3, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    params = [SamplingParams(**fields)] * n
    histories = [history(rng) for _ in range(n)]
    eos = (1, 2)
    rows = edited(logits, params, histories, eos)
    generated = [h.num_output_tokens for h in histories]
    if set(fields) <= {"min_tokens", "stop_token_ids"}:
        assert list(rows) == [row for row in range(n) if generated[row] < params[row].min_tokens]
        assert 5 < len(rows) < n
    else:
        assert list(rows) == list(range(n))
    for row, found in rows.items():
        expected = by_the_book(logits[row, :SIZE], params[row], histories[row], eos)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)


def test_only_rows_that_need_it_are_edited() -> None:
    plain = SamplingParams()
    params = [plain, SamplingParams(logit_bias={3: 1.0}), plain, SamplingParams(min_tokens=2)]
    logits = torch.randn(4, SIZE)
    short, enough = History([5, 6], 1), History([5, 6, 7], 1)
    assert list(edited(logits, params, [None, None, None, short], (9,))) == [1, 3]
    assert list(edited(logits, params, [None, None, None, enough], (9,))) == [1]
    assert edited(logits, [plain] * 4, [None] * 4) == {}


def test_prompt_tokens_only_count_for_repetition() -> None:
    logits = torch.full((1, SIZE), 2.0)
    p = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    row = edited(logits, [p], [History([5, 5, 6, 6, 6], 2)])[0]
    assert (row[5], row[6], row[7]) == (2.0, -2.0, 2.0)
    p = SamplingParams(repetition_penalty=4.0)
    row = edited(logits, [p], [History([5, 5, 6, 6, 6], 2)])[0]
    assert (row[5], row[6], row[7]) == (0.5, 0.5, 2.0)  # once, however often it came
    row = edited(-logits, [p], [History([5, 5, 6, 6, 6], 2)])[0]
    assert (row[5], row[6], row[7]) == (-8.0, -8.0, -2.0)


def test_a_bias_does_not_lift_the_mask() -> None:
    p = SamplingParams(min_tokens=1, logit_bias={3: 100.0})
    assert edited(torch.zeros(1, SIZE), [p], [History([1], 1)], (3,))[0][3] == -torch.inf


def test_edits_of_padded_ids_are_left_out() -> None:
    p = SamplingParams(
        logit_bias={12: 5.0}, min_tokens=3, stop_token_ids=[11], repetition_penalty=2.0
    )
    logits = torch.ones(2, 14)
    rows = edited(logits, [p] * 2, [History([10, 13, 3], 2)] * 2, (13,), size=10)
    expected = torch.ones(10).index_fill(0, torch.tensor([3]), 0.5)
    assert torch.equal(rows[0], expected)
    assert torch.equal(rows[1], expected)


def test_counts_grow_to_what_they_are_from_scratch() -> None:
    rng = random.Random(3)
    for _ in range(50):
        whole = history(rng)
        n = whole.num_prompt_tokens
        growing = TokenCounts(whole.token_ids[:n], n)
        for done in range(n, len(whole.token_ids)):
            assert growing == TokenCounts(whole.token_ids[:done], n)
            growing.tensors(SIZE)  # a look does not stop it from growing
            growing.update(whole.token_ids[done])
        # A preempted request is counted again from its tokens.
        assert growing == TokenCounts(whole.token_ids, n)
        assert growing.num_tokens == len(whole.token_ids)
        ids, counts = growing.tensors(SIZE)
        output = Counter(whole.token_ids[n:])
        expected = {token_id: output[token_id] for token_id in whole.token_ids}
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected
        assert len(ids) == len(expected)
        low = growing.tensors(10)[0].tolist()
        assert sorted(low) == sorted(token_id for token_id in expected if token_id < 10)
    assert TokenCounts([1, 2], 1) != TokenCounts([1, 2], 2)
    assert TokenCounts().tensors(5)[0].tolist() == []


def test_kept_counts_give_the_same_edits() -> None:
    rng = random.Random(4)
    p = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25)
    for _ in range(20):
        anew = history(rng)
        kept = TokenCounts(anew.token_ids, anew.num_prompt_tokens)
        logits = torch.randn(2, SIZE)
        histories = [anew, History(anew.token_ids, anew.num_prompt_tokens, kept)]
        rows = edited(logits[[0, 0]], [p] * 2, histories)
        assert torch.equal(rows[0], rows[1])


def test_misuse() -> None:
    p = SamplingParams(presence_penalty=1.0)
    with pytest.raises(AssertionError, match="what the row has said"):
        edited(torch.zeros(1, SIZE), [p], [None])
    with pytest.raises(AssertionError, match="of other tokens"):
        edited(torch.zeros(1, SIZE), [p], [History([1, 2], 1, TokenCounts([1], 1))])
    with pytest.raises(AssertionError, match="counts the row's output"):
        edited(torch.zeros(1, SIZE), [SamplingParams(min_tokens=1)], [None])
    with pytest.raises(AssertionError):
        TokenCounts([1], 2)
