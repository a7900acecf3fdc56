"""The command line: what it accepts, prints, leaves behind and returns; the engine is a fake."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm import console, overrides, prompts, run
from minivllm.errors import UserError
from minivllm.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.runtime.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]


def result(index, completions, count=1, prompt_token_ids=(0,), cached=0, times=(0.25, 0.5)):
    """An output: of each completion the text so far and the finish reason, `count` tokens each."""
    return RequestOutput(
        request_id=str(index),
        prompt=None,
        prompt_token_ids=list(prompt_token_ids),
        outputs=[
            CompletionOutput(number, text, list(range(7, 7 + count)), finish_reason=reason)
            for number, (text, reason) in enumerate(completions)
        ],
        finished=all(reason for _, reason in completions),
        metrics=RequestMetrics(*times),
        num_cached_tokens=cached,
    )


class FakeLLM:
    """An engine that answers all prompts together with the same pieces, one a token."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, config=None, pieces=("Hel", "", "lo é世"), tokenizer=True):
        self.implementations = {"causal_conv1d": "torch", "attention": "sdpa"}
        self.config, self.pieces, self.closed = config, pieces, False
        self.tokenizer = object() if tokenizer else None

    def stream(self, inputs, sampling_params):
        self.inputs, self.sampling_params = inputs, sampling_params
        for count in range(1, len(self.pieces) + 1):
            for index, prompt in enumerate(inputs):
                ids = prompt if isinstance(prompt, list) else [0] * len(prompt)
                text = "".join(self.pieces[:count]) if self.tokenizer else ""
                reason = "length" if count == len(self.pieces) else None
                yield result(index, [(text, reason)], count, prompt_token_ids=ids)

    def close(self):
        self.closed = True


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Runs go to fakes, in an empty working folder; yields the fakes that were built."""
    built: list[FakeLLM] = []

    def build(config):
        built.append(FakeLLM(config))
        return built[-1]

    monkeypatch.setattr(run, "build_llm", build)
    monkeypatch.chdir(tmp_path)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield built
    logging.root.handlers[:], logging.root.level = handlers, level
    assert list(tmp_path.iterdir()) == []  # no outputs/, no logs, no multirun.yaml
    assert Path.cwd() == tmp_path


def fails(capsys, *arguments: str) -> str:
    """The message of a run that must end in exactly one, with exit code 2."""
    assert run.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.removeprefix("error: ").removesuffix("\n")


def test_streams_the_text_then_one_summary_line(engines, capsys):
    assert run.main(["+model=tiny", "prompt=abc def"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "Hello é世\n"
        "7 prompt + 3 generated tokens | TTFT 250.0 ms | 4.0 tok/s | cpu float32 compiled | "
        "ops: attention=sdpa causal_conv1d=torch\n"
    )
    assert err == "prompt: 'abc def'\n"
    (engine,) = engines
    assert engine.closed
    assert engine.inputs == ["abc def"]
    assert engine.config.model.path == "asset://tiny"
    assert engine.sampling_params.max_tokens == 64


def test_text_is_printed_when_its_token_comes(engines, monkeypatch, capsys):
    llm = FakeLLM()
    seen = []
    stream = llm.stream

    def watched(*arguments):
        for output in stream(*arguments):
            seen.append(capsys.readouterr().out)
            yield output

    llm.stream = watched
    console.print_stream(llm, ["x"], SamplingParams())
    assert [*seen, capsys.readouterr().out] == ["", "Hel", "", "lo é世\n"]


def test_the_default_prompt_is_used_if_none_is_given(engines, capsys):
    assert run.main(["+model=tiny"]) == 0
    assert engines[0].inputs == ["The morning was fine, and they"]


def test_several_prompts_have_a_header_each(engines, capsys):
    assert run.main(["+model=tiny", 'prompts=[one,"two, three",[5,6]]']) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[:-1] == [
        "--- prompt 1 of 3: 'one'",
        "Hello é世",
        "--- prompt 2 of 3: 'two, three'",
        "Hello é世",
        "--- prompt 3 of 3: [5, 6]",
        "Hello é世",
    ]
    assert "15 prompt + 9 generated tokens | TTFT 250.0 ms | 12.0 tok/s" in out.splitlines()[-1]
    assert err == ""
    assert engines[0].inputs == ["one", "two, three", [5, 6]]


def test_without_a_tokenizer_token_ids_are_printed(engines, monkeypatch, capsys):
    llm = FakeLLM(tokenizer=False)
    monkeypatch.setattr(run, "build_llm", lambda config: llm)
    assert run.main(["+model=miniqwen08b", "model.load_format=dummy", "prompts=[é,[300]]"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "7 8 9 "
    assert llm.inputs == [[0xC3, 0xA9], [300]]
    assert err == "no tokenizer: the prompt's bytes stand in for token ids\n"


class Scripted(FakeLLM):
    """An engine whose outputs, in their order, are given; `seen`: what was printed before each."""

    def __init__(self, outputs, capsys, tokenizer=True):
        super().__init__(tokenizer=tokenizer)
        self.outputs, self.capsys, self.seen = outputs, capsys, []

    def stream(self, inputs, sampling_params):
        for number, output in enumerate(self.outputs):
            if number:
                self.seen.append(self.capsys.readouterr())
            yield output

    def run(self, prompts, n=1):
        finished = console.print_stream(self, prompts, SamplingParams(n=n))
        self.seen.append(self.capsys.readouterr())
        return finished


def test_texts_wait_for_their_turn(capsys):
    script = [
        result(1, [("u", None)]),
        result(2, [("xy", "stop")], 2),
        result(0, [("a", None)]),
        result(1, [("uv", None)], 2),
        result(0, [("ab", None)], 2),
        result(0, [("abc", "stop")], 3),
        result(1, [("uvw", "length")], 3),
    ]
    llm = Scripted(script, capsys)
    finished = llm.run(["p", "q", [5]])
    assert [printed.out for printed in llm.seen] == [
        "",
        "",
        "--- prompt 1 of 3: 'p'\na",
        "",
        "b",
        "c\n--- prompt 2 of 3: 'q'\nuv",
        "w\n--- prompt 3 of 3: [5]\nxy\n",
    ]
    assert [output.outputs[0].text for output in finished] == ["abc", "uvw", "xy"]


def test_several_completions_have_a_header_each(capsys):
    script = [
        result(0, [("a", None), ("1", None), ("x", None)]),
        result(0, [("ab", None), ("12", "stop"), ("xy", None)], 2),
        result(0, [("abc", "stop"), ("12", "stop"), ("xyz", None)], 3),
        result(0, [("abc", "stop"), ("12", "stop"), ("xyz!", "length")], 4),
    ]
    llm = Scripted(script, capsys)
    llm.run(["p"], n=3)
    assert [printed.out for printed in llm.seen] == [
        "--- completion 1 of 3\na",
        "b",
        "c\n--- completion 2 of 3\n12\n--- completion 3 of 3\nxyz",
        "!\n",
    ]
    assert [printed.err for printed in llm.seen] == ["prompt: 'p'\n", "", "", ""]


def test_completions_of_several_prompts(capsys):
    pair = [("a", "stop"), ("b", "stop")]
    llm = Scripted([result(0, pair), result(1, pair)], capsys)
    llm.run(["p", "q"], n=2)
    assert "".join(printed.out for printed in llm.seen).splitlines() == [
        *("--- prompt 1 of 2: 'p'", "--- completion 1 of 2", "a", "--- completion 2 of 2", "b"),
        *("--- prompt 2 of 2: 'q'", "--- completion 1 of 2", "a", "--- completion 2 of 2", "b"),
    ]


def test_a_model_that_gives_no_numbers_is_told(capsys):
    script = [result(0, [("a", "error"), ("", "error")], 0), result(1, [("b", "stop"), ("", None)])]
    script.append(result(1, [("b", "stop"), ("c", "stop")]))
    llm = Scripted(script, capsys)
    llm.run(["p", "q"], n=2)
    errors = "".join(printed.err for printed in llm.seen).splitlines()
    assert [line.partition(": the")[0] for line in errors] == [
        "error: prompt 1, completion 1",
        "error: prompt 1, completion 2",
    ]
    assert all("NaN or infinity" in line for line in errors)


def test_waiting_ids_are_printed_without_a_tokenizer(capsys):
    script = [
        result(1, [("", None)], 2),
        result(0, [("", "stop")], 1),
        result(1, [("", "stop")], 3),
    ]
    llm = Scripted(script, capsys, tokenizer=False)
    llm.run([[1], [2]])
    assert "".join(printed.out for printed in llm.seen).splitlines() == [
        *("--- prompt 1 of 2: [1]", "7 ", "--- prompt 2 of 2: [2]", "7 8 9 "),
    ]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([result(0, [("x", "stop")])], "1 prompt + 1 generated tokens | TTFT 250.0 ms | - tok/s |"),
        (
            # from 0.2 to 1.2 seconds, 9 + 3 tokens after the first ones
            [
                result(0, [("x", "stop")], 10, range(5), cached=0, times=(0.2, 0.9)),
                result(1, [("x", "stop")], 4, range(70), cached=64, times=(0.4, 0.8)),
            ],
            "75 prompt (64 cached) + 14 generated tokens | TTFT 300.0 ms | 12.0 tok/s | cpu",
        ),
        (
            # two completions of five tokens
            [result(0, [("x", "stop"), ("y", "stop")], 5, times=(0.1, 0.5))],
            "1 prompt + 10 generated tokens | TTFT 100.0 ms | 16.0 tok/s |",
        ),
        (
            [result(0, [("", "error")], 0, times=(0.0, 0.0))],
            "1 prompt + 0 generated tokens | TTFT - ms | - tok/s |",
        ),
        (
            # one that came to nothing does not count in the times
            [
                result(0, [("", "error")], 0, times=(0.0, 0.0)),
                result(1, [("x", "stop")], 3, times=(0.5, 0.5)),
            ],
            "2 prompt + 3 generated tokens | TTFT 500.0 ms | 4.0 tok/s |",
        ),
    ],
)
def test_the_summary_is_of_the_whole_batch(outputs, text):
    assert console.summary(outputs, FakeLLM(), "eager").startswith(text)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("prompt=你好，世界！", "你好，世界！"),
        ("prompt=Ünïcode et café", "Ünïcode et café"),
        ("prompt= 你好 ", "你好"),
        ('prompt="你好, 世界"', "你好, 世界"),
        ("prompt='it is 世界'", "it is 世界"),
        ("prompt=What is 1+1?", "What is 1+1?"),
        ("prompt=\"a, {b} = [c] 'd'\"", "a, {b} = [c] 'd'"),
        ('prompt="2024"', "2024"),
        ('prompt="two\nlines"', "two\nlines"),
        (r'prompt="costs \${x}"', "costs ${x}"),
        ("prompt=[1,2]", [1, 2]),
    ],
)
def test_a_prompt_arrives_as_typed(engines, argument, text):
    assert run.main(["+model=tiny", argument]) == 0
    assert engines[0].inputs == [text]


def test_lists_of_unquoted_chinese(engines):
    assert run.main(["+model=tiny", "prompts=[你好，世界, 再见]"]) == 0
    assert engines[0].inputs == ["你好，世界", "再见"]


def test_prompt_file(engines, tmp_path_factory, monkeypatch, capsys):
    file = tmp_path_factory.mktemp("prompts") / "a b.txt"
    file.write_bytes(b'def f(x={"a": 1}):\r\n\n')
    assert run.main(["+model=tiny", f"prompt_file={file}"]) == 0
    assert engines[0].inputs == ['def f(x={"a": 1}):\r\n']
    file.write_bytes(b"\xff")
    capsys.readouterr()
    message = fails(capsys, "+model=tiny", f"prompt_file={file}")
    assert message == f"prompt_file: '{file}' is not UTF-8 text (invalid start byte at byte 0)"
    file.write_bytes(b"\n")
    assert "prompt is empty" in fails(capsys, "+model=tiny", f"prompt_file={file}")
    message = fails(capsys, "+model=tiny", f"prompt_file={file.parent}/none")
    assert message == f"prompt_file: cannot read '{file.parent}/none': No such file or directory"
    assert "Is a directory" in fails(capsys, "+model=tiny", f"prompt_file={file.parent}")
    assert len(engines) == 1


def test_prompt_from_standard_input(engines, monkeypatch, tmp_path_factory):
    file = tmp_path_factory.mktemp("stdin") / "text"
    file.write_bytes("你好, {世界}\n".encode())
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run.main(["+model=tiny", "prompt_file=-"]) == 0
    assert engines[0].inputs == ["你好, {世界}"]


LISTED = "one of: miniqwen08b, tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"no model given: add +model=NAME, {LISTED}"),
        (["runtime.seed=1"], f"no model given: add +model=NAME, {LISTED}"),
        (["+model=null"], "a group takes the name of one of its files: no model given: add +mod"),
        (["model=tiny"], "model=tiny: no model is chosen by default: write +model=tiny"),
        (["model.path=x"], f"model.path=x: no model given: add +model=NAME, {LISTED}"),
        *(
            (
                [f"{plus}model={name}"],
                f"model: '{name}' is not {LISTED}; for a folder or a hub id write +model.path=…",
            )
            for plus, name in (("+", "nope"), ("", "nope"), ("+", "/a/folder"))
        ),
        (["+model=tiny", "+model=tiny"], "model: given more than once; to run each, write -m"),
        (["+model=tiny", "runtime=big"], "runtime: 'big' is not one of: default"),
    ],
)
def test_a_model_must_be_named(engines, capsys, arguments, message):
    assert fails(capsys, *arguments).startswith(message)
    assert engines == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "foo=1",
            "foo=1: no such key; choices: chat, compiler, default_prompt, enable_th",
        ),
        (
            "+foo=1",
            "foo=1: no such key; choices: chat, compiler, default_prompt, enable_th",
        ),
        ("promt=a", "promt=a: no such key; did you mean 'prompt'? choices: chat, "),
        ("runtime.max_num_seq=3", "runtime.max_num_seq=3: no such key; did you mean 'max_num_se"),
        ("+runtime.max_num_seq=3", "runtime.max_num_seq=3: no such key; did you mean 'max_num_s"),
        ("runtime.seed.x=3", "runtime.seed.x=3: no such key; choices: async_scheduling, "),
        ("model.pth=x", "model.pth=x: no such key; did you mean 'path'? choices: architecture, "),
        ("sampling.temperatur=1", "sampling.temperatur=1: no such key; did you mean 'temperature'"),
        (
            "+sampling.temperatur=1",
            "sampling.temperatur=1: no such key; did you mean 'temperature'",
        ),
        ("+runtime.seed=1", "+runtime.seed=1: the key exists already: write runtime.seed=1"),
        ("~nope", "Could not delete from config. 'nope' does not exist."),
        ("hydra.nope=1", "hydra.nope=1: no such key of Hydra; --hydra-help lists its own"),
        (
            "compiler.implementations.op=x",
            "compiler.implementations.op=x: no such key yet: to add it, write +compiler.impl",
        ),
        (
            "compiler.implementations={op: x}",
            "compiler.implementations={op: x}: to add a key to it, write +compiler.implementatio",
        ),
        ("model.architecture.x=1", "model.architecture.x=1: no such key yet: to add it, write +"),
        ("runtime.max_num_seqs=many", "runtime.max_num_seqs: 'many' is not an integer >= 1"),
        ("runtime.max_num_seqs=0", "runtime.max_num_seqs: 0 is not an integer >= 1"),
        ("runtime.device=tpu", "runtime.device: 'tpu' is not one of: auto, cpu, cuda, cuda:N"),
        ("compiler.mode=fast", "compiler.mode: 'fast' is not one of: reference, eager, compiled"),
        ("sampling.temperature=-1", "sampling.temperature=-1: must be a finite number >= 0"),
        ("sampling.max_tokens=x", "sampling.max_tokens='x': must be an integer >= 1"),
        ("prompt=", "prompt: the prompt is empty"),
        ("prompts=[a,'']", "prompts[1]: the prompt is empty"),
        ("prompts=[]", "prompts: [] is not a list of prompts, such as [Hello,World]"),
        ("prompts=a", "prompts: 'a' is not a list of prompts, such as [Hello,World]"),
        ("prompt=2024", "prompt: 2024 is not a text or a list of token ids; to have it read as "),
        ("prompts=[a,true]", "prompts[1]: True is not a text or a list of token ids"),
        ("prompt=[1,-2]", "prompt: -2 is not a token id (an integer >= 0)"),
        ("prompt=[1,a]", "prompt: 'a' is not a token id (an integer >= 0)"),
        ("prompt_file=3", "prompt_file: 3 is not the name of a file, or - (standard input)"),
        ("prompt", "'prompt' is neither a flag nor key=value; --help shows the keys"),
        ("prompt=a ${x}", "Interpolation key 'x' not found: ${…} inserts another key's value; to "),
        ("prompt=\udcff", "prompt: not valid text (surrogates not allowed at 0)"),
    ],
)
def test_a_wrong_argument_is_named_with_the_choices(engines, capsys, argument, message):
    assert fails(capsys, "+model=tiny", argument).startswith(message)
    assert engines == []


@pytest.mark.parametrize(
    "argument",
    ["prompt=Hello, world", "prompt=It's", "prompt=a=b", "prompt=a{b}", "prompt=f(x)", "prompt=[a",
     "prompt=Hi!", "prompt=a\nb", "prompt=<|end|>", "prompt=你好, b", "prompt=你's"],
)  # fmt: skip
def test_what_hydras_grammar_refuses_is_quoted_with_the_ways_out(engines, capsys, argument):
    message = fails(capsys, "+model=tiny", argument)
    assert repr(argument) in message  # as typed, not as prepared for Hydra
    assert "as in 'prompt=\"Hello, world\"'" in message
    assert "prompt_file=FILE (- is standard input)" in message
    assert engines == []


def test_only_one_kind_of_prompt(engines, capsys):
    message = fails(capsys, "+model=tiny", "prompt=a", "prompts=[b]")
    assert message == "prompt and prompts: give exactly one of prompt, prompts, prompt_file"


def test_a_fault_found_by_the_engine_is_one_message(engines, monkeypatch, capsys):
    def build(config):
        raise UserError("model.path: 'x' is no folder")

    monkeypatch.setattr(run, "build_llm", build)
    assert fails(capsys, "+model=tiny") == "model.path: 'x' is no folder"


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), ValueError("a fault of ours")])
def test_other_exceptions_keep_their_traceback(engines, monkeypatch, error):
    def build(config):
        raise error

    monkeypatch.setattr(run, "build_llm", build)
    with pytest.raises(type(error), match="a fault of ours"):
        run.main(["+model=tiny"])


def test_the_engine_is_closed_after_a_fault(engines, monkeypatch, capsys):
    llm = FakeLLM()

    def stream(inputs, sampling_params):
        raise UserError("prompt of 9 tokens")
        yield

    llm.stream = stream
    monkeypatch.setattr(run, "build_llm", lambda config: llm)
    assert fails(capsys, "+model=tiny") == "prompt of 9 tokens"
    assert llm.closed


def test_ctrl_c_ends_without_a_traceback(engines, monkeypatch, capsys):
    def build(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "build_llm", build)
    assert run.main(["+model=tiny"]) == 130
    assert capsys.readouterr() == ("", "")


def test_multirun_runs_every_combination(engines, capsys):
    arguments = ["+model=tiny", "-m", "sampling.temperature=0,0.5", "prompt=你好,b"]
    assert run.main(arguments) == 0
    seen = [(engine.sampling_params.temperature, *engine.inputs) for engine in engines]
    assert seen == [(0.0, "你好"), (0.0, "b"), (0.5, "你好"), (0.5, "b")]
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("===")]
    assert headers[1] == "=== +model=tiny sampling.temperature=0 prompt=b"
    assert len(headers) == 4


def test_multirun_over_models(engines):
    assert run.main(["-m", "+model=tiny,miniqwen08b"]) == 0
    assert [engine.config.model.name for engine in engines] == ["tiny", "miniqwen08b"]


def test_a_fault_in_one_job_of_a_multirun_spares_the_others(engines, capsys):
    assert run.main(["-m", "+model=tiny", "runtime.seed=-1,5"]) == 2
    assert [engine.config.runtime.seed for engine in engines] == [5]
    assert capsys.readouterr().err.startswith("error: runtime.seed: -1 is not an integer >= 0")


def test_environment_and_arguments_are_restored(engines, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["minivllm", "+model=tiny", "prompt=é"])
    assert run.main() == 0
    assert sys.argv == ["minivllm", "+model=tiny", "prompt=é"]
    assert "HYDRA_FULL_ERROR" not in os.environ
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert run.main(["+model=nope"]) == 2
    assert os.environ["HYDRA_FULL_ERROR"] == "0"


def test_options_reach_the_engine(engines):
    arguments = [
        "model.dtype=bfloat16",
        "compiler.disable=[a,b]",
        "+compiler.implementations.op=x",
        "runtime.device=cuda:1",
        "sampling.stop=[x,y]",
    ]
    assert run.main(["+model=tiny", *arguments]) == 0
    config = engines[0].config
    assert config.model.dtype == "bfloat16"
    assert config.compiler.disable == ("a", "b")
    assert config.compiler.implementations == {"op": "x"}
    assert config.runtime.device == "cuda:1"
    assert tuple(engines[0].sampling_params.stop) == ("x", "y")


def test_a_folder_needs_no_preset(engines):
    assert run.main(["+model.path=/a/模型"]) == 0
    assert engines[0].config.model.path == "/a/模型"
    assert engines[0].config.model.name == "custom"


def test_cfg_job_prints_the_config_and_runs_nothing(engines, capsys):
    assert run.main(["+model=tiny", "--cfg", "job", "prompt=é"]) == 0
    out, err = capsys.readouterr()
    assert "path: asset://tiny" in out
    assert "prompt: é" in out
    assert (err, engines) == ("", [])


def test_help_tells_how_to_start(engines, capsys):
    with pytest.raises(SystemExit) as raised:
        run.main(["--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    for text in ("python -m minivllm.run +model=tiny", "model: miniqwen08b, tiny", "max_num_seqs:"):
        assert text in out
    assert "Powered by Hydra" not in out


def test_contradicting_flags_are_a_message(engines, capsys):
    assert fails(capsys, "+model=tiny", "--cfg", "job", "-m").startswith("Only one of --run, ")


def test_preparing_leaves_ascii_alone():
    arguments = ["+model=tiny", "--cfg", "job", "prompt='a', b", "-m", "~runtime", 'x="é",é']
    assert overrides.prepare(arguments) == [
        "--cfg", "job", "-m", "+model=tiny", "prompt='a', b", "~runtime", 'x="é","é"',
    ]  # fmt: skip


def test_read_prompts_returns_the_default():
    read = prompts.read_prompts(prompt=None, prompts=None, prompt_file=None, default="d")
    assert read == ["d"]


def subprocess_run(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, **options)


FAKE = (
    "import sys; sys.path.insert(0, 'tests'); from test_run import FakeLLM, run; "
    "run.build_llm = FakeLLM; sys.exit(run.main(['+model=tiny', 'prompt=x']))"
)


def test_a_reader_that_has_seen_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess_run(FAKE, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "prompt: 'x'\n")


def test_output_that_the_encoding_lacks_is_replaced():
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess_run(FAKE, capture_output=True, env=env)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "Hello ??")
