"""A GPU that is not the current one: all doors run there, as they run on the first.

Both GPUs are of one kind and run the same kernels, so what they compute is the same to the bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import TWO_GPUS, VOCAB, Builder, assert_idle, checkpoint, logits_behind, result, step
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.inspect import inspect
from minivllm.run import main
from minivllm.runtime.async_llm import AsyncLLM
from minivllm.runtime.outputs import RequestOutput

pytestmark = TWO_GPUS

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.1, seed=7, ignore_eos=True)
SYSTEM = random_ids(128, VOCAB, seed=1000)


def prompt(length: int) -> list[int]:
    return random_ids(length, VOCAB, seed=length)


REQUESTS = [
    (prompt(1), replace(GREEDY, max_tokens=90)),
    (prompt(65), replace(GREEDY, max_tokens=70, logprobs=3, prompt_logprobs=2)),
    (SYSTEM + prompt(58), replace(GREEDY, max_tokens=10)),
    (SYSTEM + prompt(30), replace(DRAWN, max_tokens=20, top_p=0.9, top_k=40)),
    (prompt(50), replace(DRAWN, max_tokens=25, repetition_penalty=1.3, presence_penalty=0.5)),
    (prompt(57), replace(DRAWN, max_tokens=15, n=3)),
    (prompt(300), replace(GREEDY, max_tokens=5)),
]


@pytest.fixture(autouse=True)
def the_first_stays_current() -> Iterator[None]:
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("small"))


def allocations(gpu: int) -> int:
    """How many there have been."""
    return torch.cuda.memory_stats(gpu).get("allocation.all.allocated", 0)


def add_all(llm: LLM) -> None:
    for ids, params in REQUESTS:
        llm.add_request(ids, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_two_engines_step_in_turn(folder: Path, dtype: str, mode: str) -> None:
    """Short of memory, with prefix hits, states kept on the host and preemption."""
    llms = []
    for n in range(2):
        build = Builder(folder, f"cuda:{n}", dtype)
        llms.append(build(mode=mode, blocks=6, snapshots=4, host=2, interval=64, max_num_seqs=5))
    finished: list[dict[str, RequestOutput]] = [{}, {}]
    for _ in range(2):  # the second time behind what the first left in the caches
        for llm in llms:
            add_all(llm)
        while any(llm.has_unfinished_requests for llm in llms):
            for llm, outputs in zip(llms, finished, strict=True):
                if llm.has_unfinished_requests:
                    outputs |= {o.request_id: o for o in step(llm) if o.finished}
    first, second = finished
    assert first.keys() == second.keys() and len(first) == 2 * len(REQUESTS)
    for name, output in first.items():
        assert result(output) == result(second[name])
        pairs = zip(
            logits_behind(llms[0], output), logits_behind(llms[1], second[name]), strict=True
        )
        assert all(len(a) and torch.equal(a, b) for a, b in pairs)
        for ours, theirs in zip(output.outputs, second[name].outputs, strict=True):
            assert ours.logprobs == theirs.logprobs
        assert output.prompt_logprobs == second[name].prompt_logprobs
    for llm in llms:
        assert_idle(llm)
        cache = llm.metrics["prefix_cache"]
        assert cache["reused_tokens"] and cache["snapshots_spilled"] and llm.metrics["preemptions"]


def test_nothing_of_it_lies_on_the_first(folder: Path) -> None:
    before = allocations(0), allocations(1)
    llm = Builder(folder, "cuda:1", "bfloat16")(max_num_seqs=5, blocks=80)
    add_all(llm)
    while llm.has_unfinished_requests:
        step(llm)
    assert allocations(0) == before[0] and allocations(1) > before[1]


def test_a_server() -> None:
    """Its thread has a current device of its own."""

    async def ask(device: str) -> list[str]:
        async with AsyncLLM("tiny", device=device, max_model_len=400) as server:
            assert str(server._llm.device) == device

            async def final(text: str) -> str:
                params = SamplingParams(temperature=0.0, max_tokens=40)
                outputs = [output async for output in server.generate(text, params)]
                return outputs[-1].outputs[0].text

            return await asyncio.gather(*(final(t) for t in ("She had", "The sun", "Once")))

    first, second = (asyncio.run(asyncio.wait_for(ask(f"cuda:{n}"), 300)) for n in range(2))
    assert first == second and all(first)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for n in range(2):
        assert main(["+model=tiny", f"runtime.device=cuda:{n}", "sampling.temperature=0"]) == 0
        text, _, summary = capsys.readouterr().out.strip().rpartition("\n")
        assert f"| cuda:{n} " in summary
        texts.append(text)
    assert texts[0] == texts[1] and texts[0]


def test_a_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+model=tiny", "compiler.measure=true", "runtime.device=cuda:1"]
    assert main(arguments, inspect) == 0
    printed = capsys.readouterr().out
    assert printed.count("captured in a CUDA Graph") == 2 and "not joined" not in printed
