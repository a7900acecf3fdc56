"""The first run of the graphs, here on the CPU: what it runs, whatever the block size."""

from __future__ import annotations

import pytest
import torch
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.presets import model_preset
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.warmup import PROMPT, warm_up


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_it_runs_both_graphs_and_changes_no_answer(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    runtime = RuntimeOptions(device="cpu", block_size=block_size, max_model_len=100)
    llm = LLM.from_config(EngineConfig(model_preset("tiny"), runtime=runtime))
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = random_ids(20, 4096)
    before = llm.generate(prompt, params)[0].outputs[0].token_ids
    ran = []
    for phase, graph in runner.graphs.items():

        def spy(phase: str = phase, graph: object = graph, **inputs: torch.Tensor) -> torch.Tensor:
            ran.append((phase, int(inputs["seq_lens"][0])))
            return graph(**inputs)  # type: ignore[operator]

        spy.inputs = graph.inputs  # type: ignore[attr-defined]
        monkeypatch.setitem(runner.graphs, phase, spy)
    builds = warm_up(runner, slot=1, blocks=range(1, -(-100 // block_size) + 1))
    assert ran == [("prefill", PROMPT - 1), ("prefill", PROMPT), ("decode", PROMPT + 1)]
    assert builds.seconds > 0 and builds.count == 0
    monkeypatch.undo()
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == before


def test_the_smallest_pools() -> None:
    runtime = RuntimeOptions(device="cpu", block_size=1, max_model_len=2)
    llm = LLM.from_config(EngineConfig(model_preset("tiny"), runtime=runtime))
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        for blocks in (range(1, 2), range(1, 3)):
            assert warm_up(runner, slot=1, blocks=blocks).seconds > 0
