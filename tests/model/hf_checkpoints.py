"""Tiny checkpoints that transformers writes, and what should be loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm.model.weights import (
    load_config,
    load_weights,
    parameter_shapes,
)

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def randomize(model: Any) -> Any:
    """Values that differ in every parameter, where transformers would leave ones and zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def save_text(folder: Path, shard: str = "1GB", **changes: Any) -> Any:
    config = transformers.Qwen3_5TextConfig(**{**TEXT, **changes})
    model = randomize(transformers.Qwen3_5ForCausalLM(config))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def save_composite(folder: Path, tied: bool = True) -> Any:
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, "tie_word_embeddings": tied},
        vision_config=VISION,
        tie_word_embeddings=tied,
    )
    model = randomize(transformers.Qwen3_5ForConditionalGeneration(config))
    model.save_pretrained(folder)
    return model


def expected_weights(model: Any) -> dict[str, Tensor]:
    """The text parameters of a transformers model under MiniQwen's names."""
    plain = {}
    for name, value in model.named_parameters():  # a tied head is named once
        if ".visual." in name:
            continue
        name = name.removeprefix("model.").removeprefix("language_model.")
        name = name.replace(".linear_attn.", ".mixer.").replace(".self_attn.", ".mixer.")
        plain[name] = (
            value.detach().squeeze(1) if name.endswith("conv1d.weight") else value.detach()
        )
    return plain


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(folder, parameter_shapes(load_config(folder)), dtype, "cpu", progress=False)


def assert_same(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, add: dict[str, Tensor], drop: tuple[str, ...] = ()) -> None:
    file = folder / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if name not in drop}
    save_file(tensors | add, file)
