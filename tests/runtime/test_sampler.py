"""The sampler: exact filters, the law of the draws, and rows that know nothing of each other."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minivllm.runtime import sampler
from minivllm.runtime.sampler import sample, uniform
from minivllm.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int) -> float:
    """A bound that a true law passes all but once in a million (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


def kept_by_the_book(logits: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """(id, weight) that the filters leave, most probable first; plain Python in float64."""
    scaled = [logit / params.temperature for logit in logits]
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    weights = [(i, math.exp(scaled[i] - scaled[order[0]])) for i in order]
    if params.top_k > 0:
        weights = weights[: params.top_k]
    total, before, kept = sum(w for _, w in weights), 0.0, []
    for i, weight in weights:
        if before < params.top_p * total:
            kept.append((i, weight))
        before += weight
    return [(i, weight) for i, weight in kept if weight >= params.min_p]


def draw_by_the_book(logits: list[float], params: SamplingParams, share: float) -> int:
    kept = kept_by_the_book(logits, params)
    if params.top_p == 1.0 and not 0 < params.top_k < len(logits):
        kept.sort()  # no filter needs an order: ids have one
    total, cumulative = sum(w for _, w in kept), 0.0
    for i, weight in kept:
        cumulative += weight
        if share * total < cumulative:
            return i
    raise AssertionError(share)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_k": -1},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.2},
    {"top_p": 0.6, "min_p": 0.3},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_draws_by_the_book(fields: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    # The uniform number walks through [0, 1): every kept token is met, no other is.
    steps = 499
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: (seed + 0.5) / steps)
    params = SamplingParams(**fields)
    for size in (1, 2, 50):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 2
        ids = sample(
            logits.expand(steps, -1), [params] * steps, range(steps), [0] * steps, size
        ).tolist()
        row = logits[0].tolist()
        assert ids == [draw_by_the_book(row, params, (s + 0.5) / steps) for s in range(steps)]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_ties_go_to_the_lowest_ids(fields: dict[str, float]) -> None:
    row = [1.0, 3.0, 3.0, 0.5, 3.0, 1.0, 3.0, 1.0]
    params = SamplingParams(**fields)
    n = 600
    ids = sample(torch.tensor([row] * n), [params] * n, [5] * n, range(n), len(row))
    kept = {i for i, weight in kept_by_the_book(row, params) if weight > 1 / 20}
    assert kept <= set(ids.tolist()) <= {i for i, _ in kept_by_the_book(row, params)}


def test_filter_order_is_top_k_top_p_min_p() -> None:
    # top_p counts the mass that top_k left: 0.4/0.7 < 0.6, so two tokens stay (of all: three).
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(400, -1)
    params = SamplingParams(top_k=2, top_p=0.6)
    assert set(sample(row, [params] * 400, [1] * 400, range(400), 4).tolist()) == {0, 1}
    params = SamplingParams(top_k=2, top_p=0.55)
    assert set(sample(row, [params] * 400, [1] * 400, range(400), 4).tolist()) == {0}
    # top_p before min_p: 0.75 of all takes three; of the 0.9 that min_p leaves it would take two.
    params = SamplingParams(top_p=0.75, min_p=0.45)
    assert set(sample(row, [params] * 400, [1] * 400, range(400), 4).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0, "top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_law_of_the_draws(fields: dict[str, float], over: str) -> None:
    size, n = 60, 20_000
    params = SamplingParams(**fields)
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(3)) * 1.5
    seeds, positions = ([11] * n, range(n)) if over == "positions" else (range(n), [11] * n)
    ids = sample(logits.expand(n, -1), [params] * n, seeds, positions, size)
    counts = torch.bincount(ids, minlength=size).double()
    kept = [i for i, _ in kept_by_the_book(logits[0].tolist(), params)]
    masked = torch.full((size,), -torch.inf).index_fill(0, torch.tensor(kept), 0.0) + logits[0]
    expected = (masked.double() / params.temperature).softmax(-1) * n
    assert counts.sum() == counts[kept].sum() == n
    common = expected >= 8
    assert common.sum() >= 5
    rest = torch.tensor([n]) - torch.stack([counts[common].sum(), expected[common].sum()])
    counts, expected = counts[common], expected[common]
    if rest[1] >= 8:
        counts, expected = torch.cat([counts, rest[:1]]), torch.cat([expected, rest[1:]])
    assert chi_square(counts, expected) < chi_square_limit(len(counts) - 1)


def test_rows_know_nothing_of_each_other() -> None:
    rng = random.Random(0)
    size, n = 1003, 41
    logits = torch.randn(n, size + 5, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 5, 900]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.01]),
        )
        for _ in range(n)
    ]
    seeds = [rng.randrange(2**64) for _ in range(n)]
    positions = [rng.randrange(100_000) for _ in range(n)]
    together = sample(logits, params, seeds, positions, size).tolist()
    for row in range(n):
        alone = sample(logits[[row]], [params[row]], [seeds[row]], [positions[row]], size)
        assert alone.tolist() == [together[row]]
    order = list(range(n))
    rng.shuffle(order)
    wide = torch.zeros(n, 2 * size + 10, dtype=torch.bfloat16)
    wide[:, ::2] = logits[order]
    shuffled = sample(
        wide[:, ::2],
        *([values[row] for row in order] for values in (params, seeds, positions)),
        vocab_limit=size,
    )
    assert shuffled.tolist() == [together[row] for row in order]
    greedy = [row for row in range(n) if params[row].greedy]
    assert 5 < len(greedy) < 20
    assert [together[row] for row in greedy] == logits[greedy, :size].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 9.0], [-3.0, -4.0, -3.0, 9.0]], dtype=dtype)
    ids = sample(logits, [GREEDY, SamplingParams(temperature=1e-6, top_k=3)], [0, 0], [0, 0], 3)
    assert ids.tolist() == [1, 0]
    assert ids.dtype == torch.int64


def test_greedy_needs_no_generator_and_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", None)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert sample(torch.eye(3), [GREEDY] * 3, [0] * 3, [0] * 3, 3).tolist() == [0, 1, 2]


def test_padded_ids_are_never_chosen() -> None:
    logits = torch.zeros(300, 10)
    logits[:, 7:] = 50.0
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.99)):
        ids = sample(logits, [params] * 300, [1] * 300, range(300), 7)
        assert ids.max() < 7
    # A tokenizer may also know more ids than the head has.
    assert sample(torch.eye(2), [GREEDY] * 2, [0] * 2, [0] * 2, 99).tolist() == [0, 1]


def test_minus_infinity_is_never_chosen() -> None:
    logits = torch.full((400, 9), -torch.inf)
    logits[:, 4] = -80.0
    logits[:, 8] = -80.5
    for params in (SamplingParams(), SamplingParams(top_k=6), SamplingParams(top_p=0.9999)):
        ids = sample(logits, [params] * 400, [1] * 400, range(400), 9)
        assert set(ids.tolist()) == {4, 8}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2)])
@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_bad_logits_are_an_error(params: SamplingParams, bad: str) -> None:
    logits = torch.randn(4, 6)
    logits[0, 5] = torch.nan  # padding: not looked at
    if bad == "nothing":
        logits[2] = -torch.inf
    else:
        logits[2, 3] = float(bad)
    with pytest.raises(RuntimeError, match=r"rows \[2\] of 4 hold NaN or \+inf"):
        sample(logits, [params] * 4, [0] * 4, [0] * 4, 5)


def test_empty_batch() -> None:
    assert sample(torch.empty(0, 5), [], [], [], 5).tolist() == []


def test_whole_vocabulary_and_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 248_320
    logits = torch.zeros(1, size)
    for share in (0.0, 0.3, 1 - 2.0**-53):
        monkeypatch.setattr(sampler, "uniform", lambda *_, share=share: share)
        for fields, kept in (
            ({}, size),
            ({"top_k": size - 9}, size - 9),
            ({"top_p": 0.5}, size // 2),
        ):
            ids = sample(logits, [SamplingParams(**fields)], [0], [0], size)
            assert ids.tolist() == [int(share * kept)]


def test_tiny_temperature_is_the_most_probable_token() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e4 - 1.0]])
    params = SamplingParams(temperature=1e-5)
    assert sample(logits, [params], [3], [3], 3).tolist() == [0]


def test_splitmix_known_values() -> None:
    assert sampler._mix(0) == 0xE220A8397B1DCDAF  # the published first output for state 0
    assert uniform(0, 0) == (sampler._mix(0xE220A8397B1DCDAF) >> 11) / 2**53
    assert uniform(7, 3) == uniform(7, 3) != uniform(3, 7)
    assert uniform(2**64 + 7, 3) == uniform(7, 3)


@pytest.mark.parametrize(
    "key", [lambda i: (5, i), lambda i: (i, 5), lambda i: (i, i), lambda i: (i << 32, 0)]
)
def test_uniforms_are_uniform_and_unrelated(key: object) -> None:
    n = 20_000
    values = torch.tensor([uniform(*key(i)) for i in range(n)], dtype=torch.float64)  # type: ignore[operator]
    assert values.min() >= 0 and values.max() < 1
    counts = torch.bincount((values * 64).long(), minlength=64).double()
    assert chi_square(counts, torch.full((64,), n / 64)) < chi_square_limit(63)
    pairs = (values[:-1] * 8).long() * 8 + (values[1:] * 8).long()
    counts = torch.bincount(pairs, minlength=64).double()
    assert chi_square(counts, torch.full((64,), (n - 1) / 64)) < chi_square_limit(63)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_cuda() -> None:
    n, size = 64, 4099
    logits = (torch.randn(n, size, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    fields = [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02}]
    params = [SamplingParams(**fields[row % 4]) for row in range(n)]
    seeds, positions = list(range(n)), [row * 3 for row in range(n)]
    there = sample(logits.cuda(), params, seeds, positions, size - 3)
    assert there.device.type == "cuda"
    assert there.tolist() == sample(logits, params, seeds, positions, size - 3).tolist()
    for row in range(n):
        alone = sample(
            logits[[row]].cuda(), [params[row]], [seeds[row]], [positions[row]], size - 3
        )
        assert alone.item() == there[row].item()
