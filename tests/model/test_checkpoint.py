"""`load_config` and safetensors files: tied heads, EOS ids, broken folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_checkpoints import (
    TEXT,
    edit_json,
    load,
    save_text,
)
from safetensors.torch import load_file, save_file

from minivllm.errors import UserError
from minivllm.model.checkpoint import INDEX_FILE, stored_tensors
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


def test_disk_decides_whether_the_head_is_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_text(tmp_path / "tied", "20KB", tie_word_embeddings=True)
    edit_json(tmp_path / "tied" / "config.json", tie_word_embeddings=False)
    assert load_config(tmp_path / "tied").tie_word_embeddings is True
    assert "the weights lack an lm_head: the head is tied" in caplog.text
    assert "lm_head.weight" not in load(tmp_path / "tied")

    model = save_text(tmp_path / "untied")
    edit_json(tmp_path / "untied" / "config.json", tie_word_embeddings=True)
    assert load_config(tmp_path / "untied").tie_word_embeddings is False
    assert "the weights have an lm_head: the head is not tied" in caplog.text
    assert torch.equal(load(tmp_path / "untied")["lm_head.weight"], model.lm_head.weight)


def test_config_alone_is_enough_for_dummy_weights(tmp_path: Path) -> None:
    transformers.Qwen3_5TextConfig(**TEXT, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert load_config(tmp_path).tie_word_embeddings is True


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (None, None, ()),
        (3, None, (3,)),
        (None, [7, 5], (7, 5)),
        ([5, 3], 7, (5, 3, 7)),
        (5, [7, 5], (5, 7)),
    ],
)
def test_eos_ids_are_united(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    transformers.Qwen3_5TextConfig(**TEXT, eos_token_id=in_config).save_pretrained(tmp_path)
    if in_generation is not None:
        data = json.dumps({"eos_token_id": in_generation, "temperature": 0.6})
        (tmp_path / "generation_config.json").write_text(data)
    assert load_config(tmp_path).eos_token_ids == expected


def test_index_alone_is_enough_for_dummy_weights(sharded: Path) -> None:
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    assert load_config(sharded).tie_word_embeddings is False
    edit_json(sharded / INDEX_FILE, weight_map={"model.norm.weight": "part.safetensors"})
    assert load_config(sharded).tie_word_embeddings is True


def test_missing_folder(tmp_path: Path) -> None:
    for function in (load_config, stored_tensors):
        with pytest.raises(UserError, match="nope is no folder") as error:
            function(tmp_path / "nope")
        for way in ("model.path=", "hub", "model.load_format=dummy"):
            assert way in str(error.value)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json.*model\.load_format=dummy"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", [b"{not json", b"", b"\xff\xfe\x00", b"[1]"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_none(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"[/\\]{name}.* JSON"):
        load_config(folder)


def test_errors_in_json_name_the_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id='x'"):
        load_config(folder)
    edit_json(folder / "config.json", model_type="llama")
    with pytest.raises(UserError, match=r"[/\\]config\.json: model_type='llama'"):
        load_config(folder)


def test_no_weights(folder: Path) -> None:
    shapes = parameter_shapes(load_config(folder))
    file = folder / "model.safetensors"
    file.rename(folder / "weights.safetensors")
    with pytest.raises(UserError, match=r"has weights\.safetensors, but neither model\.safe"):
        load_weights(folder, shapes, torch.float32, "cpu")
    (folder / "weights.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickles only \(pytorch_model\.bin\).*save_pretrained"):
        load_weights(folder, shapes, torch.float32, "cpu")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"no safetensors weights.*model\.load_format=dummy"):
        load_weights(folder, shapes, torch.float32, "cpu")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(folder: Path, keep: int) -> None:
    shapes = parameter_shapes(load_config(folder))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated, corrupt"):
        load_weights(folder, shapes, torch.float32, "cpu")
    with pytest.raises(UserError, match=r"model\.safetensors is truncated, corrupt"):
        load_config(folder)


def test_corrupt(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match="git lfs pull"):
        load_config(folder)


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"]


def test_index_names_a_missing_shard(sharded: Path) -> None:
    name = index_of(sharded)["model.norm.weight"]
    (sharded / name).unlink()
    with pytest.raises(UserError, match=rf"index\.json names files that the folder lacks: {name}"):
        load(sharded)


def test_index_places_a_tensor_where_it_is_not(sharded: Path) -> None:
    weight_map = index_of(sharded)
    shard = sharded / weight_map["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    with pytest.raises(UserError, match=rf"places model.norm.weight in {shard.name}, which lacks"):
        load(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    weight_map = index_of(sharded)
    first, last = min(weight_map.values()), max(weight_map.values())
    name = next(name for name, file in weight_map.items() if file == first)
    save_file(load_file(sharded / last) | {name: torch.ones(1)}, sharded / last)
    with pytest.raises(UserError, match=rf"{name} is in both {first} and .*{last}"):
        load(sharded)


def test_a_tensor_that_the_index_omits_is_reported(sharded: Path) -> None:
    shard = sharded / max(index_of(sharded).values())
    save_file(load_file(shard) | {"model.extra": torch.ones(1)}, shard)
    with pytest.raises(UserError, match=r"unexpected \(1\): model\.extra"):
        load(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [1]])
def test_index_without_weight_map(sharded: Path, weight_map: Any) -> None:
    edit_json(sharded / INDEX_FILE, weight_map=weight_map)
    with pytest.raises(UserError, match="has no weight_map"):
        load(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "a.bin", "", 3, ".."])
def test_index_with_a_path_for_a_file_name(sharded: Path, file: Any) -> None:
    edit_json(sharded / INDEX_FILE, weight_map={"model.norm.weight": file})
    with pytest.raises(UserError, match=r"model\.norm\.weight is in .* a \*\.safetensors file is"):
        load(sharded)


def test_index_that_is_no_json(sharded: Path) -> None:
    (sharded / INDEX_FILE).write_text("{")
    with pytest.raises(UserError, match=r"index\.json is no readable JSON"):
        load(sharded)
