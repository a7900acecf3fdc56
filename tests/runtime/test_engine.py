"""The engine's own books: ids, news, seeds, and steps that break off."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Builder, checkpoint

from minivllm import LLM, SamplingParams
from minivllm.runtime import engine as engine_module
from minivllm.runtime.model_runner import StepLogits
from minivllm.runtime.scheduler import _age
from minivllm.runtime.step import Step

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("engine")))


def ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, (length,), generator=generator).tolist()


def outputs(llm: LLM, most: int = 400) -> Iterator[Any]:
    """What steps tell, until nothing is left; a step that raises is gone over."""
    for _ in range(most):
        if not llm.has_unfinished_requests:
            return
        try:
            yield from llm.step()
        except RuntimeError as error:
            assert "boom" in str(error)
    raise AssertionError(f"not idle after {most} steps")


@pytest.mark.parametrize("ahead", [False, True])
def test_an_id_can_be_used_again_at_once_after_an_abort(ahead: bool, build: Builder) -> None:
    llm = build(async_scheduling=ahead)
    gone = llm.queue_request(ids(5), LONG, "x")
    llm.engine.step()
    llm.abort("x")
    again = llm.queue_request(ids(9), LONG, "x")
    for _ in range(40):
        llm.engine.step()
    assert gone.completions[0].finish_reason == "abort"
    assert again.completions[0].finish_reason == "length" and not llm.engine.has_unfinished
    assert again.output().outputs[0].token_ids == build.ends(ids(9), LONG)[0][0]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_end_is_told_though_the_step_breaks_off(ahead: bool, build: Builder) -> None:
    """One request ends in the step in which another's launch, or tokens, fail."""
    llm = build(async_scheduling=ahead)
    short = SamplingParams(temperature=0.0, max_tokens=3, repetition_penalty=1.1, ignore_eos=True)
    first, second = llm.add_request(ids(4), short), llm.add_request(ids(6), LONG)
    execute, calls = llm.engine.runner.execute, []

    def failing(step: Step) -> StepLogits:
        calls.append(step)
        if len(calls) == 4:
            raise RuntimeError("boom")
        return execute(step)

    llm.engine.runner.execute = failing  # type: ignore[method-assign]
    ends = {o.request_id: o.outputs[0].finish_reason for o in outputs(llm) if o.finished}
    assert ends == {first: "length", second: "error"}
    assert not llm.engine.has_unfinished
    third, fourth = (llm.add_request(ids(4), SamplingParams(max_tokens=n)) for n in (2, 9))
    llm.step()
    (completion,) = llm.engine._generations[fourth].completions

    def boom(token: int) -> None:
        raise RuntimeError("boom")

    completion.stop.update = boom  # type: ignore[method-assign,assignment]
    ends = {o.request_id: o.outputs[0].finish_reason for o in outputs(llm) if o.finished}
    assert ends[fourth] == "error" and third in ends and not llm.engine.has_unfinished


def test_completions_of_different_requests_draw_different_numbers(build: Builder) -> None:
    llm = build()
    drawn = SamplingParams(n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    found = llm.generate([ids(5)] * 3, drawn, use_tqdm=False)
    texts = {tuple(c.token_ids) for output in found for c in output.outputs}
    assert len(texts) == 9


def test_prompt_logprobs_survive_a_lost_place(build: Builder) -> None:
    """The prompt runs again in other parts; no entry is missing, none stands twice."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    prompt = ids(600, seed=1)
    llm = build(snapshots=0, async_scheduling=False)
    (alone,) = llm.generate(prompt, asked, use_tqdm=False)
    llm.add_request(ids(128, seed=2), asked)
    name = llm.add_request(prompt, asked)
    llm.step()
    scheduler = llm.engine.scheduler
    (victim,) = (r for r in scheduler.running if r.request_id.startswith(f"{name}."))
    assert 0 < victim.num_computed_tokens < 600
    scheduler._release(victim)  # as `_grow` does to the youngest
    insort(scheduler._waiting, victim, key=_age)
    found = {o.request_id: o for o in outputs(llm)}[name].prompt_logprobs
    assert found is not None and len(found) == 600
    assert alone.prompt_logprobs is not None
    for mine, expected, token in zip(found[1:], alone.prompt_logprobs[1:], prompt[1:], strict=True):
        assert mine is not None and expected is not None and list(mine) == list(expected) == [token]
        assert mine[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_prompt_logits_are_read_before_the_next_step(build: Builder) -> None:
    """A captured prefill's next replay overwrites them."""
    asked = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    llm = build(snapshots=0, async_scheduling=True)
    (alone,) = llm.generate(ids(20), asked, use_tqdm=False)
    execute, last = llm.engine.runner.execute, []

    def overwriting(step: Step) -> StepLogits:
        with torch.inference_mode():
            for rows in last:
                rows.fill_(7.0)
        logits = execute(step)
        last[:] = [rows for _, rows in logits.prompt]
        return logits

    llm.engine.runner.execute = overwriting  # type: ignore[method-assign]
    (again,) = llm.generate(ids(20), asked, use_tqdm=False)
    assert again.prompt_logprobs == alone.prompt_logprobs


def test_who_loses_entries_is_who_ends(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(snapshots=0, async_scheduling=False)
    other = llm.add_request(ids(3), LONG)
    llm.step()
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    name = llm.add_request(ids(600), asked)

    def boom(self: Any, *arguments: Any) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module._PromptPart, "take", boom)
        with pytest.raises(RuntimeError, match="boom"):
            llm.step()
    ends = {o.request_id: o.outputs[0].finish_reason for o in outputs(llm) if o.finished}
    assert ends[name] == "error" and set(ends) == {name, other}


def test_a_failed_build_gives_the_threads_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="max_model_len"):
            LLM("tiny", device="cpu", max_model_len=10**9)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
