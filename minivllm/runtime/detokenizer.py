"""Text out of tokens as they come: no broken characters, nothing lost, nothing twice.

Owns which characters are finished. Does not own stop strings (`stop`).

    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
    text = "".join(detokenizer.append(t) for t in ids) + detokenizer.flush()

The last tokens are decoded together, so cost and memory a token are bounded. A byte-level decoder
turns the bytes that can't be completed, and those that still might be, into one U+FFFD each group;
only the last character can be of the second kind, so all before it is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# UTF-8 finds its feet within 4 bytes, and each token of the window gives at least one.
_CONTEXT = 8
_WINDOW = 24
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of a tokenizer; `minivllm.runtime.tokenizer.Tokenizer` is one."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token(self, token_id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The text of one request's output, piece by piece.

    All pieces and `flush()` together are the decoded prompt and output without the decoded prompt.
    A character that the prompt leaves unfinished and the output completes is the output's.

    Args:
        tokenizer: byte-level.
        prompt_token_ids: what the output continues; may be empty. Read in `prepare`.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._prompt: Sequence[int] | None = prompt_token_ids  # None: its end has been decoded
        self._window: list[int] = []
        self._text = ""  # the window's
        self._emitted = 0
        self._prompt_unfinished = False

    def prepare(self) -> None:
        """Decode the prompt's end, as the first `append` would; for when there is time."""
        if self._prompt is None:
            return
        context: list[int] = []
        for token_id in reversed(self._prompt):
            if len(context) == _CONTEXT:
                break
            if self._gives_text(token_id):
                context.append(token_id)
        self._prompt = None
        self._window = context[::-1]
        self._text = self._decode()
        # A prompt's last character that stays unfinished belongs to the prompt.
        self._prompt_unfinished = self._text.endswith(_UNFINISHED)
        self._emitted = len(self._text) - self._prompt_unfinished

    def append(self, token_id: int) -> str:
        """The text that this token finishes; often its own, sometimes none, sometimes more."""
        self.prepare()
        if not self._gives_text(token_id):
            return ""
        self._window.append(token_id)
        self._text = self._decode()
        unfinished = self._text.endswith(_UNFINISHED)
        piece = self._take(len(self._text) - unfinished)
        if len(self._window) >= _WINDOW:
            del self._window[:-_CONTEXT]
            self._text = self._decode()
            self._emitted = len(self._text) - unfinished
        return piece

    def flush(self) -> str:
        """What is left when no token follows: a last unfinished character as U+FFFD, or nothing."""
        self.prepare()
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        piece = self._text[self._emitted : end]
        if piece and self._prompt_unfinished:
            piece = piece.removeprefix(_UNFINISHED)
            self._prompt_unfinished = False
        self._emitted = end
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _gives_text(self, token_id: int) -> bool:
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return False
        return bool(self._tokenizer.token(token_id))
