"""When a request ends, and which text of it may leave.

Owns end-of-text tokens, stop tokens, stop strings and the length limit, in vLLM's words:
`finish_reason` "stop" or "length", `stop_reason` the id or text that stopped it. Does not own
decoding (`detokenizer`), which it calls.

    checker = StopChecker(params, eos_token_ids, detokenizer, room=max_model_len - prompt_length)
    step = checker.update(token_id)      # step.text, step.finish_reason, step.stop_reason
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.errors import UserError
from minivllm.runtime.detokenizer import IncrementalDetokenizer
from minivllm.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class StopStep:
    """What one token brought.

    Attributes:
        text: new text that no stop string can take back.
        finish_reason: None: go on; "stop" or "length": this was the last token.
        stop_reason: the stop token's id or the stop string; None at end-of-text tokens, at the
            length limit and before the end.
    """

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class StopChecker:
    """Follows one request's output, token by token, until it ends.

    In one step an end-of-text token comes before a stop token, either before a stop string, and
    that before the length limit. Among stop strings the one that is complete first wins, and the
    longest of those complete at the same character, however the text is cut into tokens.

    Of the first `params.min_tokens` tokens none ends the request, save at the length limit, and
    a stop string that is complete within their text does not count; one that a later token
    completes does.

    Args:
        params: of the request.
        eos_token_ids: all ids at which the model ends a text.
        detokenizer: None: no text, and no stop strings.
        room: most tokens that fit after the prompt; None: only `params.max_tokens` counts.

    Raises:
        UserError: `params.stop` without a detokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        detokenizer: IncrementalDetokenizer | None = None,
        room: int | None = None,
    ) -> None:
        limits = [limit for limit in (params.max_tokens, room) if limit is not None]
        assert limits and min(limits) > 0, limits
        self._limit = min(limits)
        self._min_tokens = params.min_tokens
        self._count = 0
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._strings = tuple(params.stop or ())
        self._keep_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._held = ""
        self._exempt = 0  # characters of `_held` at which no stop string may end
        self._finished = False
        if self._strings and detokenizer is None:
            raise UserError(
                f"stop={list(self._strings)!r}: stop strings need a tokenizer; name one with "
                "model.tokenizer=…, or stop at ids: stop_token_ids"
            )

    def update(self, token_id: int) -> StopStep:
        """Takes the next token of the output."""
        assert not self._finished, "the request has ended"
        self._count += 1
        early = self._count <= self._min_tokens
        reason: str | None = None
        stop: int | str | None = None
        if not early and (token_id in self._eos or token_id in self._stop_ids):
            reason, stop = "stop", None if token_id in self._eos else token_id
        elif self._count >= self._limit:
            reason = "length"
        text = self._held + self._decode(token_id, reason)
        if early:
            self._exempt = len(text)
        found = None if reason == "stop" else self._find(text)
        if found is not None:
            start, stop = found
            end = start + len(stop) if self._keep_stop else start
            self._finished, self._held = True, ""
            return StopStep(text[:end], "stop", stop)
        if reason is not None:
            self._finished, self._held = True, ""
            return StopStep(text, reason, stop)
        cut = len(text) - self._possible_start(text)
        self._held = text[cut:]
        self._exempt = max(0, self._exempt - cut)
        return StopStep(text[:cut])

    def _decode(self, token_id: int, reason: str | None) -> str:
        """The text that the token adds; all that is left if it is the last."""
        if self._detokenizer is None:
            return ""
        text = ""
        if reason != "stop" or self._keep_stop:
            text = self._detokenizer.append(token_id)
        return text + self._detokenizer.flush() if reason is not None else text

    def _find(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the first that is complete in `text`, past its exempt part."""
        exempt = self._exempt
        starts = [(text.find(s, max(0, exempt + 1 - len(s))), s) for s in self._strings]
        found = [(start + len(string), start, string) for start, string in starts if start >= 0]
        if not found:
            return None
        _, start, string = min(found)
        return start, string

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(string) for string in self._strings), default=0)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(string.startswith(text[-size:]) for string in self._strings):
                return size
        return 0
