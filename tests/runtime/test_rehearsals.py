"""What runs before a capture, without a GPU: it stays within what belongs to nobody."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from engines import Builder, checkpoint
from oracle import random_ids

from minivllm import SamplingParams
from minivllm.runtime import decode_runner, prefill_runner
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.prefill_inputs import Bucket

BUCKETS = [Bucket(16, 2), Bucket(64, 2), Bucket(128, 8)]


class Rehearsals:
    """In place of `Captures`: rehearses, and captures nothing."""

    def __init__(self, device: torch.device) -> None:
        self.rehearsed = 0
        self.captured: list[Hashable] = []

    def rehearse(self, run: Callable[[], object]) -> None:
        assert not self.captured, "a capture may not be the first run of a kernel"
        run()
        self.rehearsed += 1

    def capture(self, key: Hashable, run: Callable[[], object]) -> None:
        self.captured.append(key)


@pytest.fixture
def runner(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> ModelRunner:
    """Of an engine that has run; capturable, as if on a GPU."""
    llm = Builder(checkpoint(tmp_path_factory.mktemp("small")))(max_num_seqs=5)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([random_ids(n, 90, seed=n) for n in (3, 70)], params, use_tqdm=False)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    for module in (prefill_runner, decode_runner):
        monkeypatch.setattr(module, "Captures", Rehearsals)
    monkeypatch.setattr(prefill_runner, "_Staging", lambda *_: None)
    for graph in runner.graphs.values():
        graph.capturable = True
    return runner


def test_rehearsals_write_where_nobody_reads(runner: ModelRunner) -> None:
    pools = [runner.slots, runner.snapshots, runner.blocks]
    for pool in pools:
        pool.poison(list(range(pool is not runner.snapshots, len(pool.storage))))
    before = [pool.storage.clone() for pool in pools]
    with torch.inference_mode():
        graphs = runner.capture(BUCKETS)
    assert graphs == len(BUCKETS) + len(runner.decoder.buckets)
    for phase, sizes in ((runner.prefiller, BUCKETS), (runner.decoder, runner.decoder.buckets)):
        assert isinstance(phase.captures, Rehearsals)
        assert phase.captures.rehearsed == len(sizes)
        assert phase.captures.captured == sorted(sizes, reverse=True)
    for pool, earlier in zip(pools, before, strict=True):
        owned = slice(0 if pool is runner.snapshots else 1, None)
        assert torch.equal(pool.storage[owned], earlier[owned])
    # slot 0 takes all of it: of some layer's states
    assert not torch.equal(runner.slots.storage[0], before[0][0])


def test_without_buckets_only_decode_is_captured(runner: ModelRunner) -> None:
    """As of an engine whose steps take fewer tokens than the smallest bucket."""
    assert prefill_runner.prefill_buckets(8, 4) == []
    assert runner.capture([]) == len(runner.decoder.buckets)
    assert runner.prefiller.captures is None and runner.prefiller.bucket([]) is None
