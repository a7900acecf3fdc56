"""One request's outputs: text, deltas, ends, log-probabilities and times."""

from __future__ import annotations

import itertools

import pytest

from minivllm.runtime.generation import Completion, Generation
from minivllm.runtime.inputs import Prompt
from minivllm.runtime.outputs import Logprob
from minivllm.runtime.penalties import TokenCounts
from minivllm.runtime.request import Request
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.stop import StopStep

PROMPT = Prompt([7, 8], "ab")


class Letters:
    """A stop checker of which token i is the i-th letter, 9 is the end, and a b is held back."""

    def __init__(self) -> None:
        self.held = ""

    def update(self, token_id: int) -> StopStep:
        if token_id == 9:
            return StopStep(self.held, "stop", 9)
        text = self.held + "abcdefgh"[token_id]
        self.held = "b" if text.endswith("b") else ""
        return StopStep(text.removesuffix("b"))


def generation(n: int = 1, logprobs: bool = False) -> Generation:
    """On a clock that goes on by one second whenever it is read."""
    params = SamplingParams(n=n)
    completions = [
        Completion(
            Request(f"x.{i}", list(PROMPT.token_ids), 2, params, 0),
            i,
            Letters(),  # type: ignore[arg-type]
            logprobs=[] if logprobs else None,
        )
        for i in range(n)
    ]
    return Generation("x", PROMPT, completions, itertools.count(100.0).__next__)


def test_deltas_add_up_whenever_outputs_are_made() -> None:
    found = generation()
    (completion,) = found.completions
    assert not found.has_news
    seen = ""
    for token, text, delta in ((0, "a", "a"), (1, "a", ""), (2, "abc", None), (3, "abcd", "bcd")):
        completion.append(token)
        assert found.has_news
        if delta is not None:
            output = found.output().outputs[0]
            assert (output.text, output.delta) == (text, delta)
            seen += output.delta
            assert not found.has_news
    completion.append(9)
    output = found.output()
    assert output.finished and found.finished
    last = output.outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", 9)
    assert last.text == seen + last.delta == "abcd"
    assert last.token_ids == [0, 1, 2, 3, 9] and output.prompt_token_ids == [7, 8]
    assert output.prompt == "ab" and last.logprobs is last.cumulative_logprob is None


def test_outputs_do_not_change_later() -> None:
    found = generation(logprobs=True)
    (completion,) = found.completions
    completion.append(0, {0: Logprob(-1.0, 1)})
    early = found.output().outputs[0]
    completion.append(2, {2: Logprob(-0.5, 1), 3: Logprob(-2.0, 2)})
    assert (early.token_ids, early.text, early.cumulative_logprob) == ([0], "a", -1.0)
    assert early.logprobs == [{0: Logprob(-1.0, 1)}]
    late = found.output().outputs[0]
    assert late.cumulative_logprob == -1.5 and len(late.logprobs or []) == 2


def test_several_completions_end_one_by_one() -> None:
    found = generation(n=2)
    first, second = found.completions
    first.append(9)
    assert found.has_news and not found.finished
    output = found.output()
    assert [c.finish_reason for c in output.outputs] == ["stop", None] and not output.finished
    second.end("abort")
    assert found.has_news and found.finished
    output = found.output()
    assert [c.finish_reason for c in output.outputs] == ["stop", "abort"] and output.finished
    assert [c.index for c in output.outputs] == [0, 1] and not found.has_news


def test_counts_follow_the_tokens() -> None:
    (completion,) = generation().completions
    completion.counts = TokenCounts([7, 8], 2)
    completion.append(0)
    completion.append(0)
    same = TokenCounts([7, 8, 0, 0], 2)
    for ours, theirs in zip(completion.counts.tensors(10), same.tensors(10), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_times() -> None:
    found = generation()
    (completion,) = found.completions
    assert found.output().metrics.time_to_first_token == 0.0
    completion.append(0)
    found.token_came()
    assert found.latest_times == (1.0, None)
    completion.append(0)
    found.token_came()
    found.clock()
    completion.append(0)
    found.token_came()
    assert found.latest_times == (1.0, 2.0)
    completion.request.num_preemptions = 3
    completion.request.num_cached_tokens = 1
    output = found.output()
    assert output.metrics.time_to_first_token == 1.0
    assert output.metrics.generation_time == pytest.approx(3.0)
    assert (output.metrics.num_preemptions, output.num_cached_tokens) == (3, 1)
