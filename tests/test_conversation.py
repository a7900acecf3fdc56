"""The ids of a conversation, turn after turn, with Qwen3.5's vocabulary."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

# fixtures
from runtime.conftest import qwen_folder as qwen_folder
from runtime.conftest import small_folder as small_folder

from minivllm.conversation import (
    ChatOptions,
    Conversation,
    Past,
    continued_ids,
    count_shared,
)
from minivllm.errors import UserError
from minivllm.runtime.outputs import CompletionOutput
from minivllm.runtime.tokenizer import Tokenizer, load_tokenizer

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What Qwen3.5's own template does to text messages: contents are trimmed, the answer begins with
# thoughts (empty ones if there shall be none), and those before the last question are left out.
THINKING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% set text = m.content | trim %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set parts = text.split('</think>') %}"
    "{% if loop.index0 > last.user %}"
    "<think>\n{{ parts[0].split('<think>')[-1] | trim }}\n</think>\n\n{% endif %}"
    "{% set text = parts[-1] | trim %}{{ text }}"
    "{% else %}{{ text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LONG = "Tell me all about the long history of the small river that runs past the mill. "


def tokenizer_with(folder: Path, target: Path, template: str) -> Tokenizer:
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(target)


@pytest.fixture(scope="module")
def chatml(qwen_folder, tmp_path_factory) -> Tokenizer:
    return tokenizer_with(qwen_folder, tmp_path_factory.mktemp("chatml") / "folder", CHATML)


@pytest.fixture(scope="module")
def thinking(qwen_folder, tmp_path_factory) -> Tokenizer:
    return tokenizer_with(qwen_folder, tmp_path_factory.mktemp("think") / "folder", THINKING)


def said(ids: list[int], tokenizer: Tokenizer, reason="stop", stop=None) -> CompletionOutput:
    """What the engine tells of an answer of these ids (without the end)."""
    text = tokenizer.decode(ids)
    ids = [*ids, *tokenizer.encode(END)] if reason == "stop" and stop is None else list(ids)
    return CompletionOutput(0, text, ids, finish_reason=reason, stop_reason=stop)


def letters(text: str, tokenizer: Tokenizer) -> list[int]:
    """A text in more tokens than the tokenizer makes of it."""
    return [token for letter in text for token in tokenizer.encode(letter)]


def test_ids_are_continued_only_where_the_text_is(chatml):
    spelled = letters("hello", chatml)
    assert continued_ids(chatml, "hello world", [Past("hello", spelled)]) == [
        *spelled,
        *chatml.encode(" world"),
    ]
    assert continued_ids(chatml, "help", [Past("hello", spelled)]) == chatml.encode("help")
    assert continued_ids(chatml, "hello") == chatml.encode("hello")
    # of several that fit, the longest
    pasts = [Past("he", spelled[:2]), Past("hello", spelled), Past("hello you", [1])]
    assert continued_ids(chatml, "hello", pasts) == spelled


def test_count_shared():
    assert [count_shared(*pair) for pair in (([1, 2], [1, 2, 3]), ([1, 4], [1, 2]), ([], [1]))] == [
        2,
        1,
        0,
    ]


def test_a_template_that_only_appends_shares_all(chatml):
    conversation = Conversation(chatml, ChatOptions(system="Be brief."))
    first = conversation.ask(LONG)["prompt_token_ids"]
    assert chatml.decode(first, skip_special_tokens=False) == (
        f"{START}system\nBe brief.{END}\n{START}user\n{LONG}{END}\n{START}assistant\n"
    )
    written = letters("It is short.", chatml)
    assert written != chatml.encode("It is short.")
    conversation.answer(said(written, chatml))
    second = conversation.ask("And then?")["prompt_token_ids"]
    assert count_shared(second, [*first, *written]) == len(first) + len(written)
    assert chatml.decode(second[len(first) :], skip_special_tokens=False) == (
        f"It is short.{END}\n{START}user\nAnd then?{END}\n{START}assistant\n"
    )
    # without the ids of the past the answer would be other tokens
    plain = chatml.encode(chatml.decode(second, skip_special_tokens=False))
    assert count_shared(plain, second) < len(first) + len(written)


def test_what_an_answer_ended_with_is_not_in_the_way(chatml):
    for reason, stop in (("length", None), ("abort", None), ("stop", None), (None, None)):
        conversation = Conversation(chatml, ChatOptions())
        first = conversation.ask("hi")["prompt_token_ids"]
        ids = chatml.encode("hello the")
        conversation.answer(said(ids, chatml, reason, stop))
        second = conversation.ask("go on")["prompt_token_ids"]
        assert second[: len(first) + len(ids)] == [*first, *ids]
        assert second[len(first) + len(ids)] == chatml.encode(END)[0]
    # ended by another id than the template's
    conversation.reset()
    first = conversation.ask("hi")["prompt_token_ids"]
    other = chatml.encode("<|endoftext|>")
    conversation.answer(CompletionOutput(0, "hello", [*chatml.encode("hello"), *other], "", "stop"))
    second = conversation.ask("go on")["prompt_token_ids"]
    assert other[0] not in second
    # a stop text is not part of what was said, though its ids were written
    conversation.reset()
    first = conversation.ask("hi")["prompt_token_ids"]
    ids = chatml.encode("one\n\ntwo")
    conversation.answer(CompletionOutput(0, "one", ids, "", "stop", "\n\n"))
    second = conversation.ask("go on")["prompt_token_ids"]
    assert chatml.decode(second[len(first) :], False).startswith(f"one{END}\n")


def test_a_changed_answer_costs_no_more_than_itself(chatml):
    conversation = Conversation(chatml, ChatOptions())
    conversation.ask("hi")
    conversation.answer(said(letters("Hello there.", chatml), chatml))
    second = conversation.ask("go on")
    ids = chatml.encode("one\n\ntwo")
    conversation.answer(CompletionOutput(0, "one", ids, "", "stop", "\n\n"))
    third = conversation.ask("go on")["prompt_token_ids"]
    # the first answer keeps its odd ids, since the second question's end is known
    (stable,) = second["snapshot_at"]
    assert third[:stable] == second["prompt_token_ids"][:stable]
    text = chatml.decode(third[stable:], False)
    assert text == (f"{START}assistant\none{END}\n{START}user\ngo on{END}\n{START}assistant\n")


def test_a_character_cut_in_two_stays_as_it_was_written(chatml):
    conversation = Conversation(chatml, ChatOptions())
    first = conversation.ask("hi")["prompt_token_ids"]
    half = chatml.encode("👍🏽")[:2]
    conversation.answer(said(half, chatml, "length"))
    assert "\N{REPLACEMENT CHARACTER}" in conversation.messages[-1]["content"]
    second = conversation.ask("go on")["prompt_token_ids"]
    assert second[: len(first) + 2] == [*first, *half]


@pytest.mark.parametrize("think", [False, True])
def test_a_template_that_drops_thoughts_shares_up_to_the_last_question(thinking, think):
    conversation = Conversation(thinking, ChatOptions(enable_thinking=think))
    asked = [conversation.ask(LONG)]
    answers = ["It rises\n\nin the hills.", "It ends in the sea.", "Yes."]
    for answer in answers:
        text = f"They ask.\n</think>\n\n{answer}" if think else answer
        conversation.answer(said(thinking.encode(text), thinking))
        asked.append(conversation.ask("And then?"))
    for before, after in itertools.pairwise(asked):
        shared = count_shared(before["prompt_token_ids"], after["prompt_token_ids"])
        (stable,) = before["snapshot_at"]
        # all of the prompt but for what invites to think: <think>, …
        assert stable <= shared == before["prompt_token_ids"].index(248068)
        # and the snapshot lies at the question's end
        question = thinking.decode(before["prompt_token_ids"][:stable], False)
        assert question.endswith(f"{END}\n")
        assert after["prompt_token_ids"][:stable] == before["prompt_token_ids"][:stable]
    last = thinking.decode(asked[-1]["prompt_token_ids"], False)
    assert last.count("<think>") == 1 and "They ask" not in last
    assert all(answer in last for answer in answers)


def test_thoughts_without_an_end_are_no_answer(thinking):
    conversation = Conversation(thinking, ChatOptions(enable_thinking=True))
    conversation.ask("hi")
    conversation.answer(said(thinking.encode("They greet me and"), thinking, "length"))
    text = thinking.decode(conversation.ask("well?")["prompt_token_ids"], False)
    assert text == (
        f"{START}user\nhi{END}\n{START}assistant\n{END}\n"
        f"{START}user\nwell?{END}\n{START}assistant\n<think>\n"
    )


def test_thoughts_that_the_template_keeps_are_shared(qwen_folder, tmp_path):
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tokenizer = tokenizer_with(qwen_folder, tmp_path / "folder", template)
    conversation = Conversation(tokenizer, ChatOptions(enable_thinking=True))
    first = conversation.ask("hi")["prompt_token_ids"]
    written = tokenizer.encode("Well.\n</think>\n\nHello!")
    conversation.answer(said(written, tokenizer))
    second = conversation.ask("again")["prompt_token_ids"]
    assert second[: len(first) + len(written)] == [*first, *written]


def test_a_question_without_an_answer_leaves_nothing(chatml):
    conversation = Conversation(chatml, ChatOptions())
    alone = conversation.ask("two")
    conversation.ask("one")
    assert conversation.ask("two") == alone
    conversation.answer(said(chatml.encode("hello"), chatml))
    longer = conversation.ask("two")
    assert longer != alone
    conversation.reset()
    assert conversation.ask("two") == alone
    assert conversation.messages == []


def test_decomposed_letters_keep_the_ids(chatml):
    # the tokenizer composes them, so that decoding does not give back the text that was typed
    conversation = Conversation(chatml, ChatOptions())
    first = conversation.ask("cafe\u0301")["prompt_token_ids"]
    written = letters("oui", chatml)
    conversation.answer(said(written, chatml))
    second = conversation.ask("go on")["prompt_token_ids"]
    assert second[: len(first) + len(written)] == [*first, *written]


def test_what_a_template_refuses_is_told_at_once(small_folder, tmp_path):
    with pytest.raises(UserError, match="has no chat template"):
        Conversation(load_tokenizer(small_folder), ChatOptions())
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    tokenizer = tokenizer_with(small_folder, tmp_path / "folder", template)
    Conversation(tokenizer, ChatOptions())
    with pytest.raises(UserError, match="no system"):
        Conversation(tokenizer, ChatOptions(system="s"))
