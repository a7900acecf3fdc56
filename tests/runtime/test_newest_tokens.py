"""Greedy tokens: chosen within every step, and stored where the next one finds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import KINDS, VOCAB, Builder, checkpoint, drain
from oracle import random_ids

from minivllm import LLM, SamplingParams
from minivllm.runtime.model_runner import ModelRunner, StepLogits
from minivllm.runtime.newest_tokens import NewestTokens
from minivllm.runtime.step import Step

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)


def test_choices_and_what_is_stored_over_them() -> None:
    newest = NewestTokens(5, torch.device("cpu"), vocab_limit=3)
    logits = torch.tensor(
        [[0.0, 2.0, 1.0, 9.0], [3.0, 0.0, 0.0, 0.0], [0.0, torch.nan, 0.0, 0.0], [0.0, 0.0, 1.0, 0]]
    )
    greedy = torch.empty(4, dtype=torch.int64)
    newest.choose(logits, torch.tensor([4, 0, 2, 0]), greedy)
    assert greedy.tolist() == [1, 0, -1, 2]
    assert newest.tokens.tolist() == [0, 0, 0, 0, 1]
    newest.store([2, 3], torch.tensor([7, 8]))
    assert newest.tokens.tolist() == [0, 0, 7, 8, 1]


@pytest.fixture(scope="module", params=KINDS)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")), *request.param)


class Watch:
    """A runner's `execute`, and of each step whether it prefills and decodes, and its logits."""

    def __init__(self, llm: LLM) -> None:
        assert isinstance(llm.engine.runner, ModelRunner)
        self.runner = llm.engine.runner
        self.execute = self.runner.execute
        self.runner.execute = self  # type: ignore[assignment]
        self.steps: list[tuple[bool, bool, StepLogits]] = []

    def __call__(self, step: Step) -> StepLogits:
        logits = self.execute(step)
        assert logits.greedy is not None
        best = torch.cat([part.argmax(-1) for part in logits.parts])
        assert logits.greedy.tolist() == best.tolist() and len(best) == len(step.sampled)
        slots = [request.state_slot for request in step.sampled]
        assert len({*slots, 0}) == len(slots) + 1
        assert self.runner.newest.tokens[slots].tolist() == best.tolist()
        for chunk in step.prefill:
            assert chunk.request.packed_ids.tolist() == chunk.request.token_ids
        self.steps.append((bool(step.prefill), bool(step.decode), logits))
        return logits

    def joined(self) -> set[bool]:
        """Whether wide logits of steps were put together."""
        return {"sampled" in vars(logits) for *_, logits in self.steps}


def test_greedy_tokens_of_every_kind_of_step(build: Builder) -> None:
    """A prompt in chunks, forks, log-probabilities of a prompt, and decode beside each."""
    llm = build(record=False, max_num_batched_tokens=96)
    watch = Watch(llm)
    requests = {
        llm.add_request(ids, params): (ids, params)
        for ids, params in (
            (random_ids(200, VOCAB, seed=1), GREEDY),
            (random_ids(70, VOCAB, seed=2), replace(GREEDY, n=3, seed=0)),
            (random_ids(30, VOCAB, seed=3), replace(GREEDY, prompt_logprobs=0)),
            (random_ids(64, VOCAB, seed=4), GREEDY),
        )
    }
    outputs = drain(llm)
    kinds = {(prefills, decodes) for prefills, decodes, _ in watch.steps}
    assert kinds == {(True, False), (True, True), (False, True)}
    assert watch.joined() == {False}
    for name, (ids, params) in requests.items():
        for completion, alone in zip(
            outputs[name].outputs,
            build.alone(ids, replace(params, prompt_logprobs=None)),
            strict=True,
        ):
            assert completion.token_ids == alone.tokens or build.dtype != "float32"


def test_a_drawn_row_goes_on_with_what_was_drawn(build: Builder) -> None:
    """Its step's greedy token was there first; the rows beside it keep theirs."""
    llm = build(record=False, async_scheduling=True)
    watch = Watch(llm)
    ids = [random_ids(n, VOCAB, seed=n) for n in (65, 3)]
    outputs = llm.generate(ids, [DRAWN, GREEDY], use_tqdm=False)
    assert watch.joined() == {True}
    if build.dtype == "float32":
        for prompt, params, output in zip(ids, (DRAWN, GREEDY), outputs, strict=True):
            ((tokens, _),) = build.ends(prompt, params)
            assert output.outputs[0].token_ids == tokens


def test_packed_ids_follow_the_tokens(build: Builder) -> None:
    """In a prompt that runs again with its output, too; forks pack their own."""
    llm = build(record=False, blocks=5, max_num_seqs=2, snapshots=0)
    watch = Watch(llm)
    for seed in (1, 2):
        llm.add_request(random_ids(60, VOCAB, seed=seed), replace(GREEDY, max_tokens=120))
    drain(llm)
    assert llm.metrics["preemptions"] > 0 and watch.steps
    llm.add_request(random_ids(60, VOCAB), replace(GREEDY, n=2, seed=0))
    llm.step()
    first, second = llm.engine.scheduler.running
    assert first.pack() == second.pack() and first.packed_ids is not second.packed_ids
    drain(llm)
