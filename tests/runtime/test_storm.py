"""Far more requests than memory: none is lost, none is told twice, and nothing leaks."""

from __future__ import annotations

import gc
import random
import resource
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from engines import (
    KINDS,
    Builder,
    assert_idle,
    assert_result,
    checkpoint,
    drain,
    step,
)
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.errors import UserError
from minivllm.runtime.outputs import RequestOutput

VOCAB = 4160  # of tiny
BLOCKS = 10
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def build(request: pytest.FixtureRequest) -> Builder:
    return Builder("asset://tiny", *request.param)


@pytest.fixture(scope="module")
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")))


class Storm:
    """Requests of every sort come in bursts and go as they please.

    Attributes:
        asked: request id to prompt and parameters.
        told: request id to its last output.
    """

    def __init__(self, llm: LLM, vocab: int, seed: int) -> None:
        self.llm = llm
        self.vocab = vocab
        self.random = random.Random(seed)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.told: dict[str, RequestOutput] = {}
        self.deltas: Counter[str] = Counter()
        self.systems = [random_ids(n, vocab, seed=n) for n in (64, 128, 192)]

    def request(self) -> tuple[list[int], SamplingParams]:
        length = self.random.choice([1, 30, 58, 60, 62, 63, 63, 64, 65, 121])  # soon a block more
        ids = random_ids(length, self.vocab, seed=self.random.randrange(40))
        if self.random.random() < 0.5:
            ids = self.random.choice(self.systems) + ids
        params = replace(GREEDY, max_tokens=self.random.choice([1, 4, 8, 8, 8, 20]))
        if self.random.random() < 0.4:
            n = self.random.choice([1, 1, 2, 3])
            params = replace(DRAWN, n=n, seed=self.random.randrange(5), max_tokens=9)
        return ids, params

    def run(self, count: int, waiting: int = 25, abort: float = 0.02) -> None:
        """Add `count` more, `waiting` at most at a time, and step until all have ended."""
        left = count
        while left or self.llm.has_unfinished_requests:
            burst = min(left, self.random.randrange(6))
            if self.llm.metrics["waiting"] < waiting:
                for _ in range(burst):
                    ids, params = self.request()
                    self.asked[self.llm.add_request(ids, params)] = ids, params
                left -= burst
            running = self.asked.keys() - self.told.keys()
            if running and self.random.random() < abort:
                self.llm.abort(self.random.choice(sorted(running, key=int)))
                self.llm.engine.scheduler.check_integrity()
            for output in step(self.llm):
                assert output.request_id not in self.told, "more came behind its end"
                self.deltas[output.request_id] += 1
                if output.finished:
                    self.told[output.request_id] = output


@pytest.mark.parametrize(
    ("ahead", "count"), [(True, 300), (False, 60)], ids=["one_ahead", "in_step"]
)
def test_storm(ahead: bool, count: int, build: Builder) -> None:
    llm = build(
        blocks=BLOCKS, snapshots=5, host=3, interval=128, max_num_seqs=6,
        max_num_batched_tokens=150, record=False, async_scheduling=ahead,
    )  # fmt: skip
    storm = Storm(llm, VOCAB, seed=0)
    storm.run(count)
    assert_idle(llm)
    assert len(storm.asked) == count and storm.told.keys() == storm.asked.keys()
    numbers = llm.metrics
    cache = numbers["prefix_cache"]
    assert numbers["finished"] + numbers["aborted"] == count and numbers["failed"] == 0
    assert min(numbers["aborted"], numbers["preemptions"]) >= count // 30
    assert min(cache["snapshots_restored"], cache["blocks_evicted"], cache["reused_tokens"]) >= 10
    kept = sum(len(c.token_ids) for o in storm.told.values() for c in o.outputs)
    assert numbers["generated_tokens"] == kept
    for request_id, (_, params) in storm.asked.items():
        completions = storm.told[request_id].outputs
        assert [c.index for c in completions] == list(range(params.n))
        for c in completions:
            assert c.finish_reason in ("length", "abort")
            assert c.finish_reason == "abort" or len(c.token_ids) == params.max_tokens
    for request_id in random.Random(1).sample(sorted(storm.asked), 40):
        assert_result(build, llm, *storm.asked[request_id], storm.told[request_id])


def test_at_the_edge_of_the_pool(build: Builder) -> None:
    """A prompt of nearly all tokens runs, however much runs beside it; a larger one is refused."""
    llm = build(blocks=BLOCKS, max_num_seqs=4, max_num_batched_tokens=100)
    capacity = BLOCKS * 64
    for length in (capacity * 99 // 100, capacity - 1):
        ids = random_ids(length, VOCAB, seed=length)
        params = replace(GREEDY, max_tokens=None)
        beside_ids = random_ids(100, VOCAB, seed=2)
        beside_params = replace(GREEDY, max_tokens=80)
        beside = [llm.add_request(beside_ids, beside_params)]
        large = llm.add_request(ids, params)
        beside.append(llm.add_request(beside_ids[1:], beside_params))
        outputs = drain(llm)
        assert len(outputs[large].outputs[0].token_ids) == capacity - length
        room = replace(params, max_tokens=capacity - length)
        assert_result(build, llm, ids, room, outputs[large])
        assert_result(build, llm, beside_ids, beside_params, outputs[beside[0]])
        assert_result(build, llm, beside_ids[1:], beside_params, outputs[beside[1]])
        assert_idle(llm)
    for length in (capacity, capacity + 6):
        with pytest.raises(UserError, match=f"{length} tokens.*max_model_len={capacity}"):
            llm.add_request(random_ids(length, VOCAB), GREEDY)
    with pytest.raises(UserError, match=r"n=3 completions of 633 tokens .* 10 blocks"):
        llm.add_request(random_ids(633, VOCAB), replace(DRAWN, n=3, seed=0))
    with pytest.raises(UserError, match="n=5"):
        llm.add_request([1], replace(DRAWN, n=5))
    assert not llm.has_unfinished_requests
    assert_idle(llm)


def test_completions_that_cannot_all_grow(build: Builder) -> None:
    """Three completions fill the pool with their prompt; each needs a block more to go on."""
    llm = build(blocks=BLOCKS, max_num_seqs=4)
    ids, params = random_ids(BLOCKS * 64 - 128, VOCAB), replace(DRAWN, n=3, seed=0, max_tokens=70)
    name = llm.add_request(ids, params)
    (output,) = drain(llm).values()
    assert output.request_id == name and output.metrics.num_preemptions >= 1
    assert_result(build, llm, ids, params, output)
    assert_idle(llm)


def test_memory_stays_flat(small: Builder) -> None:
    """Python's allocations and the process's size, over 150 requests behind the first 80.

    Allowed for each request: its times in the metrics, which keep a number a token (up to 4,096).
    A request that stayed would take over 5,000 bytes.
    """
    llm = small(
        blocks=BLOCKS, snapshots=5, host=3, interval=128, max_num_seqs=6,
        max_num_batched_tokens=150, record=False,
    )  # fmt: skip

    def storm(seed: int, count: int) -> None:
        Storm(llm, 97, seed).run(count)

    storm(0, 80)
    gc.collect()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    storm(1, 30)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    steps = llm.metrics["steps"]
    storm(2, 150)
    gc.collect()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    steps = llm.metrics["steps"] - steps
    print(f"{steps} steps: {after - before} bytes, peak {peak - before}, {grown} KiB resident")
    assert steps >= 300
    assert after - before < 150 * 1000
    assert grown < 32 * 1024
    assert_idle(llm)


def test_ids_come_back(tmp_path: Path, small: Builder) -> None:
    """An id is in use until its request ends, and free from then on, also by an abort."""
    llm = small()
    llm.add_request([1, 2, 3], replace(GREEDY, max_tokens=2), "mine")
    with pytest.raises(UserError, match="request_id='mine' is in use"):
        llm.add_request([1, 2, 3], GREEDY, "mine")
    assert len(drain(llm)["mine"].outputs[0].token_ids) == 2
    llm.add_request([1, 2, 3], GREEDY, "mine")
    llm.abort("mine")
    with pytest.raises(UserError, match="no such request"):
        llm.abort("mine")
    assert drain(llm)["mine"].outputs[0].finish_reason == "abort"
    assert_idle(llm)
