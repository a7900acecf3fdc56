"""The engine's numbers, after work whose numbers are known."""

from __future__ import annotations

import json

import pytest
import torch
from engines import VOCAB, Builder, checkpoint, drain
from oracle import random_ids

from minivllm import SamplingParams
from minivllm.runtime.metrics import _summary
from minivllm.runtime.model_runner import StepLogits


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")))


def greedy(tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=n)


def test_numbers_of_known_work(build: Builder) -> None:
    llm = build(max_num_seqs=3, blocks=20, snapshots=8)
    idle = llm.metrics
    assert idle["kv_blocks"] == 20 and idle["slots"] == 3
    assert idle["time_to_first_token"] == idle["time_between_tokens"] == {"count": 0}
    counts = ("steps", "prompt_tokens", "generated_tokens", "finished", "aborted", "failed",
              "preemptions", "waiting", "running", "kv_blocks_used", "slots_used")  # fmt: skip
    assert not any(idle[name] for name in counts)
    prompt = random_ids(130, VOCAB)
    llm.generate(prompt, greedy(5))
    llm.generate(prompt, greedy(3))  # 128 of its tokens are cached
    numbers = llm.metrics
    assert {name: numbers[name] for name in counts[:7]} == {
        "steps": 5 + 3,
        "prompt_tokens": 130 + 2,
        "generated_tokens": 8,
        "finished": 2,
        "aborted": 0,
        "failed": 0,
        "preemptions": 0,
    }
    cache = numbers["prefix_cache"]
    assert cache["queried_tokens"] == 260
    assert cache["kv_matched_tokens"] == cache["state_matched_tokens"] == 128
    assert cache["reused_tokens"] == 128
    assert (cache["snapshots_kept"], cache["snapshots_restored"]) == (1, 1)
    assert numbers["time_to_first_token"]["count"] == 2
    assert numbers["time_between_tokens"]["count"] == 4 + 2
    json.dumps(numbers)
    # while requests run: two that take two slots and three blocks, one that waits for a slot
    llm.add_request(random_ids(3, VOCAB), greedy(9, n=2), "a")
    llm.add_request(random_ids(70, VOCAB, seed=1), greedy(9, n=1), "b")
    llm.add_request(random_ids(3, VOCAB, seed=2), greedy(9), "c")
    llm.step()
    numbers = llm.metrics
    assert (numbers["running"], numbers["waiting"], numbers["slots_used"]) == (3, 1, 3)
    assert numbers["kv_blocks_used"] == 2 + 2
    llm.abort("b")
    drain(llm)
    numbers = llm.metrics
    assert (numbers["finished"], numbers["aborted"], numbers["failed"]) == (4, 1, 0)
    assert numbers["kv_blocks_used"] == numbers["slots_used"] == numbers["running"] == 0
    assert numbers["time_to_first_token"]["count"] in (4, 5)


def test_preemptions_and_failures(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(max_num_seqs=2, blocks=3, snapshots=0, max_model_len=192)
    llm.generate([random_ids(60, VOCAB, seed=i) for i in range(2)], greedy(100), use_tqdm=False)
    numbers = llm.metrics
    assert numbers["preemptions"] > 0 and numbers["prompt_tokens"] > 120
    assert (numbers["generated_tokens"], numbers["finished"]) == (200, 2)
    execute = llm.engine.runner.execute

    def broken(step: object) -> StepLogits:
        logits = execute(step)  # type: ignore[arg-type]
        return StepLogits([torch.full_like(logits.sampled, torch.nan)], logits.prompt)

    monkeypatch.setattr(llm.engine.runner, "execute", broken)
    (output,) = llm.generate([1, 2, 3], greedy(5))
    assert output.finished and output.outputs[0].finish_reason == "error"
    assert (llm.metrics["failed"], llm.metrics["finished"]) == (1, 2)
    assert llm.metrics["generated_tokens"] == 200


def test_summaries() -> None:
    assert _summary([]) == {"count": 0}
    assert _summary([2.0]) == {"count": 1, "mean": 2.0, "p50": 2.0, "p99": 2.0, "max": 2.0}
    times = [float(i) for i in range(1000, 0, -1)]
    assert _summary(times) == {
        "count": 1000,
        "mean": 500.5,
        "p50": 501.0,
        "p99": 991.0,
        "max": 1000.0,
    }
