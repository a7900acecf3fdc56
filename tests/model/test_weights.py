"""`load_weights`: equality with transformers, names that do not fit, memory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_checkpoints import (
    assert_same,
    edit_json,
    edit_tensors,
    expected_weights,
    load,
    save_composite,
    save_text,
)
from safetensors.torch import save_file
from torch import Tensor

from minivllm.errors import UserError
from minivllm.model import checkpoint, weights
from minivllm.model.checkpoint import INDEX_FILE
from minivllm.model.miniqwen import MiniQwen
from minivllm.model.weights import (
    load_config,
    load_weights,
    parameter_shapes,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An untied text-only checkpoint in one file."""
    save_text(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_text(tmp_path, "20KB")
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_equals_transformers(tmp_path: Path, tied: bool, shard: str) -> None:
    model = save_text(tmp_path, shard, tie_word_embeddings=tied)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard == "20KB")
    loaded = load(tmp_path)
    assert_same(loaded, expected_weights(model))
    assert ("lm_head.weight" in loaded) is not tied
    again = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded, expected_weights(again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_equals_transformers(folder: Path, dtype: torch.dtype) -> None:
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype)
    assert_same(load(folder, dtype), expected_weights(model))


def test_attention_bias_and_odd_sizes(tmp_path: Path) -> None:
    model = save_text(
        tmp_path,
        attention_bias=True,
        hidden_size=23,
        intermediate_size=37,
        num_hidden_layers=3,
        full_attention_interval=2,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=5,
        linear_value_head_dim=7,
        linear_conv_kernel_dim=3,
    )
    loaded = load(tmp_path)
    assert_same(loaded, expected_weights(model))
    assert loaded["layers.1.mixer.q_proj.bias"].shape == (2 * 4 * 16,)
    assert loaded["layers.0.mixer.conv1d.weight"].shape == (2 * 5 + 3 * 7, 3)


@pytest.mark.parametrize("tied", [False, True])
def test_composite(tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = save_composite(tmp_path, tied)
    if tied:  # as the published files have it: the flag stands at the root only
        nested = json.loads((tmp_path / "config.json").read_text())["text_config"]
        del nested["tie_word_embeddings"]
        edit_json(tmp_path / "config.json", text_config=nested)
    edit_tensors(tmp_path, {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.x": torch.ones(1)})
    with caplog.at_level(logging.INFO, logger="minivllm"):
        loaded = load(tmp_path)
    assert_same(loaded, expected_weights(model))
    assert ("lm_head.weight" in loaded) is not tied
    vision = sum(".visual." in name for name, _ in model.named_parameters())
    assert [record.getMessage() for record in caplog.records] == [
        f"skipped weights that a text model leaves out: {vision} vision, 2 MTP"
    ]


def test_visual_and_mtp_at_other_roots_are_skipped(folder: Path) -> None:
    before = load(folder)
    extra = {name: torch.ones(1) for name in ("visual.a.weight", "model.visual.b", "model.mtp.c")}
    edit_tensors(folder, extra)
    assert_same(load(folder), before)


def test_parameters_are_those_of_the_plain_model(folder: Path) -> None:
    config = load_config(folder)
    with torch.device("meta"):
        state = MiniQwen(config).state_dict()
    assert list(parameter_shapes(config).items()) == [(k, tuple(v.shape)) for k, v in state.items()]
    assert list(load(folder)) == list(state)


def test_all_misfits_are_listed_together(folder: Path) -> None:
    edit_tensors(
        folder,
        drop=("model.norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        add={
            "model.layers.0.mtp_extra.weight": torch.ones(1),
            "model.visualizer.weight": torch.ones(1),
            "mtp_head.weight": torch.ones(1),
            "model.lm_head.weight": torch.ones(1),
            "model.layers.0.mixer.A_log": torch.ones(4),
            "model.layers.3.linear_attn.q_proj.weight": torch.ones(1),
            "model.layers.0.linear_attn.conv1d.weight": torch.ones(80, 4),
            "model.embed_tokens.weight": torch.ones(60, 32),
            "model.layers.0.linear_attn.A_log": torch.ones(4, dtype=torch.int8),
        },
    )
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(error.value).splitlines() == [
        f"the weights in {folder} do not fit its config:",
        "  missing (2): model.layers.3.self_attn.q_norm.weight, model.norm.weight",
        "  unexpected (6): model.layers.0.mixer.A_log, model.layers.0.mtp_extra.weight, "
        "model.layers.3.linear_attn.q_proj.weight, model.lm_head.weight, "
        "model.visualizer.weight, mtp_head.weight",
        "  wrong shape (2): model.embed_tokens.weight [60, 32] instead of [61, 32], "
        "model.layers.0.linear_attn.conv1d.weight [80, 4] instead of [80, 1, 4]",
        "  dtype not supported (choices: F64, F32, F16, BF16) (1): "
        "model.layers.0.linear_attn.A_log I8",
    ]


def test_long_lists_are_abbreviated_with_a_count(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=5, layer_types=["linear_attention"] * 5)
    with pytest.raises(UserError) as error:
        load(folder)
    missing, unexpected = str(error.value).splitlines()[1:]
    # layer 3 has another mixer (9 parameters), layer 4 has none of its 14
    assert missing.startswith("  missing (23): ") and missing.endswith(", … and 13 more")
    assert missing.count("model.layers.") == 10
    assert unexpected.startswith("  unexpected (6): ") and "more" not in unexpected


def test_layouts_are_not_mixed(folder: Path) -> None:
    edit_tensors(folder, {"model.language_model.norm.weight": torch.ones(32)})
    with pytest.raises(UserError, match=r"missing \(\d+\): model.language_model.embed_tokens"):
        load(folder)


def test_one_stored_tensor_is_alive_at_a_time(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    open_files: list[Path] = []
    read = 0
    real_open = checkpoint.open_safetensors

    class Watched:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def get_tensor(self, name: str) -> Tensor:
            nonlocal read
            assert not alive, "the tensor before this one is still held"
            tensor = self.handle.get_tensor(name)
            alive.add(tensor)
            read += 1
            return tensor

    @contextmanager
    def watched_open(file: Path) -> Iterator[Watched]:
        open_files.append(file)
        assert len(open_files) == 1
        with real_open(file) as handle:
            yield Watched(handle)
        open_files.remove(file)

    monkeypatch.setattr(weights, "open_safetensors", watched_open)
    loaded = load(sharded)
    assert read == len(loaded) and not alive and not open_files


PEAK = """
import sys
from pathlib import Path
import torch
from minivllm.model.weights import load_weights
def kib(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0])
shapes = {f"layers.{i}.mlp.up_proj.weight": (2048, 2048) for i in range(8)}
before = kib("VmRSS")
loaded = load_weights(Path(sys.argv[1]), shapes, torch.float32, "cpu", progress=False)
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file() or "VmHWM" not in Path("/proc/self/status").read_text(),
    reason="the peak of a process is read from Linux's /proc",
)
def test_peak_memory_is_weights_plus_one_shard(tmp_path: Path) -> None:
    weight_map = {}
    for i in range(8):
        name, file = f"model.layers.{i}.mlp.up_proj.weight", f"part{i}.safetensors"
        save_file({name: torch.full((2048, 2048), float(i))}, tmp_path / file)
        weight_map[name] = file
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(weights.__file__).parents[2],
    )
    shard = 2048 * 2048 * 4 // 1024  # KiB
    assert 8 * shard * 0.9 < int(result.stdout) < 9 * shard + shard // 2


def test_loaded_weights_do_not_depend_on_the_files(folder: Path) -> None:
    loaded = load(folder)
    before = {name: value.clone() for name, value in loaded.items()}
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    assert_same(loaded, before)
    pointers = [value.untyped_storage().data_ptr() for value in loaded.values()]
    assert len(set(pointers)) == len(loaded)


def test_progress_is_shown_on_a_terminal_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = parameter_shapes(load_config(folder))
    for terminal, progress, shown in [
        (True, True, True),
        (True, False, False),
        (False, True, False),
    ]:
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        load_weights(folder, shapes, torch.float32, "cpu", progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("weights: 100%" in err) is shown
