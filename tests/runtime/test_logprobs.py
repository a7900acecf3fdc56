"""Logprobs, ranks and the most probable tokens against log_softmax in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from minivllm.runtime import logprobs as module
from minivllm.runtime.logprobs import TokenLogprobs, prompt_logprobs, token_logprobs
from minivllm.runtime.outputs import Logprob
from minivllm.runtime.penalties import History
from minivllm.runtime.sampler import sample
from minivllm.runtime.sampling_batch import SamplingBatch
from minivllm.runtime.sampling_params import SamplingParams

# exp of a difference up to 40 has a relative error of a few 2**-24; the sum's is no greater, and
# the result is rounded to float32 once.
TOLERANCE = {"atol": 1e-6, "rtol": 2e-7}


def random_logits(rows: int, size: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def check(found: TokenLogprobs, logits: Tensor, ids: Tensor, count: int) -> None:
    expected = logits.double().log_softmax(-1)
    order = logits.float().argsort(dim=-1, descending=True, stable=True)
    rank = (order == ids.unsqueeze(-1)).long().argmax(-1) + 1
    own = expected.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.logprobs.double(), own, **TOLERANCE)
    assert torch.equal(found.ranks, rank)
    assert torch.equal(found.top_ids, order[:, :count])
    top = expected.gather(-1, order[:, :count])
    torch.testing.assert_close(found.top_logprobs.double(), top, **TOLERANCE)
    assert found.logprobs.dtype == found.top_logprobs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (64, 40), (65, 999), (150, 33)])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_against_float64(dtype: torch.dtype, rows: int, size: int, count: int) -> None:
    logits = random_logits(rows, size + 4, seed=rows).to(dtype)  # 16-bit ones have ties
    logits[:, size:] = 100.0  # padding: no share
    ids = torch.randint(size, (rows,), generator=torch.Generator().manual_seed(1))
    count = min(count, size)
    check(token_logprobs(logits, ids, count, size), logits[:, :size], ids, count)
    check(prompt_logprobs(logits, ids.tolist(), count, size), logits[:, :size], ids, count)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 30.0, 1e4])
def test_flat_and_steep_rows_of_the_real_size(scale: float) -> None:
    size = 248_077
    logits = random_logits(2, size, seed=3, scale=scale)
    ids = torch.tensor([5, size - 1])
    found = token_logprobs(logits, ids, 20, size)
    check(found, logits, ids, 20)
    assert found.logprobs.le(0).all()


def test_ids_without_a_share() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 9.0]])
    found = token_logprobs(logits, torch.tensor([2]), 3, 3)
    assert (found.logprobs.item(), found.ranks.item()) == (-torch.inf, 3)
    assert found.top_ids.tolist() == [[1, 0, 2]]
    padded = token_logprobs(logits, torch.tensor([3]), 20, 3)
    assert (padded.logprobs.item(), padded.ranks.item()) == (-torch.inf, 4)
    assert padded.top_ids.tolist() == [[1, 0, 2]]  # no more than there are


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30, 211, seed=5)
    ids = torch.arange(30)
    whole = token_logprobs(logits, ids, 4, 200)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    parts = token_logprobs(logits, ids, 4, 200)
    for one, other in zip(vars(whole).values(), vars(parts).values(), strict=True):
        assert torch.equal(one, other)


def test_no_copy_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    keys = module.order_keys
    monkeypatch.setattr(module, "order_keys", lambda x: rows.append(len(x)) or keys(x))
    prompt_logprobs(random_logits(200, 9, seed=1).bfloat16(), [0] * 200, 2, 9)
    assert rows == [64, 64, 64, 8]


def test_dicts() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 5.0, 1.0]])
    found = token_logprobs(logits, torch.tensor([2, 1]), 2, 4)
    names = "abcd"
    first, second = found.dicts([2, 1], [1, 2], lambda token_id: names[token_id])
    expected = logits.double().log_softmax(-1)
    assert list(first) == [2, 0]  # the token itself, then the most probable
    assert [(entry.rank, entry.decoded_token) for entry in first.values()] == [(2, "c"), (1, "a")]
    assert first[2].logprob == pytest.approx(float(expected[0, 2]), abs=1e-6)
    assert first[0].logprob == pytest.approx(float(expected[0, 0]), abs=1e-6)
    # It is among the most probable: no entry twice. Equal ones in the order of ids.
    assert [(token_id, entry.rank) for token_id, entry in second.items()] == [(1, 1), (2, 2)]
    alone = found.dicts([2, 1], [0, 0])
    assert alone == [{2: Logprob(first[2].logprob, 2)}, {1: Logprob(second[1].logprob, 1)}]


def test_sampled_rows_are_told_of_their_raw_logits() -> None:
    rng = random.Random(2)
    n, size = 90, 300
    logits = random_logits(n, size + 20, seed=8)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 2.0]),
            top_k=rng.choice([0, 3]),
            repetition_penalty=rng.choice([1.0, 1.5]),
            logit_bias=rng.choice([None, {rng.randrange(size): 50.0}]),
            logprobs=rng.choice([None, 0, 2, 7]),
        )
        for _ in range(n)
    ]
    histories = [History([row, row + 1], 1) for row in range(n)]
    batch = SamplingBatch.build(params, range(n), [2] * n, histories, (), "cpu", size)
    sampled = sample(logits, batch)
    asking = [row for row in range(n) if params[row].logprobs is not None]
    assert list(batch.logprob_rows) == asking
    assert batch.num_logprobs == 7
    assert sampled.logprobs is not None
    check(sampled.logprobs, logits[asking, :size], sampled.token_ids[asking], 7)
    assert (sampled.logprobs.ranks > 20).any()  # the biased ones


def test_greedy_tokens_have_rank_one() -> None:
    logits = torch.zeros(3, 10)
    logits[:, [4, 6]] = 1.0
    params = [SamplingParams(temperature=0.0, logprobs=2)] * 3
    batch = SamplingBatch.build(params, [0] * 3, [0] * 3, None, (), "cpu", 10)
    found = sample(logits, batch).logprobs
    assert found is not None
    assert found.ranks.tolist() == [1] * 3
    assert found.top_ids.tolist() == [[4, 6]] * 3
