"""Prompts as they are given, checked and turned into token ids before anything runs.

Owns the accepted forms and their errors. Does not own tokenization itself (`tokenizer`).

    prompts = read_prompts(["Once upon", [1, 2, 3]], tokenizer, vocab_size=4160, max_model_len=2048)
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import UserError
from minivllm.runtime.request import CacheOptions
from minivllm.runtime.tokenizer import Tokenizer

FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [id, …]}'
CACHE_KEYS = ("prefix_cache", "cache_salt", "snapshot_at")  # a mapping may hold beside its prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run.

    Attributes:
        token_ids: at least one.
        text: as it was given; None where ids were.
        cache: what it may share with other requests.
    """

    token_ids: list[int]
    text: str | None = None
    cache: CacheOptions = CacheOptions()

    @functools.cached_property
    def packed_ids(self) -> array[int]:
        """`token_ids` as unsigned 64-bit numbers; not to be changed.

        Raises:
            OverflowError: one is negative, or has more than 64 bits.
        """
        return array("Q", self.token_ids)


def read_prompts(
    prompts: Any, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> list[Prompt]:
    """All prompts of a call, checked.

    Args:
        prompts: one prompt in one of `FORMS`, or a sequence of them. A mapping may also hold
            `prefix_cache` (False: neither read nor keep anything), `cache_salt` (a text: share
            with requests of the same salt only) and `snapshot_at` (token counts at which the
            states are kept for later prompts that begin alike).
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
            _check_ids(prompt, vocab_size, max_model_len)
        except UserError as error:
            raise UserError(f"prompt {index}: {error}") from None
        read.append(prompt)
    return read


def _read(given: Any, tokenizer: Tokenizer | None) -> Prompt:
    cache = CacheOptions()
    if isinstance(given, Mapping):
        cache = _cache_options(given)
        rest = {key: value for key, value in given.items() if key not in CACHE_KEYS}
        if set(rest) not in ({"prompt"}, {"prompt_token_ids"}):
            raise UserError(
                f"keys {sorted(map(str, given))}: give {FORMS}, and beside it none or some of "
                f"{', '.join(CACHE_KEYS)}"
            )
        ((key, given),) = rest.items()
        if isinstance(given, str) != (key == "prompt"):
            raise UserError(f"{key}={given!r}: give {FORMS}")
    if isinstance(given, str):
        if tokenizer is None:
            raise UserError(
                f"text {given[:40]!r} needs a tokenizer and there is none: give token ids, "
                "or name a tokenizer with tokenizer="
            )
        return Prompt(tokenizer.encode(given), given, cache)
    plain = isinstance(given, Sequence) and not isinstance(given, (bytes, bytearray))
    if not plain or not _are_ids(given):
        raise UserError(f"{given!r}: give {FORMS}")
    return Prompt(list(given), cache=cache)


def _cache_options(given: Mapping[Any, Any]) -> CacheOptions:
    enabled = given.get("prefix_cache", True)
    if not isinstance(enabled, bool):
        raise UserError(f"prefix_cache={enabled!r}: must be True or False")
    salt = given.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise UserError(f"cache_salt={salt!r}: must be a text or None")
    places = given.get("snapshot_at", ())
    listed = isinstance(places, Sequence) and not isinstance(places, (str, bytes))
    if not listed or not all(_is_id(p) and p > 0 for p in places):
        raise UserError(f"snapshot_at={places!r}: must be a list of token counts, each above 0")
    return CacheOptions(enabled, salt, tuple(places))


def _check_ids(prompt: Prompt, vocab_size: int, max_model_len: int) -> None:
    ids = prompt.token_ids
    if not ids:
        raise UserError("it is empty; a prompt needs at least one token")
    try:
        _ = prompt.packed_ids
        known = max(ids) < vocab_size
    except OverflowError:  # one is negative
        known = False
    if not known:
        unknown = next(i for i in ids if not 0 <= i < vocab_size)
        raise UserError(f"token id {unknown} is outside the vocabulary, 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise UserError(
            f"{len(ids)} tokens leave no room for an output token within "
            f"max_model_len={max_model_len}; shorten the prompt or raise runtime.max_model_len"
        )


def _are_ids(values: Sequence[Any]) -> bool:
    """Whether each one is; plain ints are counted, without a call of Python's for each."""
    return list(map(type, values)).count(int) == len(values) or all(map(_is_id, values))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
