"""What has been said in a chat, as messages and as token ids.

Owns keeping the ids of earlier turns, so that the prefix cache knows them again. Does not own the
chat template (`tokenizer`), the terminal (`chat`) nor generation.

    conversation = Conversation(tokenizer, ChatOptions(system="Be brief."))
    (output,) = llm.generate(conversation.ask("Who are you?"))
    conversation.answer(output.outputs[0])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.runtime.outputs import CompletionOutput
    from minivllm.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatOptions:
    """What a chat is told beside how to sample.

    Attributes:
        system: the text of a first message that sets the tone; None: there is none.
        enable_thinking: for models that can think before they answer.
    """

    system: str | None = None
    enable_thinking: bool = False


@dataclass(frozen=True)
class Past:
    """The beginning of a conversation as text, and as the ids that stand for it."""

    text: str
    token_ids: Sequence[int]


def continued_ids(tokenizer: Tokenizer, text: str, pasts: Sequence[Past] = ()) -> list[int]:
    """The ids of a conversation's text: those of the longest past that it begins with, then new.

    The model may have cut its words into other tokens than the tokenizer would; what it wrote is in
    the prefix cache as it wrote it. Where the template has changed what was said before (dropped
    old thoughts, say), no past may fit; then all of the text is tokenized.
    """
    fitting = [past for past in pasts if text.startswith(past.text)]
    past = max(fitting, key=lambda past: len(past.text), default=Past("", ()))
    rest = tokenizer.encode(text[len(past.text) :], add_special_tokens=False)
    return [*past.token_ids, *rest]


def count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences have in common from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class Conversation:
    """What has been said, as messages and as token ids.

    A turn is `ask`, then `answer`; a question that gets none leaves nothing behind.

    Raises:
        UserError: there is no chat template, or it has no place for a system message.
    """

    def __init__(self, tokenizer: Tokenizer, options: ChatOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        self.reset()
        self.ask("Hello")  # what the template refuses, it refuses now

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self._options.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._pasts: list[Past] = []  # of the last turn: to the question's end, to the answer's
        self._asked: tuple[list[dict[str, str]], Past, Past] | None = None

    def ask(self, text: str) -> dict[str, Any]:
        """The prompt of a turn, in a form that `LLM.stream` takes.

        It asks for a snapshot of the states where the question ends: up to there the next turn's
        prompt is the same, even if the template then drops thoughts or what invites to think.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._render(messages, add_generation_prompt=True)
        question = self._render(messages, add_generation_prompt=False)
        stable = count_shared(prompt.token_ids, question.token_ids)
        self._asked = messages, question, prompt
        return {"prompt_token_ids": prompt.token_ids, "snapshot_at": [stable] if stable else []}

    def answer(self, completion: CompletionOutput) -> None:
        """Keep the question and its answer, complete or not."""
        assert self._asked is not None, "nothing was asked"
        messages, question, prompt = self._asked
        token_ids = completion.token_ids
        if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
            token_ids = token_ids[:-1]  # the template writes the end of a message itself
        content = completion.text
        if prompt.text.rstrip().endswith("<think>"):  # the template has begun the thoughts
            content = f"<think>\n{content}"
            if "</think>" not in content:  # and all there is are thoughts
                content += "\n</think>\n\n"
        self.messages = [*messages, {"role": "assistant", "content": content}]
        written = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        self._pasts = [question, Past(prompt.text + written, [*prompt.token_ids, *token_ids])]
        self._asked = None

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> Past:
        text = self._tokenizer.render_chat(
            messages, add_generation_prompt, self._options.enable_thinking
        )
        return Past(text, continued_ids(self._tokenizer, text, self._pasts))
