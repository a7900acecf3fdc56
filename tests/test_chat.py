"""`chat=true`: keys, commands, what goes where, Ctrl-C; with a scripted engine and a real one."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtime.conftest import small_folder as small_folder
from test_conversation import CHATML
from test_run import ROOT, engines, fails  # noqa: F401
from test_run_end_to_end import command, quiet_logging  # noqa: F401

from minivllm import chat, run
from minivllm.conversation import ChatOptions
from minivllm.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.tokenizer import load_tokenizer

STATS = re.compile(
    r"\[(\d+) new \+ (\d+) reused prompt tokens \| (\d+) generated \| TTFT [\d.]+ ms \| "
    r"([\d.]+|-) tok/s( \| .+)?\]"
)


@pytest.fixture(scope="module")
def chat_folder(small_folder, tmp_path_factory) -> Path:
    """A small random checkpoint that has a tokenizer with a ChatML template."""
    from oracle import random_model, save

    folder = tmp_path_factory.mktemp("chat") / "folder"
    shutil.copytree(small_folder, folder)
    file = folder / "tokenizer_config.json"
    changes = {"chat_template": CHATML, "extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    size = load_tokenizer(folder).vocab_limit
    return save(random_model(vocab_size=size, eos_token_id=0), folder)


class Answers:
    """An engine that gives scripted answers, a token a step; the prompts it got are kept."""

    def __init__(self, tokenizer, answers, most=1000, finish="stop"):
        self.tokenizer, self.answers, self.finish = tokenizer, list(answers), finish
        self.engine = SimpleNamespace(max_model_len=most)
        self.prompts: list[dict] = []
        self.params: list[SamplingParams] = []
        self.closed: list[int] = []  # tokens that each request had come to

    def stream(self, prompts, sampling_params):
        (prompt,) = prompts
        self.prompts.append(prompt)
        self.params.append(sampling_params)
        return self._tokens(prompt["prompt_token_ids"], self.answers.pop(0))

    def _tokens(self, prompt, answer):
        ids = self.tokenizer.encode(answer)
        told, count = "", 0
        try:
            for count in range(1, len(ids) + 1):
                text = self.tokenizer.decode(ids[:count])
                last = count == len(ids)
                shown = CompletionOutput(
                    0, text, ids[:count], text[len(told) :], self.finish if last else None, 0
                )
                told = text
                metrics = RequestMetrics(0.5, 0.25 * (count - 1))
                yield RequestOutput("0", None, prompt, [shown], last, metrics, 8)
        finally:
            self.closed.append(count)


@pytest.fixture
def tokenizer(chat_folder):
    return load_tokenizer(chat_folder)


@pytest.fixture
def talk(monkeypatch, capsys, tokenizer):
    """Sends lines to a chat with scripted answers; gives the engine, stdout and stderr."""

    def call(text, *answers, options=None, params=None, **engine):
        llm = Answers(tokenizer, answers, **engine)
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        chat.run_chat(llm, params or SamplingParams(max_tokens=9), options or ChatOptions())
        return llm, *capsys.readouterr()

    return call


def words(llm, turn):
    return llm.tokenizer.decode(llm.prompts[turn]["prompt_token_ids"], False)


def test_each_line_is_a_turn_of_one_conversation(talk):
    llm, out, err = talk("hello\n\n  you? \r\n", "the fox", "on and on")
    assert out == "the fox\non and on\n"
    first = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    # the scripted end is the last token of an answer, which is not part of it
    assert words(llm, 0) == first
    assert words(llm, 1).endswith("<|im_start|>user\nyou?<|im_end|>\n<|im_start|>assistant\n")
    assert words(llm, 1).startswith(f"{first}the fox")
    lines = err.splitlines()
    assert (lines[0], lines[2], len(lines)) == ("> hello", "> you?", 4)
    count = len(llm.tokenizer.encode("the fox"))
    speed = f"{(count - 1) / (0.25 * (count - 1)):.1f}"
    new = len(llm.prompts[0]["prompt_token_ids"]) - 8
    assert lines[1] == (
        f"[{new} new + 8 reused prompt tokens | {count} generated | TTFT 500.0 ms | {speed} tok/s]"
    )


def test_the_answer_is_printed_as_it_comes(talk, monkeypatch, capsys):
    seen = []
    before = Answers._tokens

    def watched(self, prompt, answer):
        for output in before(self, prompt, answer):
            seen.append(capsys.readouterr().out)
            yield output

    monkeypatch.setattr(Answers, "_tokens", watched)
    _, out, _ = talk("hello\n", "the fox jumps")
    assert len(seen) > 2 and seen[0] == "" and all(seen[1:])
    assert "".join(seen) + out == "the fox jumps\n"


def test_commands(talk):
    llm, out, err = talk(
        "/help\nhello\n/reset\nhello\n/etc/hosts is what\n/nope\n/EXIT\nnever\n", "a", "b", "c"
    )
    assert out == "a\nb\nc\n"
    assert words(llm, 0) == words(llm, 1)
    assert "/etc/hosts is what" in words(llm, 2)
    assert err.count(chat.HELP) == 2 and "/nope: no such command" in err
    assert "the conversation is forgotten" in err and "never" not in err


def test_a_system_message_outlives_a_reset(talk):
    llm, _, _ = talk("hi\n/reset\nhi\n", "a", "b", options=ChatOptions(system="Be brief."))
    assert words(llm, 0).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert words(llm, 0) == words(llm, 1)


def test_the_tokenizers_end_ends_an_answer(talk):
    llm, _, _ = talk("hi\n", "a", params=SamplingParams(stop_token_ids=[5], temperature=0.5))
    assert llm.params[0].stop_token_ids == (5, 0)
    assert llm.params[0].temperature == 0.5
    llm, _, _ = talk("hi\n", "a", params=SamplingParams(ignore_eos=True))
    assert llm.params[0].stop_token_ids == ()


def test_what_cut_an_answer_off_is_told(talk, tokenizer):
    count = len(tokenizer.encode("the fox"))
    _, _, err = talk("hi\n", "the fox", finish="length")
    assert err.endswith(f" | cut off at sampling.max_tokens={count}]\n")
    length = len(tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    _, _, err = talk("hi\n", "the fox", finish="length", most=length + count)
    assert err.endswith(f" | cut off at max_model_len={length + count}]\n")


def test_a_full_context_is_a_message_and_the_chat_goes_on(talk, monkeypatch):
    lines = f"hi\n{'long ' * 50}\nyou\n/reset\nhi\n"
    monkeypatch.setattr(chat, "UserError", Told)
    with pytest.raises(Told) as told:
        talk(lines, "a", "b", "c", most=120)
    assert str(told.value) == "1 of 4 turns got no answer"
    assert "max_model_len=120 leaves no room for an answer; /reset" in Told.told[0]


class Told(chat.UserError):
    """A UserError that is remembered."""

    told: list[str] = []  # noqa: RUF012

    def __init__(self, message):
        super().__init__(message)
        self.told.append(message)


def test_a_failed_turn_leaves_no_trace(talk, capsys):
    with pytest.raises(chat.UserError, match="1 of 1 turns got no answer"):
        talk("hi\n", "bad", finish="error")
    out, err = capsys.readouterr()
    assert out == "bad\n" and "no answer: the model gave NaN or infinity" in err


def test_input_that_is_not_text(talk, capsys):
    with pytest.raises(chat.UserError, match="standard input, line 2: not UTF-8 text"):
        talk(b"hi\n\xff\xfe\n", "a")
    assert capsys.readouterr().out == "a\n"


def test_ctrl_c_ends_the_answer_and_keeps_what_came(talk, monkeypatch):
    before = Answers._tokens

    def interrupted(self, prompt, answer):
        for count, output in enumerate(before(self, prompt, answer)):
            if count == 2 and len(self.prompts) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield output

    monkeypatch.setattr(Answers, "_tokens", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    llm, out, err = talk("hi\nagain\n", "the fox jumps over the dog", "on")
    assert signal.getsignal(signal.SIGINT) is handler
    part, last = out.splitlines()
    assert part and "the fox jumps over the dog".startswith(part) and last == "on"
    assert "| interrupted]" in err
    assert f"assistant\n{part}<|im_end|>\n<|im_start|>user\nagain" in words(llm, 1)


def test_a_second_ctrl_c_ends_the_chat(talk, monkeypatch):
    def twice(self, prompt, answer):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        yield

    monkeypatch.setattr(Answers, "_tokens", twice)
    with pytest.raises(KeyboardInterrupt):
        talk("hi\n", "a")


def test_the_keys_of_a_chat_reach_it(engines, monkeypatch):  # noqa: F811
    seen = []
    monkeypatch.setattr(chat, "run_chat", lambda *arguments: seen.append(arguments))
    chosen = ["chat=true", "system='Be brief, please.'", "enable_thinking=true"]
    assert run.main(["+model=tiny", *chosen, "sampling.max_tokens=7"]) == 0
    ((llm, params, options),) = seen
    assert llm is engines[0] and llm.closed
    assert params.max_tokens == 7
    assert options == ChatOptions("Be brief, please.", True)
    assert run.main(["+model=tiny", "chat=true"]) == 0
    assert seen[1][2] == ChatOptions()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat=yes please"], "chat: 'yes please' is not one of: true, false"),
        (["chat=1"], "chat: 1 is not one of: true, false"),
        (["chat=true", "enable_thinking=maybe"], "enable_thinking: 'maybe' is not one of: true, f"),
        (["chat=true", "prompt=a"], "chat and prompt: a chat reads what you say from standard in"),
        (["chat=true", "prompt=a", "prompt_file=-"], "chat and prompt and prompt_file: a chat re"),
        (["chat=true", "prompts=[a]"], "chat and prompts: a chat reads"),
        (["chat=true", "system=2024"], "system: 2024 is not a text; quote it twice: 'system="),
        (["chat=true", "system="], "system: '' is not a text"),
        (["system=a"], "system: only a chat has it; add chat=true"),
        (["enable_thinking=true"], "enable_thinking: only a chat has it; add chat=true"),
        (["chat=true", "model.skip_tokenizer_init=true"], "model.skip_tokenizer_init: true leave"),
        (["chat=true", "sampling.n=2"], "sampling.n: 2: a chat has one answer a turn"),
        (["chat=true", "sytem=a"], "sytem=a: no such key; did you mean 'system'?"),
    ],
)
def test_what_does_not_go_with_a_chat(engines, capsys, arguments, message):  # noqa: F811
    assert fails(capsys, "+model=tiny", *arguments).startswith(message)
    assert engines == []


def test_no_tokenizer_no_chat(engines, capsys, monkeypatch):  # noqa: F811
    llm = SimpleNamespace(tokenizer=None, close=lambda: None)
    monkeypatch.setattr(run, "build_llm", lambda config: llm)
    arguments = ["+model=miniqwen08b", "model.load_format=dummy", "chat=true"]
    assert fails(capsys, *arguments).startswith("a chat needs a tokenizer and there is none")


# the real engine


def in_process(monkeypatch, capsys, lines: str, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    code = run.main([*arguments, "chat=true", "runtime.device=cpu", "runtime.max_num_seqs=4"])
    return code, *capsys.readouterr()


def stats(err: str) -> list[tuple[int, int, int]]:
    return [
        (int(found[1]), int(found[2]), int(found[3]))
        for found in map(STATS.fullmatch, err.splitlines())
        if found
    ]


def test_a_later_turn_reuses_the_earlier_ones(quiet_logging, monkeypatch, capsys, chat_folder):  # noqa: F811
    lines = "The quick brown fox jumps over the lazy dog\n" * 3
    options = ["sampling.max_tokens=70", "sampling.ignore_eos=true"]
    ids = load_tokenizer(chat_folder).special_ids  # which would leave no text
    options.append(f"sampling.logit_bias={{{','.join(f'{i}: -100' for i in sorted(ids))}}}")
    tiny = ["+model=tiny", f"model.path={chat_folder}"]
    code, out, err = in_process(monkeypatch, capsys, lines, *tiny, *options)
    assert code == 0, err
    turns = stats(err)
    assert [generated for _, _, generated in turns] == [70, 70, 70]
    lengths = [new + reused for new, reused, _ in turns]
    assert turns[0][1] == 0
    for before, (_, reused, generated) in zip(lengths, turns[1:], strict=False):
        # all whole blocks of what the model has read and written
        assert reused == (before + generated - 1) // 64 * 64
    cold = in_process(
        monkeypatch, capsys, lines, *tiny, *options, "runtime.prefix_cache.enabled=false"
    )
    assert (cold[0], cold[1]) == (0, out)
    assert [reused for _, reused, _ in stats(cold[2])] == [0, 0, 0]


def test_a_context_that_fills_up(quiet_logging, monkeypatch, capsys, chat_folder):  # noqa: F811
    arguments = ["+model=tiny", f"model.path={chat_folder}", "runtime.max_model_len=100"]
    arguments += ["sampling.max_tokens=null", "sampling.ignore_eos=true"]
    lines = "hello\nagain\n/reset\nhello\n"
    code, _, err = in_process(monkeypatch, capsys, lines, *arguments)
    assert code == 2
    assert len(stats(err)) == 2 and err.count("cut off at max_model_len=100]") == 2
    assert "leaves no room for an answer; /reset starts a new one" in err
    assert err.splitlines()[-1] == "error: 1 of 3 turns got no answer"


def test_no_template(quiet_logging, monkeypatch, capsys, chat_folder, tmp_path):  # noqa: F811
    folder = shutil.copytree(chat_folder, tmp_path / "folder")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    arguments = ["+model=tiny", f"model.path={folder}"]
    code, out, err = in_process(monkeypatch, capsys, "hi\n", *arguments)
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1 and "the tokenizer has no chat template" in err
    assert "Traceback" not in err


def test_piped_lines_in_a_process(chat_folder, tmp_path):
    arguments = ["+model=tiny", f"model.path={chat_folder}", "chat=true", "sampling.max_tokens=6"]
    done = command(tmp_path, *arguments, stdin="hello\n/help\nyou, {world}!\n")
    assert done.returncode == 0, done.stderr
    assert [generated <= 6 for _, _, generated in stats(done.stderr)] == [True, True]
    assert "> you, {world}!" in done.stderr and chat.HELP in done.stderr
    assert done.stdout.endswith("\n") and "[" + "new +" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_aborts_the_request_of_the_engine(chat_folder):
    arguments = ["+model=tiny", f"model.path={chat_folder}", "chat=true", "runtime.device=cpu"]
    arguments += ["sampling.max_tokens=900", "sampling.ignore_eos=true", "runtime.max_num_seqs=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "minivllm.run", *arguments, "runtime.check_integrity=true"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(20)  # the answer is on its way
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"/reset\nhello\n", timeout=120)
    finally:
        process.kill()
    text = err.decode()
    assert process.returncode == 0, text
    (_, _, first), (_, _, second) = stats(text)
    assert first < second == 900 and "| interrupted]" in text
    assert "Traceback" not in text and out


CHAT = """
import sys; sys.path.insert(0, "tests")
from pathlib import Path
from test_chat import Answers, load_tokenizer, run
import time
class Slow(Answers):
    close = lambda self: None
    def _tokens(self, prompt, answer):
        for output in super()._tokens(prompt, answer):
            time.sleep(0.05)
            yield output
tokenizer = load_tokenizer(Path(sys.argv[1]))
run.build_llm = lambda config: Slow(tokenizer, ["the fox jumps over the lazy dog " * 20, "on"])
sys.exit(run.main(["+model=tiny", "chat=true"]))
"""


class Terminal:
    """A chat with scripted answers at a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.screen, slave = pty.openpty()
        self.text = ""
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHAT, str(folder)],
            cwd=ROOT, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            # a shell has what it runs in the background ignore Ctrl-C, and children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.close(slave)

    def wait_for(self, text: str) -> None:
        """Read until the text is on the screen."""
        end = time.monotonic() + 60
        while text not in self.text:
            ready, _, _ = select.select([self.screen], [], [], 1)
            assert time.monotonic() < end, f"no {text!r} in {self.text!r}"
            if ready:
                self.text += os.read(self.screen, 1000).decode()
        self.text = self.text.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def ctrl_c(self) -> None:
        # a signal between the prompt's appearance and readline's wait would lie until the next key
        time.sleep(1)
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.screen)


def test_at_a_terminal(chat_folder):
    terminal = Terminal(chat_folder)
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("the fox")
    terminal.ctrl_c()  # ends the answer
    terminal.wait_for("interrupted]")
    terminal.wait_for("> ")
    terminal.ctrl_c()  # ends nothing
    terminal.wait_for("(Ctrl-C again, Ctrl-D or /exit ends the chat)")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("on\r\n")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_twice_at_the_prompt(chat_folder):
    terminal = Terminal(chat_folder)
    terminal.wait_for("> ")
    terminal.ctrl_c()
    terminal.wait_for("(Ctrl-C again")
    terminal.wait_for("> ")
    terminal.ctrl_c()
    assert terminal.end() == 130
