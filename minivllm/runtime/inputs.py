"""Prompts as they are given, checked and turned into token ids before anything runs.

Owns the accepted forms and their errors. Does not own tokenization itself (`tokenizer`).

    prompts = read_prompts(["Once upon", [1, 2, 3]], tokenizer, vocab_size=4160, max_model_len=2048)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import UserError
from minivllm.runtime.tokenizer import Tokenizer

FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [id, …]}'


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run: its token ids, and its text if it was given as text."""

    token_ids: list[int]
    text: str | None = None


def read_prompts(
    prompts: Any, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> list[Prompt]:
    """All prompts of a call, checked.

    Args:
        prompts: one prompt in one of `FORMS`, or a sequence of them.
        tokenizer: None: prompts must be token ids.
        vocab_size: of the model; ids from there on do not exist.
        max_model_len: a prompt must leave room for one token below it.

    Raises:
        UserError: naming the prompt's index and what is wrong with it.
    """
    single = isinstance(prompts, (str, bytes, bytearray, Mapping)) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and _is_id(prompts[0])
    )
    if not single and not isinstance(prompts, Sequence):
        raise UserError(f"prompts={prompts!r}: give {FORMS}, or a list of prompts")
    read = []
    for index, given in enumerate([prompts] if single else prompts):
        try:
            prompt = _read(given, tokenizer)
            _check_ids(prompt.token_ids, vocab_size, max_model_len)
        except UserError as error:
            raise UserError(f"prompt {index}: {error}") from None
        read.append(prompt)
    return read


def _read(given: Any, tokenizer: Tokenizer | None) -> Prompt:
    if isinstance(given, Mapping):
        if set(given) not in ({"prompt"}, {"prompt_token_ids"}):
            raise UserError(f"keys {sorted(map(str, given))}: give {FORMS}")
        ((key, given),) = given.items()
        if isinstance(given, str) != (key == "prompt"):
            raise UserError(f"{key}={given!r}: give {FORMS}")
    if isinstance(given, str):
        if tokenizer is None:
            raise UserError(
                f"text {given[:40]!r} needs a tokenizer and there is none: give token ids, "
                "or name a tokenizer with tokenizer="
            )
        return Prompt(tokenizer.encode(given), given)
    plain = isinstance(given, Sequence) and not isinstance(given, (bytes, bytearray))
    if not plain or not all(_is_id(i) for i in given):
        raise UserError(f"{given!r}: give {FORMS}")
    return Prompt(list(given))


def _check_ids(ids: list[int], vocab_size: int, max_model_len: int) -> None:
    if not ids:
        raise UserError("it is empty; a prompt needs at least one token")
    unknown = [i for i in ids if not 0 <= i < vocab_size]
    if unknown:
        raise UserError(f"token id {unknown[0]} is outside the vocabulary, 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise UserError(
            f"{len(ids)} tokens leave no room for an output token within "
            f"max_model_len={max_model_len}; shorten the prompt or raise runtime.max_model_len"
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
