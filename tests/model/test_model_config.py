"""`MiniQwenConfig.from_hf`: every place a value is written, transformers' defaults, bad input."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import transformers

from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


def text(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(TEXT) | changes


def composite(root: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    nested = text(**changes)
    del nested["architectures"]
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": nested,
        "vision_config": {"hidden_act": "gelu", "rope_parameters": {"rope_type": "axial"}},
    } | (root or {})


def test_fields_and_derived_sizes() -> None:
    config = MiniQwenConfig.from_hf(
        text(
            rms_norm_eps=1e-5,
            linear_conv_kernel_dim=3,
            attention_bias=True,
            max_position_embeddings=77,
            mamba_ssm_dtype="float32",
            dtype="bfloat16",
            eos_token_id=[5, 7],
        )
    )
    assert dataclasses.asdict(config) == {
        **{k: v for k, v in TEXT.items() if k not in ("model_type", "architectures")},
        "linear_conv_kernel_dim": 3,
        "layer_types": ("linear_attention",) * 3 + ("full_attention",),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "max_position_embeddings": 77,
        "mamba_ssm_dtype": "float32",
        "dtype": "bfloat16",
        "eos_token_ids": (5, 7),
    }
    assert config.rotary_dim == 4
    assert (config.key_dim, config.value_dim, config.conv_dim) == (16, 48, 80)
    assert config.attention_layers == (3,)
    assert config.linear_layers == (0, 1, 2)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_hidden_layers": 7, "full_attention_interval": 3},
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
        # layer_types wins over the interval
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "full_attention_interval": 4},
        {"rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}, "rope_theta": 7.0},
        {"rope_scaling": {"type": "default", "rope_theta": 9.0}, "rope_theta": 7.0},
        {"rope_scaling": {"type": "default"}, "rope_theta": 7.0, "rope_parameters": {}},
        # rope_scaling replaces rope_parameters, so the flat value counts
        {
            "rope_scaling": {"type": "default"},
            "rope_theta": 7.0,
            "rope_parameters": {"rope_theta": 9.0},
        },
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 9.0}, "rope_theta": 7.0},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"mrope_section": [1, 1, 0], "mrope_interleaved": True}},
    ],
    ids=json.dumps,
)
def test_agrees_with_transformers(given: dict[str, Any]) -> None:
    """The same dictionary, with all else absent, means the same to both."""
    theirs = transformers.Qwen3_5TextConfig(**copy.deepcopy(given))
    ours = MiniQwenConfig.from_hf({"model_type": "qwen3_5_text"} | given)
    same = {field.name for field in dataclasses.fields(ours)} - {
        "layer_types",
        "rope_theta",
        "partial_rotary_factor",
        "eos_token_ids",
        "mamba_ssm_dtype",
    }
    for name in same:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.layer_types) == theirs.layer_types
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.partial_rotary_factor == theirs.rope_parameters["partial_rotary_factor"]
    assert ours.eos_token_ids == () and ours.mamba_ssm_dtype is None


THETA_PLACES = [
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
    {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5e5}},
    {"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5},
    {"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5},
]


@pytest.mark.parametrize("place", THETA_PLACES, ids=json.dumps)
def test_rope_theta_is_found_wherever_it_is_written(place: dict[str, Any]) -> None:
    assert MiniQwenConfig.from_hf(text(**place)).rope_theta == 5e5
    assert MiniQwenConfig.from_hf(composite(**place)).rope_theta == 5e5
    assert MiniQwenConfig.from_hf(composite(place)).rope_theta == 5e5
    # the text model's own section is asked before the root
    assert MiniQwenConfig.from_hf(composite({"rope_theta": 3.0}, **place)).rope_theta == 5e5


def test_rope_theta_falls_back_last() -> None:
    for data in (text(), text(rope_parameters={"rope_type": "default"}), text(rope_theta=None)):
        assert MiniQwenConfig.from_hf(data).rope_theta == 10000.0
    assert MiniQwenConfig.from_hf(composite()).rope_theta == 10000.0


def test_partial_rotary_factor_places() -> None:
    def factor(data: dict[str, Any]) -> float:
        return MiniQwenConfig.from_hf(data).partial_rotary_factor

    inner = {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}
    assert factor(text(partial_rotary_factor=0.5)) == 0.5
    assert factor(text(**inner)) == 0.5
    assert factor(composite(**inner)) == 0.5
    assert factor(composite(inner)) == 0.5
    assert factor(composite({"partial_rotary_factor": 1.0}, **inner)) == 0.5
    assert factor(text()) == factor(composite()) == 0.25
    assert MiniQwenConfig.from_hf(text(**inner)).rotary_dim == 8


@pytest.mark.parametrize(
    ("root", "nested", "tied"),
    [
        (None, None, False),
        (True, None, True),
        (True, False, True),
        (None, True, True),
        (True, True, True),
        (False, None, False),
        (False, False, False),
        (False, True, False),
    ],
)
def test_tie_flag(root: bool | None, nested: bool | None, tied: bool) -> None:
    """The root's flag is the composite model's own; the nested one speaks where it is silent."""
    at_root = {} if root is None else {"tie_word_embeddings": root}
    inside = {} if nested is None else {"tie_word_embeddings": nested}
    assert MiniQwenConfig.from_hf(composite(at_root, **inside)).tie_word_embeddings is tied
    assert MiniQwenConfig.from_hf(text(**at_root)).tie_word_embeddings is bool(root)


def test_dtypes_and_eos_of_both_sections() -> None:
    config = MiniQwenConfig.from_hf(
        composite(
            {"torch_dtype": "float16", "eos_token_id": [3, 1], "mamba_ssm_dtype": "bfloat16"},
            eos_token_id=1,
        )
    )
    assert config.dtype == "float16"
    assert config.mamba_ssm_dtype == "bfloat16"
    assert config.eos_token_ids == (1, 3)
    nested = composite({"dtype": "float32", "mamba_ssm_dtype": "bfloat16"}, dtype="bfloat16")
    nested["text_config"]["mamba_ssm_dtype"] = "float32"
    config = MiniQwenConfig.from_hf(nested)
    assert (config.dtype, config.mamba_ssm_dtype) == ("bfloat16", "float32")


def test_input_is_not_changed() -> None:
    data = composite(rope_parameters={"rope_theta": 9.0})
    before = copy.deepcopy(data)
    MiniQwenConfig.from_hf(data)
    assert data == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "llama"}, ["model_type='llama'", "qwen3_5_text"]),
        ({"model_type": "qwen3_5_moe_text"}, ["qwen3_5_moe_text", "qwen3_5_text, qwen3_5"]),
        ({"model_type": None}, ["model_type=None"]),
        ({"architectures": ["Qwen3_5Model"]}, ["Qwen3_5Model", "Qwen3_5ForCausalLM"]),
        ({"architectures": "Qwen3_5ForCausalLM"}, ["architectures='Qwen3_5ForCausalLM'"]),
        ({"text_config": [1]}, ["text_config=[1]", "object"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"attn_output_gate": False}, ["attn_output_gate=False", "True"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"per_layer_config": {"0": {}}}, ["per_layer_config"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, ["rope_type='yarn'", "'default'"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_type='linear'"]),
        ({"rope_parameters": {"factor": 4.0}}, ["factor=4.0", "rope_theta"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, ["full_attention"]),
        ({"rope_parameters": 3}, ["rope_parameters=3", "object"]),
        ({"rope_theta": "10000"}, ["rope_theta='10000'", "positive number"]),
        ({"rope_theta": float("inf")}, ["rope_theta=inf"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5", "24 dims"]),
        ({"partial_rotary_factor": 0.2}, ["rotates 3 dims", "even"]),
        ({"head_dim": 4, "partial_rotary_factor": 0.1}, ["rotates 0 dims"]),
        ({"layer_types": "full_attention"}, ["layer_types='full_attention'", "list"]),
        ({"layer_types": ["full_attention"]}, ["1 entries", "num_hidden_layers=4"]),
        (
            {"layer_types": ["full_attention", "mamba2"] * 2},
            ["layer_types[1]='mamba2'", "linear_attention, full_attention"],
        ),
        ({"full_attention_interval": 0}, ["full_attention_interval=0"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "positive integer"]),
        ({"num_hidden_layers": "4"}, ["num_hidden_layers='4'"]),
        ({"hidden_size": -1}, ["hidden_size=-1"]),
        ({"hidden_size": 32.0}, ["hidden_size=32.0"]),
        ({"vocab_size": True}, ["vocab_size=True"]),
        ({"head_dim": None}, ["head_dim=None"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"linear_num_key_heads": 3}, ["linear_num_value_heads=4", "linear_num_key_heads=3"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim=1"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "true or false"]),
        ({"attention_bias": 1}, ["attention_bias=1"]),
        ({"dtype": "float64"}, ["dtype='float64'", "float32, bfloat16, float16"]),
        ({"mamba_ssm_dtype": "int8"}, ["mamba_ssm_dtype='int8'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'", "integer"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id=[1, -1]"]),
        ({"eos_token_id": True}, ["eos_token_id=True"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_bad_config_names_value_and_choices(changes: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(UserError) as error:
        MiniQwenConfig.from_hf(text(**changes))
    for part in expected:
        assert part in str(error.value)


def test_bad_composite() -> None:
    with pytest.raises(UserError, match=r"text_config.model_type='qwen3_5_moe_text'"):
        MiniQwenConfig.from_hf(composite(model_type="qwen3_5_moe_text"))
    with pytest.raises(UserError, match="hidden_act='relu'"):
        MiniQwenConfig.from_hf(composite(hidden_act="relu"))
    with pytest.raises(UserError, match="quantization_config"):
        MiniQwenConfig.from_hf(composite({"quantization_config": {"bits": 4}}))
    with pytest.raises(UserError, match="rope_type='yarn'"):
        MiniQwenConfig.from_hf(composite({"rope_scaling": {"rope_type": "yarn"}}))
    with pytest.raises(UserError, match="JSON object"):
        MiniQwenConfig.from_hf(["not", "a", "mapping"])  # type: ignore[arg-type]
