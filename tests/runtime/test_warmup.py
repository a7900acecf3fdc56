"""The first runs of the graphs, here on the CPU: what they cover, and that they leave no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import VOCAB, Builder, assert_idle, checkpoint, result
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.warmup import (
    PREFILLS,
    counted_builds,
    run_largest_decode,
    run_largest_prefill,
    run_largest_sampling,
    warm_up_decode,
    warm_up_prefill,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")))


def spied(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, list[Any]]:
    """The runner, and a record of what it runs."""
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    ran: list[Any] = []
    prefill, decode = runner.prefill, runner.decode

    def spy_prefill(rows: Any) -> torch.Tensor:
        ran.append(tuple((r.start, r.end) for r in rows))
        return prefill(rows)

    def spy_decode(rows: Any) -> torch.Tensor:
        ran.append(len(rows))
        return decode(rows)

    monkeypatch.setattr(runner, "prefill", spy_prefill)
    monkeypatch.setattr(runner, "decode", spy_decode)
    return runner, ran


def test_it_runs_everything_and_changes_no_answer(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner checks its inputs here: no slot may run twice in a step."""
    llm = build(max_num_seqs=11)
    runner, ran = spied(llm, monkeypatch)
    with counted_builds() as builds:
        warm_up_prefill(runner)
        warm_up_decode(runner)
    assert ran == [*PREFILLS, 1, 2, 4, 8, 11]
    assert builds.count == 0, "a CPU builds nothing"
    prompts = [random_ids(n, VOCAB, seed=n) for n in (1, 20, 64, 130)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result(o) for o in outputs] == [build.ends(p, GREEDY) for p in prompts]
    assert_idle(llm)


@pytest.mark.parametrize("length", [2, 63, 64, 65])
def test_the_smallest_pools(length: int, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(max_num_seqs=1, blocks=-(-length // 64), snapshots=0, max_model_len=length)
    runner, ran = spied(llm, monkeypatch)
    warm_up_prefill(runner)
    warm_up_decode(runner)
    longest = -(-length // 64) * 64
    assert all(end <= longest for parts in ran[:-1] for _, end in parts) and ran[-1] == 1
    assert ran[0] == ((0, 1),)


def test_the_largest_steps(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, ran = spied(build(max_num_seqs=5), monkeypatch)
    monkeypatch.setattr(runner.decoder, "_checked", False)  # its rows share a slot
    run_largest_prefill(runner, tokens=500, model_len=200)
    run_largest_prefill(runner, tokens=100, model_len=2048)
    logits = run_largest_decode(runner)
    run_largest_sampling(logits)
    assert ran == [((0, 200), (0, 200), (0, 100)), ((0, 100),), 5]
    assert logits.shape == (5, VOCAB)


def test_builds_are_counted() -> None:
    knobs = pytest.importorskip("triton").knobs
    earlier = knobs.runtime.jit_post_compile_hook
    seen = []
    knobs.runtime.jit_post_compile_hook = lambda *a, **k: seen.append(a)
    try:
        with counted_builds() as outer, counted_builds() as inner:
            knobs.runtime.jit_post_compile_hook("kernel")
        assert (outer.count, inner.count, seen) == (1, 1, [("kernel",)])
        knobs.runtime.jit_post_compile_hook("kernel")
        assert (outer.count, len(seen)) == (1, 2)
    finally:
        knobs.runtime.jit_post_compile_hook = earlier
