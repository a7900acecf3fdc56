"""The sampler: exact filters, the law of the draws, and rows that know nothing of each other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.runtime import sampler
from minivllm.runtime.penalties import History
from minivllm.runtime.sampler import Sampled, uniform, uniforms
from minivllm.runtime.sampling_batch import SHORT, SamplingBatch
from minivllm.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
Rows = Sequence[Any]


def draw(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_limit: int,
    histories: Sequence[History | None] | None = None,
    eos: Sequence[int] = (),
) -> Sampled:
    batch = SamplingBatch.build(
        params, seeds, positions, histories, eos, logits.device, vocab_limit
    )
    return sampler.sample(logits, batch)


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_limit: int,
    histories: Sequence[History | None] | None = None,
    eos: Sequence[int] = (),
) -> Tensor:
    """The ids of rows that are all valid."""
    sampled = draw(logits, params, seeds, positions, vocab_limit, histories, eos)
    assert sampled.valid.all() and sampled.valid.dtype == torch.bool
    return sampled.token_ids


def sweep(seeds: Tensor, positions: Tensor) -> Tensor:
    """For `uniforms`: seeds walk through [0, 1) in as many steps as the position says."""
    return (seeds.double() + 0.5) / positions


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
    monkeypatch.setattr(sampler, "uniforms", sweep)
    params = SamplingParams(**fields)
    for size in (1, 2, 50):
        logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size)) * 2
        ids = sample(
            logits.expand(steps, -1), [params] * steps, range(steps), [steps] * steps, size
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


def mixed(n: int, size: int, seed: int) -> tuple[list[SamplingParams], Rows, Rows, Rows]:
    """Rows of every kind: parameters, seeds, positions, histories."""
    rng = random.Random(seed)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 5, SHORT, SHORT + 1, 900]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.01]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
            logit_bias=rng.choice([None, None, {3: 4.0, size - 1: 2.5}]),
            min_tokens=rng.choice([0, 0, 4, 16]),
            logprobs=rng.choice([None, 0, 3, 20]),
        )
        for _ in range(n)
    ]
    histories = []
    for _ in range(n):
        ids = [rng.randrange(size) for _ in range(rng.randrange(1, 40))]
        histories.append(History(ids, rng.randrange(1, len(ids) + 1)))
    seeds = [rng.randrange(2**64) for _ in range(n)]
    return params, seeds, [rng.randrange(100_000) for _ in range(n)], histories


def check_rows_know_nothing_of_each_other(device: str, n: int = 53, size: int = 1003) -> None:
    args = mixed(n, size, seed=0)
    logits = torch.randn(n, size + 5, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    logits = logits.to(device)
    eos = [2, int(logits[0].float().argmax())]
    asking = [row for row in range(n) if args[0][row].logprobs is not None]

    def some(rows: Sequence[int]) -> list[list[Any]]:
        return [[values[row] for row in rows] for values in args]

    def check(there: Sampled, rows: Sequence[int], skip: Sequence[int] = ()) -> None:
        kept = [place for place, row in enumerate(rows) if row not in skip]
        assert there.valid.tolist() == [row not in skip for row in rows]
        expected = together.token_ids[[rows[place] for place in kept]]
        assert there.token_ids[kept].tolist() == expected.tolist()
        found = [row for row in rows if row in asking]
        kept = [place for place, row in enumerate(found) if row not in skip]
        for here, all_rows in zip(numbers(there) if found else [], numbers(together), strict=False):
            expected = all_rows[[asking.index(found[place]) for place in kept]]
            assert torch.equal(
                here[kept], expected[:, : here.shape[1]] if here.ndim == 2 else expected
            )

    def run(logits: Tensor, rows: Sequence[int]) -> Sampled:
        params, seeds, positions, histories = some(rows)
        return draw(logits, params, seeds, positions, size, histories, eos)

    together = run(logits, range(n))
    assert together.valid.all()
    for row in range(n):
        check(run(logits[[row]], [row]), [row])
    order = list(range(n))
    random.Random(5).shuffle(order)
    wide = torch.zeros(n, 2 * size + 10, dtype=torch.bfloat16, device=device)
    wide[:, ::2] = logits[order]
    check(run(wide[:, ::2], order), order)
    # With rows of the same kind beside it, in chunks, and with broken rows of every kind.
    order = order * 3
    check(run(logits[order], order), order)
    broken = set(order[: n // 3])
    poisoned = logits.clone()
    for place, row in enumerate(broken):
        poisoned[row, 7] = torch.nan if place % 2 else torch.inf
    check(run(poisoned[order], order), order, skip=broken)
    greedy = [
        row
        for row, p in enumerate(args[0])
        if p.greedy and not p.penalized and not p.logit_bias and not p.min_tokens
    ]
    assert greedy
    assert together.token_ids[greedy].tolist() == logits[greedy, :size].argmax(-1).tolist()


def test_rows_know_nothing_of_each_other() -> None:
    check_rows_know_nothing_of_each_other("cpu")


def test_a_short_top_k_is_the_start_of_the_sorted_row(monkeypatch: pytest.MonkeyPatch) -> None:
    n, size = 300, 700
    logits = (torch.randn(1, size, generator=torch.Generator().manual_seed(4)) * 4).round() / 2
    logits = logits.expand(n, -1)  # with many ties
    for fields in ({"top_k": SHORT}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}):
        args = (logits, [SamplingParams(**fields)] * n, range(n), [1] * n, size)
        short = sample(*args).tolist()
        with monkeypatch.context() as patch:
            patch.setattr("minivllm.runtime.sampling_batch.SHORT", 0)
            assert sample(*args).tolist() == short
        assert len(set(short)) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 9.0], [-3.0, -4.0, -3.0, 9.0]], dtype=dtype)
    ids = sample(logits, [GREEDY, SamplingParams(temperature=1e-6, top_k=3)], [0, 0], [0, 0], 3)
    assert ids.tolist() == [1, 0]
    assert ids.dtype == torch.int64


def test_greedy_needs_no_generator_and_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniforms", None)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert sample(torch.eye(3), [GREEDY] * 3, [0] * 3, [0] * 3, 3).tolist() == [0, 1, 2]


def test_padded_ids_are_never_chosen() -> None:
    logits = torch.zeros(300, 10)
    logits[:, 7:] = 50.0
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.99)):
        ids = sample(logits, [params] * 300, [1] * 300, range(300), 7)
        assert ids.max() < 7
    with pytest.raises(AssertionError):
        sample(torch.eye(2), [GREEDY] * 2, [0] * 2, [0] * 2, 3)


def test_minus_infinity_is_never_chosen() -> None:
    logits = torch.full((400, 9), -torch.inf)
    logits[:, 4] = -80.0
    logits[:, 8] = -80.5
    for params in (SamplingParams(), SamplingParams(top_k=6), SamplingParams(top_p=0.9999)):
        ids = sample(logits, [params] * 400, [1] * 400, range(400), 9)
        assert set(ids.tolist()) == {4, 8}


BAD_ROWS = {
    "nan": [0.0, 1.0, torch.nan, 2.0, 0.5],
    "inf": [0.0, 1.0, torch.inf, 2.0, 0.5],
    "nothing": [-torch.inf] * 5,
    "all nan": [torch.nan] * 5,
    "nan and inf": [torch.nan, torch.inf, -torch.inf, 0.0, 0.0],
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 2},
        {"top_p": 0.9},
        {"min_p": 1.0},
        {"repetition_penalty": 2.0, "top_p": 0.5, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {2: -100.0}, "logprobs": 0},
        {"min_tokens": 5, "stop_token_ids": [2]},  # the mask hides what is broken
    ],
    ids=str,
)
def test_broken_rows_are_marked_and_touch_no_other(fields: dict[str, Any], bad: str) -> None:
    params = SamplingParams(**fields)
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    histories = [History([1, 2, 3], 2) for _ in range(7)]
    args = ([params] * 7, range(7), [9] * 7, 5, histories)
    before = draw(logits, *args)
    broken = logits.clone()
    broken[:, 5] = torch.nan  # padding: not looked at
    broken[[0, 3], :5] = torch.tensor(BAD_ROWS[bad])
    after = draw(broken, *args)
    good = [1, 2, 4, 5, 6]
    assert after.valid.tolist() == [row in good for row in range(7)]
    assert after.token_ids[[0, 3]].tolist() == [0, 0]
    assert after.token_ids[good].tolist() == before.token_ids[good].tolist()
    assert before.valid.all()
    if params.logprobs is not None:
        for there, here in zip(numbers(after), numbers(before), strict=True):
            assert torch.equal(there[good], here[good])


def numbers(sampled: Sampled) -> list[Tensor]:
    found = sampled.logprobs
    assert found is not None
    return [found.logprobs, found.ranks, found.top_ids, found.top_logprobs]


def test_edits_that_leave_nothing_make_a_row_invalid() -> None:
    logits = torch.full((2, 4), -torch.inf)
    logits[:, 2] = 1.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=1)
        sampled = draw(logits, [params] * 2, [0] * 2, [3] * 2, 4, [History([1], 1)] * 2, [2])
        assert (sampled.valid.tolist(), sampled.token_ids.tolist()) == ([False] * 2, [0] * 2)


def test_empty_batch() -> None:
    sampled = draw(torch.empty(0, 5), [], [], [], 5)
    assert (sampled.token_ids.tolist(), sampled.valid.tolist()) == ([], [])
    assert (sampled.token_ids.dtype, sampled.logprobs) == (torch.int64, None)


def test_whole_vocabulary_and_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 248_320
    logits = torch.zeros(1, size)
    for share in (0.0, 0.3, 1 - 2.0**-53):
        monkeypatch.setattr(
            sampler,
            "uniforms",
            lambda seeds, _, share=share: torch.full_like(seeds, share, dtype=torch.float64),
        )
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


def test_uniforms_on_a_device_are_uniform() -> None:
    check_uniforms("cpu")


def check_uniforms(device: str) -> None:
    rng = random.Random(6)
    ends = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]
    keys = [(seed, position) for seed in ends for position in [*ends[:5], 2**63 - 1]]
    keys += [(rng.randrange(2**64), rng.randrange(2**20)) for _ in range(5000)]
    keys += [(rng.randrange(2**64), rng.randrange(2**63)) for _ in range(5000)]
    seeds, positions = zip(*keys, strict=True)
    n = len(keys)
    batch = SamplingBatch.build([SamplingParams()] * n, seeds, positions, None, (), device, 5)
    assert uniforms(batch.seeds, batch.positions).tolist() == [uniform(*key) for key in keys]


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


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@on_cuda
def test_on_cuda() -> None:
    n, size = 64, 4099
    logits = (torch.randn(n, size, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    params, seeds, positions, histories = mixed(n, size - 3, seed=3)
    args = (params, seeds, positions, size - 3, histories, [1, 2])
    there, here = draw(logits.cuda(), *args), draw(logits, *args)
    assert there.token_ids.device.type == "cuda"
    assert there.token_ids.tolist() == here.token_ids.tolist()
    assert there.valid.all()
    for on_gpu, on_cpu in zip(numbers(there), numbers(here), strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=2e-6, rtol=1e-6)


@pytest.mark.gpu
@on_cuda
def test_rows_know_nothing_of_each_other_on_cuda() -> None:
    check_uniforms("cuda")
    check_rows_know_nothing_of_each_other("cuda")
    check_rows_know_nothing_of_each_other("cuda", n=20, size=30_011)


@pytest.mark.gpu
@on_cuda
def test_nothing_waits_for_the_device() -> None:
    n, size = 200, 2000
    logits = torch.randn(n, size, device="cuda")
    logits[3, 4] = torch.nan
    args = mixed(n, size, seed=1)
    expected = draw(logits, *args[:3], size, args[3], [1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = draw(logits, *args[:3], size, args[3], [1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sampled.token_ids, expected.token_ids)
    assert sampled.valid.logical_not().nonzero().flatten().tolist() == [3]


@pytest.mark.gpu
@on_cuda
def test_under_a_cuda_graph() -> None:
    n, size = 12, 1500
    params, seeds, positions, histories = mixed(n, size, seed=8)
    logits = torch.randn(n, size, device="cuda")
    batch = SamplingBatch.build(params, seeds, positions, histories, [1], "cuda", size)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sampler.sample(logits, batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampled = sampler.sample(logits, batch)
        batch.positions.add_(1)
    for step in range(4):
        logits.copy_(torch.randn(n, size, device="cuda"))
        graph.replay()
        later = [position + step for position in positions]
        expected = draw(logits, params, seeds, later, size, histories, [1])
        assert torch.equal(sampled.token_ids, expected.token_ids)
        assert all(map(torch.equal, numbers(sampled), numbers(expected)))
    # Other values of the same kinds come by one copy.
    other = SamplingBatch.build(params, seeds[::-1], positions, histories, [1], "cuda", size)
    batch.buffer.copy_(other.buffer)
    graph.replay()
    expected = draw(logits, params, seeds[::-1], positions, size, histories, [1])
    assert torch.equal(sampled.token_ids, expected.token_ids)
