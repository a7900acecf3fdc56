"""Streaming text: the pieces of any token sequence are its decoded text, and never a broken one."""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from minivllm.runtime.detokenizer import _WINDOW, IncrementalDetokenizer
from minivllm.runtime.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello, world.  Two spaces,\ttab\r\n\n and an end ",
    "你好，世界！今天天气怎么样？日本語 한국어 हिन्दी ภาษาไทย العربية",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ZWJ\u200d\u200d é e\u0301 \ufeff",
    "a real \ufffd\ufffd replacement \ufffd",
    "<think>\nhm\n</think> <|im_start|> <|endoftext|>",
    "",
]


@pytest.fixture(params=["small", "qwen", "tiny"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "tiny":
        folder = Path(str(importlib.resources.files("minivllm"))) / "assets" / "tiny"
        if not (folder / "tokenizer.json").exists():
            pytest.skip("no embedded model in this installation")
        return load_tokenizer(folder)
    return request.getfixturevalue(request.param)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    ids = {chr(letter): tokenizer.hf.convert_tokens_to_ids(chr(letter)) for letter in range(324)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [ids[chr(b if b in printable else 256 + others.index(b))] for b in data]


def pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.flush()]


def expected(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True
) -> str:
    """The decoded whole without the prompt's finished characters (or its last, if it stays so)."""
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode([*prompt, *output], skip)
    unfinished = before.endswith("\ufffd")
    after = whole[len(before) - unfinished :]
    return after.removeprefix("\ufffd") if unfinished else after


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_texts(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    prompt = tokenizer.encode("A prompt:")
    got = pieces(tokenizer, prompt, ids, skip)
    assert "".join(got) == tokenizer.decode(ids, skip)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


def test_each_byte_alone(tokenizer: Tokenizer) -> None:
    for text in TEXTS[:3]:
        got = pieces(tokenizer, [], byte_ids(tokenizer, text.encode()))
        assert [piece for piece in got if piece] == list(text)


def test_text_comes_at_once(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "aé🙂b".encode())
    assert pieces(tokenizer, [], ids) == ["a", "", "é", "", "", "", "🙂", "b", ""]


def test_leading_space_is_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" a b")
    assert "".join(pieces(tokenizer, [], ids)) == " a b"
    assert "".join(pieces(tokenizer, tokenizer.encode("x"), ids)) == " a b"


def test_special_tokens_between_the_bytes_of_a_character(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    ids = byte_ids(tokenizer, "你".encode())
    with_special = [ids[0], *[special] * (3 * _WINDOW), ids[1], ids[2]]
    assert "".join(pieces(tokenizer, [], with_special)) == "你"
    assert "".join(pieces(tokenizer, with_special[:-2], with_special[-2:])) == "你"
    kept = pieces(tokenizer, [], with_special, skip=False)
    assert "".join(kept) == tokenizer.decode(with_special, skip_special_tokens=False)


def test_unfinished_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "x🙂".encode()[:-1])
    assert pieces(tokenizer, [], ids) == ["x", "", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"ab\xe4\xbd", b"\xa0c", "你c"),  # completed by the output
        (b"ab\xe4\xbd", b"c", "c"),  # not completed: the prompt's own
        (b"ab\xff", b"c", "c"),
        (b"ab\xff", b"", ""),
        (b"\xf0\x9f", b"\x99\x82", "🙂"),
        ("\ufffd".encode(), "\ufffd!".encode(), "\ufffd!"),
    ],
)
def test_prompts_that_end_within_a_character(
    tokenizer: Tokenizer, prompt: bytes, output: bytes, text: str
) -> None:
    ids = byte_ids(tokenizer, prompt), byte_ids(tokenizer, output)
    assert "".join(pieces(tokenizer, *ids)) == text == expected(tokenizer, *ids)


@pytest.mark.parametrize("run", [b"\xff", b"\x80", b"\xe4", b"\xf0\x9f\x98", b"\xe4\xbda", b"\xc3"])
def test_long_runs_of_broken_bytes(tokenizer: Tokenizer, run: bytes) -> None:
    ids = byte_ids(tokenizer, run * 200 + "🙂 end".encode())
    for cut in (0, 1, 30):
        prompt, output = ids[:cut], ids[cut:]
        assert "".join(pieces(tokenizer, prompt, output)) == expected(tokenizer, prompt, output)


def test_random_tokens(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    every = range(tokenizer.vocab_limit + 10)  # some of them do not exist
    broken = byte_ids(tokenizer, bytes(range(0x80, 0x100)))
    special = sorted(tokenizer.special_ids)
    emoji = tokenizer.encode("👨‍👩‍👧‍👦🙂你好") + byte_ids(tokenizer, "👨‍👩‍👧‍👦你é".encode())
    for _ in range(250):
        pool = rng.choice([every, broken, emoji, [*broken, *special, *emoji]])
        ids = rng.choices(pool, k=rng.randrange(1, 5 * _WINDOW))
        cut = rng.randrange(len(ids))
        skip = rng.random() < 0.5
        got = pieces(tokenizer, ids[:cut], ids[cut:], skip)
        assert "".join(got) == expected(tokenizer, ids[:cut], ids[cut:], skip), (ids, cut, skip)


def test_work_a_token_is_bounded(small: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    decode = small.decode

    def counting(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(small, "decode", counting)
    for data in (b"a" * 1000, b"\xff" * 1000, "你".encode() * 300):
        lengths.clear()
        pieces(small, byte_ids(small, b"p" * 1000), byte_ids(small, data))
        assert max(lengths) <= _WINDOW
        assert len(lengths) < 1.1 * len(data) + 3
