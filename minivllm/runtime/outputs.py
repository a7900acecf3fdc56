"""What a request gives back, in vLLM's names.

Owns plain data. Does not own how it is made (the engine).

    output.outputs[0].text, output.outputs[0].finish_reason
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """What the model thought of one token at one place, before penalties and temperature.

    Attributes:
        logprob: natural logarithm of its probability; -inf where the model rules it out.
        rank: 1 for the most probable token; among equals the lowest id comes first.
        decoded_token: its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, as far as it has come.

    Attributes:
        index: of the completion among those of its request.
        text: all text so far; "" without a tokenizer.
        token_ids: all generated ids so far, a stop id among them.
        delta: the text since the request's last output; "" while characters are incomplete or a
            stop string may be starting.
        finish_reason: None while it goes on, then "stop" or "length"; "abort" where the caller
            ended it, "error" where the model gave no numbers to draw from, or a step broke off.
        stop_reason: the stop id or stop string that ended it, else None.
        logprobs: one mapping a generated token, from ids to what the model thought of them: the
            drawn id first, then the most probable ones in order; None where none were asked for.
        cumulative_logprob: sum of the drawn tokens' logprobs; None with `logprobs`.
    """

    index: int
    text: str
    token_ids: list[int]
    delta: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times and setbacks of one request.

    Attributes:
        time_to_first_token: seconds from the request's start to its first token.
        generation_time: seconds from its first token to its last so far.
        num_preemptions: how often it gave way to others and was computed again.
    """

    time_to_first_token: float
    generation_time: float
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request after a token.

    Attributes:
        request_id: the caller's, or else counted from "0" in the order of arrival.
        prompt: the text, or None where ids were given.
        outputs: the request's `n` completions, by index.
        finished: this is the request's last output.
        num_cached_tokens: prompt tokens that were not computed again.
        prompt_logprobs: one mapping a prompt token, None for the first, which nothing precedes;
            None where none were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
