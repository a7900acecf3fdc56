"""What becomes of a request's tokens: its text, its end, its log-probabilities, its times.

Owns the outputs of one request and its completions. Does not own the schedule's view of them
(`request`), sampling, nor what a finished request frees.

    generation = Generation("0", prompt, completions, clock=time.perf_counter)
    completion.append(token_id, logprobs)           # after each step
    generation.output()                             # a RequestOutput, when somebody wants one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minivllm.runtime.inputs import Prompt
from minivllm.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.runtime.penalties import TokenCounts
from minivllm.runtime.request import Request
from minivllm.runtime.stop import StopChecker


@dataclass(eq=False)
class Completion:
    """One completion of a request.

    Attributes:
        request: the scheduler's view of it.
        index: among the completions of its request.
        stop: follows its tokens.
        counts: of its tokens, for penalties; None where it has none.
        text: so far.
        finish_reason, stop_reason: None until it ends.
        logprobs: an entry a token, where they were asked for.
    """

    request: Request
    index: int
    stop: StopChecker
    counts: TokenCounts | None = None
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    _told: int = 0  # characters of the text that outputs have brought

    @property
    def finished(self) -> bool:
        """Whether no token will follow."""
        return self.finish_reason is not None

    def append(self, token_id: int, logprobs: dict[int, Logprob] | None = None) -> bool:
        """Take the next token; returns whether it is the last one."""
        self.request.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.update(token_id)
        if logprobs is not None and self.logprobs is not None:
            self.logprobs.append(logprobs)
        step = self.stop.update(token_id)
        self.text += step.text
        self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason
        return self.finished

    def end(self, reason: str) -> None:
        """End it from outside: "abort" or "error"."""
        self.finish_reason = reason

    def output(self) -> CompletionOutput:
        """As it stands; the next one's `delta` begins where this one's text ends."""
        request = self.request
        delta, self._told = self.text[self._told :], len(self.text)
        token_ids = request.token_ids[request.num_prompt_tokens :]
        cumulative = None
        if self.logprobs is not None:
            entries = zip(token_ids, self.logprobs, strict=True)
            cumulative = sum(entry[token].logprob for token, entry in entries)
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=token_ids,
            delta=delta,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=cumulative,
        )


@dataclass(eq=False)
class Generation:
    """A request as its sender sees it.

    Attributes:
        request_id: unique among those that are not finished.
        prompt: as it was given.
        completions: `params.n` of them.
        clock: seconds; starts with the request.
        prompt_logprobs: an entry a prompt token, the first None; None where not asked for.
        started, first_token, last_token: by the clock; first_token None before there is one.
        latest_times: seconds to the first token, and between the last two (None at the first).
    """

    request_id: str
    prompt: Prompt
    completions: list[Completion]
    clock: Callable[[], float]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    started: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    latest_times: tuple[float, float | None] = (0.0, None)
    _told: int = 0  # progress at the last output

    def __post_init__(self) -> None:
        self.started = self.clock()
        self._told = self._progress()

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(c.finished for c in self.completions)

    @property
    def has_news(self) -> bool:
        """Whether anything came since the last `output`."""
        return self._progress() != self._told

    def _progress(self) -> int:
        return sum(len(c.request.token_ids) + c.finished for c in self.completions)

    def token_came(self) -> None:
        """Note the time of a step's tokens."""
        now = self.clock()
        if self.first_token is None:
            self.first_token = now
            self.latest_times = now - self.started, None
        else:
            self.latest_times = self.first_token - self.started, now - self.last_token
        self.last_token = now

    def output(self) -> RequestOutput:
        """As it stands; there is no more news after it."""
        self._told = self._progress()
        first = self.first_token
        leader = self.completions[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[c.output() for c in self.completions],
            finished=self.finished,
            metrics=RequestMetrics(
                0.0 if first is None else first - self.started,
                0.0 if first is None else self.last_token - first,
                num_preemptions=sum(c.request.num_preemptions for c in self.completions),
            ),
            num_cached_tokens=leader.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )
