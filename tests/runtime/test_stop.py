"""When requests end, and which text is held back until it is known to stay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest

from minivllm.errors import UserError
from minivllm.runtime.detokenizer import IncrementalDetokenizer
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.stop import StopChecker, StopStep
from minivllm.runtime.tokenizer import Tokenizer

EOS = (90, 91)


class Words:
    """A stand-in for a tokenizer: token i is the i-th word; 90 and above are special."""

    special_ids = frozenset(range(90, 100))

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def token(self, token_id: int) -> str:
        return self.words[token_id] if token_id < 90 else f"<{token_id}>"

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self.token, ids))


def run(
    words: Sequence[str],
    ids: Iterable[int] | None = None,
    room: int | None = None,
    **fields: object,
) -> list[StopStep]:
    """The steps of a request whose output is `ids` (all words, by default)."""
    params = SamplingParams(**{"max_tokens": None if room else 1000} | fields)  # type: ignore[arg-type]
    detokenizer = IncrementalDetokenizer(Words(words), (), params.skip_special_tokens)
    checker = StopChecker(params, EOS, detokenizer, room)
    steps = []
    for token_id in range(len(words)) if ids is None else ids:
        steps.append(checker.update(token_id))
        if steps[-1].finish_reason is not None:
            break
    return steps


def text_of(steps: Sequence[StopStep]) -> str:
    return "".join(step.text for step in steps)


@pytest.mark.parametrize("eos", EOS)
def test_every_eos_id_ends_it(eos: int) -> None:
    steps = run(["a", "b"], [0, 1, eos, 0])
    assert steps == [StopStep("a"), StopStep("b"), StopStep("", "stop", None)]
    assert run(["a"], [0, eos], include_stop_str_in_output=True)[-1].text == ""
    shown = run(["a"], [0, eos], include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown[-1] == StopStep(f"<{eos}>", "stop", None)


def test_ignore_eos() -> None:
    steps = run(["a"], [0, 90, 91, 0], ignore_eos=True, max_tokens=4)
    assert text_of(steps) == "aa"
    assert [step.finish_reason for step in steps] == [None, None, None, "length"]
    # An id that the user names stops all the same.
    steps = run(["a"], [0, 90, 0], ignore_eos=True, stop_token_ids=[90])
    assert steps[-1] == StopStep("", "stop", 90)


def test_stop_token_ids() -> None:
    assert run(["a", "b"], [0, 1, 0], stop_token_ids=[1])[1:] == [StopStep("", "stop", 1)]
    kept = run(["a", "b"], [0, 1, 0], stop_token_ids=[1], include_stop_str_in_output=True)
    assert kept[1:] == [StopStep("b", "stop", 1)]
    assert run(["a"], [90], stop_token_ids=[90]) == [StopStep("", "stop", None)]


def test_length() -> None:
    assert run(["a", "b", "c"], max_tokens=2) == [StopStep("a"), StopStep("b", "length")]
    assert run(["a", "b", "c"], room=2) == [StopStep("a"), StopStep("b", "length")]
    assert run(["a", "b", "c"], room=1, max_tokens=2) == [StopStep("a", "length")]
    assert run(["a", "b", "c"], room=9, max_tokens=1) == [StopStep("a", "length")]


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    assert run(["a", "b"], max_tokens=2, stop="b")[-1] == StopStep("", "stop", "b")
    assert run(["a", "b"], max_tokens=2, stop_token_ids=[1])[-1] == StopStep("", "stop", 1)
    assert run(["a"], [0, 90], max_tokens=2)[-1] == StopStep("", "stop", None)


def test_stop_string_across_tokens() -> None:
    steps = run(["one ", "S", "T", "OP two", "three"], stop="STOP")
    assert steps == [
        StopStep("one "),
        StopStep(""),
        StopStep(""),
        StopStep("", "stop", "STOP"),
    ]
    kept = run(["one ", "S", "T", "OP two"], stop="STOP", include_stop_str_in_output=True)
    assert kept[-1] == StopStep("STOP", "stop", "STOP")


def test_stop_string_within_a_token() -> None:
    assert run(["a\n\nb"], stop=["\n\n"]) == [StopStep("a", "stop", "\n\n")]


def test_held_text_comes_when_it_is_no_stop_string() -> None:
    steps = run(["x a", "a", "a", "b y", "z"], stop="aab!")
    assert [step.text for step in steps] == ["x ", "", "a", "aab y", "z"]


def test_held_text_comes_at_the_end() -> None:
    assert run(["ST", "O"], max_tokens=2, stop="STOP")[-1] == StopStep("STO", "length")
    assert run(["ST", "O"], [0, 1, 91], stop="STOP")[-1] == StopStep("STO", "stop", None)
    assert run(["ST", "O"], [0, 1, 5], stop="STOP", stop_token_ids=[5])[-1].text == "STO"


def test_first_complete_stop_string_wins() -> None:
    assert run(["xabc"], stop=["xabc", "ab"])[-1] == StopStep("x", "stop", "ab")
    assert run(["xabc"], stop=["bc", "xabc"])[-1] == StopStep("", "stop", "xabc")


def test_nothing_is_held_without_stop_strings() -> None:
    words = ["a", "bc", " ", "d"]
    assert [step.text for step in run(words)] == words


def test_min_tokens() -> None:
    steps = run(["a", "b"], [0, 90, 1, 91, 0], min_tokens=2)
    assert [step.finish_reason for step in steps] == [None, None, None, "stop"]
    steps = run(["a", "b"], [1, 1, 1], min_tokens=2, stop_token_ids=[1])
    assert [step.stop_reason for step in steps] == [None, None, 1]
    # The length limit counts all the same, the model's own too.
    assert run(["a"], [0, 90, 90], min_tokens=2, max_tokens=2)[-1] == StopStep("", "length")
    assert run(["a"], [0, 0, 0], min_tokens=9, room=2)[-1] == StopStep("a", "length")


def test_min_tokens_and_stop_strings() -> None:
    assert text_of(run(["STOP", "a", "b", "STOP", "c"], min_tokens=1, stop="STOP")) == "STOPab"
    # Begun early, complete in time: it stops.
    assert run(["x", "ST", "OP", "y"], min_tokens=2, stop="STOP")[-1] == StopStep(
        "", "stop", "STOP"
    )
    assert text_of(run(["x", "ST", "OP", "y"], min_tokens=3, stop="STOP")) == "xSTOPy"
    # "ab" is complete too early and still held back for "abcd": a later token must not find it.
    steps = run(["abc", "", "", "x", "ab"], min_tokens=1, stop=["abcd", "ab"])
    assert [step.text for step in steps] == ["", "", "", "abcx", ""]
    assert run(["abc", "", "d"], min_tokens=1, stop=["abcd", "ab"])[-1].stop_reason == "abcd"


def first_complete(text: str, strings: Sequence[str], early: int) -> tuple[int, str] | None:
    """By the book: character by character past the early ones, the longest stop string that ends
    here."""
    for end in range(early + 1, len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return end - len(string), string
    return None


def test_any_cutting_into_tokens_gives_the_same_text() -> None:
    rng = random.Random(4)
    stopped = 0
    for _ in range(1500):
        text = "".join(rng.choices("aab", k=rng.randrange(1, 14)))
        strings = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(3)]
        keep = rng.random() < 0.5
        cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(len(text))))
        words = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
        min_tokens = rng.choice([0, 0, rng.randrange(len(words) + 1)])
        steps = run(
            words,
            stop=strings,
            include_stop_str_in_output=keep,
            max_tokens=len(words),
            min_tokens=min_tokens,
        )
        found = first_complete(text, strings, len("".join(words[:min_tokens])))
        if found is None:
            assert (text_of(steps), steps[-1].finish_reason) == (text, "length")
        else:
            stopped += 1
            start, string = found
            assert text_of(steps) == text[: start + len(string) * keep]
            assert (steps[-1].finish_reason, steps[-1].stop_reason) == ("stop", string)
        # As much as can be said is said at once: what is held may begin a stop string.
        sent = seen = 0
        for word, step in zip(words, steps[:-1], strict=False):
            seen += len(word)
            sent += len(step.text)
            held = text[sent:seen]
            assert not held or any(string.startswith(held) for string in strings)
    assert 300 < stopped < 1400


def test_real_tokens(small: Tokenizer) -> None:
    ids = small.encode("The dog 世界🙂 sleeps")
    params = SamplingParams(stop="🙂 sl", max_tokens=100)
    checker = StopChecker(params, small.eos_token_ids, IncrementalDetokenizer(small, [5]))
    steps = [checker.update(token_id) for token_id in ids[:-2]]
    while steps[-1].finish_reason is None:
        steps.append(checker.update(ids[len(steps)]))
    assert text_of(steps) == "The dog 世界"
    assert steps[-1].stop_reason == "🙂 sl"


def test_unfinished_character_at_the_limit(small: Tokenizer) -> None:
    backend = small.hf.backend_tokenizer
    ids = [backend.token_to_id(letter) for letter in "ä½"]  # two bytes of three
    checker = StopChecker(SamplingParams(max_tokens=2), (), IncrementalDetokenizer(small))
    assert checker.update(ids[0]) == StopStep("")
    assert checker.update(ids[1]) == StopStep("\ufffd", "length")


def test_without_a_tokenizer() -> None:
    checker = StopChecker(SamplingParams(stop_token_ids=[3]), EOS)
    assert checker.update(2) == StopStep("")
    assert checker.update(3) == StopStep("", "stop", 3)
    with pytest.raises(UserError, match=r"stop=\['a'\].*model\.tokenizer=.*stop_token_ids"):
        StopChecker(SamplingParams(stop="a"), EOS)


def test_misuse() -> None:
    with pytest.raises(AssertionError):
        StopChecker(SamplingParams(max_tokens=None), EOS)
    with pytest.raises(AssertionError):
        StopChecker(SamplingParams(), EOS, room=0)
    checker = StopChecker(SamplingParams(max_tokens=1), EOS)
    checker.update(1)
    with pytest.raises(AssertionError):
        checker.update(1)
