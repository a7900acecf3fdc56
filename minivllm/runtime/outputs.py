"""What a request gives back, in vLLM's names.

Owns plain data. Does not own how it is made (the engine).

    output.outputs[0].text, output.outputs[0].finish_reason
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, as far as it has come.

    Attributes:
        index: of the completion among those of its request.
        text: all text so far; "" without a tokenizer.
        token_ids: all generated ids so far, a stop id among them.
        delta: the text that the last token added; "" while characters are incomplete or a stop
            string may be starting.
        finish_reason: None while it goes on, then "stop" or "length".
        stop_reason: the stop id or stop string that ended it, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    delta: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request.

    Attributes:
        time_to_first_token: seconds from the request's start to its first token.
        generation_time: seconds from its first token to its last so far.
    """

    time_to_first_token: float
    generation_time: float


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request after a token.

    Attributes:
        request_id: counts from "0" in the order of the prompts of the engine.
        prompt: the text, or None where ids were given.
        num_cached_tokens: prompt tokens that were not computed again.
        finished: this is the request's last output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = field(default=0)
