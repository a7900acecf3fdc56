"""Prompts in every accepted form, and what is said of those that cannot run."""

from __future__ import annotations

import enum
from typing import Any

import numpy
import pytest

from minivllm.errors import UserError
from minivllm.runtime.inputs import Prompt, read_prompts
from minivllm.runtime.request import CacheOptions


class Letters:
    """A tokenizer of lower-case letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") for c in text]


class Number(enum.IntEnum):
    ONE = 1


def read(prompts: Any, tokenizer: Any = None, limit: int = 8) -> list[Prompt]:
    return read_prompts(prompts, tokenizer or Letters(), vocab_size=26, max_model_len=limit)


def test_the_forms() -> None:
    ids = Prompt([0, 1])
    text = Prompt([0, 1], "ab")
    assert read("ab") == [text]
    assert read(["ab", "ab"]) == [text, text]
    assert read([0, 1]) == [ids]
    assert read([[0, 1], "ab"]) == [ids, text]
    assert read({"prompt_token_ids": [0, 1]}) == [ids]
    assert read([{"prompt": "ab"}, {"prompt_token_ids": (0, 1)}]) == [text, ids]
    assert read([[Number.ONE, 0]]) == [Prompt([1, 0])]
    assert read([]) == []
    assert read("a" * 7)[0].token_ids == [0] * 7  # one place is left


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", r"prompt 0: it is empty"),
        (["ab", ""], r"prompt 1: it is empty"),
        ([[]], r"prompt 0: it is empty"),
        ([[3, 26]], r"prompt 0: token id 26 is outside the vocabulary, 0 to 25"),
        ([[-1]], r"token id -1 is outside"),
        ("a" * 8, r"8 tokens leave no room .* max_model_len=8; .*runtime.max_model_len"),
        ([{"prompt": [1]}], r"prompt=\[1\]: give a text"),
        ([{"prompt_token_ids": "ab"}], r"prompt_token_ids='ab': give a text"),
        ([{"text": "ab"}], r"keys \['text'\]: give a text"),
        ([[0.5]], r"\[0.5\]: give a text"),
        ([[True]], r"\[True\]: give a text"),
        ([[0, 1, False]], r"\[0, 1, False\]: give a text"),
        ([[numpy.int64(1)]], r"1\)?\]: give a text"),
        ([[3, 2**70]], rf"token id {2**70} is outside"),
        ([[3, -(2**70)]], rf"token id -{2**70} is outside"),
        (7, r"prompts=7: give a text"),
        ({"prompt": "ab", "prefix_cache": 1}, r"prefix_cache=1: must be True or False"),
        ({"prompt": "ab", "prefix_cache": None}, r"prefix_cache=None: must be True or False"),
        ([[0], {"prompt": "ab", "cache_salt": 3}], r"prompt 1: cache_salt=3: must be a text or N"),
        ({"prompt": "ab", "snapshot_at": 64}, r"snapshot_at=64: must be a list of token counts"),
        ({"prompt": "ab", "snapshot_at": "64"}, r"snapshot_at='64': must be a list"),
        ({"prompt": "ab", "snapshot_at": [64, 0]}, r"snapshot_at=\[64, 0\]: .* each above 0"),
        ({"prompt": "ab", "snapshot_at": [True]}, r"snapshot_at=\[True\]: must be a list"),
        ({"prompt": "ab", "snapshot_at": None}, r"snapshot_at=None: must be a list"),
        (
            {"prompt": "ab", "salt": "x"},
            r"keys \['prompt', 'salt'\]: give .* prefix_cache, cache_salt, snapshot_at$",
        ),
        ({"cache_salt": "x"}, r"keys \['cache_salt'\]: give a text"),
        ({"prompt": "ab", "prompt_token_ids": [1]}, r"keys \['prompt', 'prompt_token_ids'\]"),
    ],
)
def test_what_cannot_run(prompts: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(prompts)


def test_what_a_mapping_says_of_the_cache() -> None:
    assert read({"prompt": "ab"})[0].cache == CacheOptions()
    every = {"prefix_cache": False, "cache_salt": "", "snapshot_at": [1, 64, 1000]}
    (prompt,) = read({"prompt_token_ids": [0, 1], **every})
    assert prompt == Prompt([0, 1], cache=CacheOptions(False, "", (1, 64, 1000)))
    first, second = read(
        [{"prompt": "ab", "cache_salt": "x"}, {"prompt": "ab", "cache_salt": None}]
    )
    assert (first.cache.salt, second.cache.salt) == ("x", None) and first.text == "ab"


def test_a_prompts_ids_are_its_own() -> None:
    given = [0, 1]
    (prompt,) = read({"prompt_token_ids": given})
    given.append(2)
    assert prompt.token_ids == [0, 1]


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"text 'ab' needs a tokenizer .* tokenizer="):
        read_prompts("ab", None, vocab_size=26, max_model_len=8)
    assert read_prompts([0, 1], None, vocab_size=26, max_model_len=8) == [Prompt([0, 1])]
