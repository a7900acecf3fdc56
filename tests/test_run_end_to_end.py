"""The command line with the real engine: what a newcomer types, and each kind of bad input."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import run

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = re.compile(
    r"(\d+) prompt(?: \(\d+ cached\))? \+ (\d+) generated tokens \| TTFT [\d.]+ ms \| "
    r"([\d.]+|-) tok/s \| cpu (float32|bfloat16) (reference|eager|compiled) \| ops: (.*)"
)
IDS = "prompt=[5,6,7]"


def command(cwd: Path, *arguments: str, stdin: str = "", **environment: str):
    """Runs the program in a process of its own, without a hub and in a folder of its own."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hub"), "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **offline, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "minivllm.run", *arguments],
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def quiet_logging():
    """Puts back the handlers that a run installs, since they hold this test's captured streams."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level


@pytest.fixture
def generate(quiet_logging, capsys):
    """Runs the program in this process on the CPU; gives its lines and the parts of its summary."""

    def call(*arguments: str) -> tuple[list[str], re.Match[str]]:
        assert run.main([*arguments, "runtime.device=cpu"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        summary = SUMMARY.fullmatch(last)
        assert summary, last
        return lines, summary

    return call


@pytest.fixture
def fails(quiet_logging, capsys):
    """Runs the program in this process; gives its message, and holds that it is all it says."""

    def call(*arguments: str) -> str:
        assert run.main(["runtime.device=cpu", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        assert err.count("error: ") == 1
        return err.partition("error: ")[2]

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small random checkpoint without a tokenizer, saved by transformers."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def broken(checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "broken")


def at(folder: Path) -> list[str]:
    return ["+model=tiny", f"model.path={folder}", "model.skip_tokenizer_init=true", IDS]


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_tiny_generates_text_and_a_summary(tmp_path):
    done = command(tmp_path, "+model=tiny")
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    summary = SUMMARY.fullmatch(last)
    assert summary, last
    assert int(summary[1]) >= 1
    assert 1 <= int(summary[2]) <= 64
    assert (summary[4], summary[5]) == ("float32", "compiled")
    assert re.findall(r"(\w+)=\w+", summary[6])
    assert len("".join(text).split()) >= 5
    assert "prompt: 'The morning was fine, and they'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_from_standard_input(tmp_path):
    arguments = ["+model=tiny", "prompt_file=-", "sampling.max_tokens=3"]
    piped = command(tmp_path, *arguments, stdin="def f(x={}, y=[1]):\n")
    assert piped.returncode == 0, piped.stderr
    assert "prompt: 'def f(x={}, y=[1]):'" in piped.stderr


def test_miniqwen08b_without_network_and_weights_tells_the_ways_out(tmp_path):
    done = command(tmp_path, "+model=miniqwen08b")
    assert (done.returncode, done.stdout) == (2, "")
    message = done.stderr.partition("error: ")[2]
    for way in ("Qwen/Qwen3.5-0.8B", "model.path=", "Hugging Face hub", "model.load_format=dummy"):
        assert way in message


def test_miniqwen08b_with_dummy_weights_prints_token_ids(tmp_path):
    done = command(
        tmp_path,
        "+model=miniqwen08b",
        "model.load_format=dummy",
        "model.architecture.num_hidden_layers=4",
        "sampling.max_tokens=5",
        "sampling.ignore_eos=true",
    )
    assert done.returncode == 0, done.stderr
    ids, last = done.stdout.splitlines()
    assert len(ids.split()) == 5
    assert all(0 <= int(token) < 248320 for token in ids.split())
    summary = SUMMARY.fullmatch(last)
    assert summary, last
    assert (summary[1], summary[2]) == ("30", "5")


def test_tiny_completes_the_same_without_the_compiler(generate):
    arguments = ["+model=tiny", "prompt=The king said to the", "sampling.max_tokens=24"]
    plain, summary = generate(*arguments, "compiler.mode=reference")
    assert summary[5] == "reference"
    compiled, _ = generate(*arguments)
    assert plain == compiled
    assert "".join(compiled).strip()


def test_several_prompts_each_complete_as_if_alone(generate):
    options = ["+model=tiny", "sampling.max_tokens=8", "sampling.ignore_eos=true"]
    both, summary = generate(*options, "prompts=[从前有,import os]")
    assert summary[2] == "16"
    second = both.index("--- prompt 2 of 2: 'import os'")
    assert both[0] == "--- prompt 1 of 2: '从前有'"
    alone, _ = generate(*options, "prompt=import os")
    assert both[second + 1 :] == alone


def test_several_completions_are_those_of_seeds_in_a_row(generate):
    options = ["+model=tiny", "sampling.max_tokens=8", "sampling.ignore_eos=true"]
    options += ["sampling.temperature=1.0", "prompt=from here"]
    lines, summary = generate(*options, "sampling.n=3", "sampling.seed=5")
    assert summary[2] == "24"
    heads = [lines.index(f"--- completion {i} of 3") for i in (1, 2, 3)]
    texts = [lines[a + 1 : b] for a, b in zip(heads, [*heads[1:], len(lines)], strict=True)]
    for seed, text in enumerate(texts, 5):
        alone, _ = generate(*options, f"sampling.seed={seed}")
        assert text == alone


def test_a_seeded_draw_is_repeated(generate):
    arguments = ["+model=tiny", "prompts=[a b,a b]", "sampling.max_tokens=16"]
    arguments.append("sampling.temperature=1.0")
    lines, _ = generate(*arguments, "sampling.seed=1")
    middle = len(lines) // 2
    assert lines[1:middle] == lines[middle + 1 :]
    other, _ = generate(*arguments, "sampling.seed=2")
    assert other[1:] != lines[1:]


def test_a_checkpoint_of_ones_own_prints_token_ids(generate, checkpoint):
    lines, summary = generate(*at(checkpoint), "sampling.max_tokens=4", "sampling.ignore_eos=true")
    (ids,) = lines
    assert len(ids.split()) == 4
    assert all(0 <= int(token) < 64 for token in ids.split())
    assert (summary[1], summary[2]) == ("3", "4")


def test_multirun(quiet_logging, capsys):
    arguments = ["-m", "+model=tiny", "sampling.max_tokens=1,2", "runtime.device=cpu"]
    assert run.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [SUMMARY.fullmatch(line)[2] for line in lines if SUMMARY.fullmatch(line)] == ["1", "2"]


def test_dumps_are_written_where_asked(generate, tmp_path):
    generate("+model=tiny", "sampling.max_tokens=1", f"compiler.dump_dir={tmp_path / 'dumps'}")
    files = [file for file in (tmp_path / "dumps").rglob("*") if file.is_file()]
    assert any("prefill" in str(file) for file in files)
    assert any("decode" in str(file) for file in files)


def test_missing_folder(fails, tmp_path):
    message = fails(*at(tmp_path / "none"))
    assert str(tmp_path / "none") in message
    assert "model.load_format=dummy" in message


def test_folder_without_config(fails, broken):
    (broken / "config.json").unlink()
    message = fails(*at(broken))
    assert f"{broken} has no config.json" in message


def test_truncated_safetensors(fails, broken):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = fails(*at(broken))
    assert str(file) in message
    assert "truncated" in message


def test_wrong_shape(fails, broken):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(broken, lambda weights: weights.update({name: torch.zeros(47, 32)}))
    message = fails(*at(broken))
    assert "layers.1.mlp.up_proj.weight" in message
    assert "47" in message
    assert "48" in message


def test_missing_tensor(fails, broken):
    edit_weights(broken, lambda weights: weights.pop("model.layers.3.self_attn.k_norm.weight"))
    message = fails(*at(broken))
    assert "missing" in message
    assert "k_norm.weight" in message


def test_extra_tensor(fails, broken):
    edit_weights(broken, lambda weights: weights.update({"model.extra.weight": torch.zeros(2)}))
    message = fails(*at(broken))
    assert "unexpected" in message
    assert "extra.weight" in message


def test_config_of_another_architecture(fails, broken):
    config = json.loads((broken / "config.json").read_text())
    config.update(model_type="llama", architectures=["LlamaForCausalLM"])
    (broken / "config.json").write_text(json.dumps(config))
    message = fails(*at(broken))
    assert "llama" in message
    assert "qwen3_5" in message


def test_empty_prompt(fails):
    assert "prompt is empty" in fails("+model=tiny", "prompt=")


def test_prompt_beyond_max_model_len(fails):
    message = fails("+model=tiny", "prompt=one two three four five", "runtime.max_model_len=4")
    assert "max_model_len" in message
    assert "4" in message


def test_token_id_beyond_the_vocabulary(fails, checkpoint):
    message = fails(*at(checkpoint)[:-1], "prompt=[5,64]")
    assert "64" in message


def test_negative_temperature(fails):
    assert "sampling.temperature=-1" in fails("+model=tiny", "sampling.temperature=-1")


def test_unknown_pass_names(fails):
    for option in ("compiler.disable=[fuse_all]", "compiler.stop_after=fuse_all"):
        message = fails("+model=tiny", option)
        assert "fuse_all" in message
        assert "lower_mixers" in message


def test_unknown_implementation(fails):
    message = fails("+model=tiny", "+compiler.implementations.nope=x")
    assert "nope" in message


@pytest.mark.parametrize("argument", ["+model=nope", "runtime.nope=1", "+nope=1"])
def test_wrong_names_end_the_process_with_a_message(tmp_path, argument):
    arguments = [argument] if argument.startswith("+model") else ["+model=tiny", argument]
    done = command(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "nope" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(fails):
    assert "runtime.device" in fails("+model=tiny", "runtime.device=cuda")
