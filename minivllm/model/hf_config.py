"""Reading a Hugging Face `config.json` of the Qwen3.5 dense family.

Owns where each value is written, in old and new files, and transformers' defaults for what is
absent. Owns no file access and no check of sizes: `MiniQwenConfig` has those.

    fields = fields_from_hf(json.loads(text)); MiniQwenConfig(**fields)

A composite (vision and text) file keeps the text model under `text_config`. A *section* below is
that dictionary, or the root; the text model's own section is asked first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import UserError

Section = Mapping[str, Any]

MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")

# transformers' Qwen3_5TextConfig; RotaryEmbeddingConfigMixin.default_theta
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 32768,
}
_FULL_ATTENTION_INTERVAL = 4
_ROPE_THETA = 10000.0
_PARTIAL_ROTARY_FACTOR = 0.25

# Keys of a rope dictionary that are read, or (mrope_*) change nothing for text, whose three
# position components are equal. Any other key asks for another rope.
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def fields_from_hf(data: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `MiniQwenConfig` from the contents of a `config.json`.

    Raises UserError, naming the value and what is supported, for another architecture, an option
    that MiniQwen does not have, and a section of a wrong type.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"a JSON object is expected, not {data!r:.80}")
    text = _section(data, "text_config")
    sections = (data,) if text is None else (text, data)
    _check_supported(data, sections)
    text = sections[0]
    fields = {key: text.get(key, default) for key, default in _DEFAULTS.items()}
    tied = _first((data, text), "tie_word_embeddings")  # a composite's own flag is at the root
    theta = _first_rope(sections, "rope_theta")
    factor = _first_rope(sections, "partial_rotary_factor")
    fields.update(
        layer_types=_layer_types(text, fields["num_hidden_layers"]),
        rope_theta=_ROPE_THETA if theta is None else theta,
        partial_rotary_factor=_PARTIAL_ROTARY_FACTOR if factor is None else factor,
        tie_word_embeddings=False if tied is None else tied,
        mamba_ssm_dtype=_first(sections, "mamba_ssm_dtype"),
        dtype=_first(sections, "dtype", "torch_dtype"),
        eos_token_ids=eos_token_ids(*sections),
    )
    return fields


def eos_token_ids(*sections: Section) -> tuple[int, ...]:
    """All ids under `eos_token_id` (an integer, a list or null), each once, in order."""
    found: dict[int, None] = {}
    for section in sections:
        value = section.get("eos_token_id")
        ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        for token_id in ids:
            if type(token_id) is not int or token_id < 0:
                raise UserError(
                    f"eos_token_id={value!r}: an integer of 0 or more, or a list, is expected"
                )
            found[token_id] = None
    return tuple(found)


def _check_supported(root: Section, sections: Sequence[Section]) -> None:
    model_type = root.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"model_type={model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)} "
            "(Qwen3.5's dense models)"
        )
    nested_type = sections[0].get("model_type", "qwen3_5_text")
    if len(sections) > 1 and nested_type != "qwen3_5_text":
        raise UserError(
            f"text_config.model_type={nested_type!r} is not supported; supported: qwen3_5_text"
        )
    architectures = root.get("architectures")
    if architectures is not None and (
        not isinstance(architectures, list | tuple)
        or not any(name in ARCHITECTURES for name in architectures)
    ):
        raise UserError(
            f"architectures={architectures!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    text = sections[0]
    for key, supported in (("hidden_act", "silu"), ("attn_output_gate", True)):
        if text.get(key, supported) != supported:
            raise UserError(f"{key}={text[key]!r} is not supported; supported: {supported!r}")
    for section in sections:
        for key in ("quantization_config", "per_layer_config"):
            if section.get(key) is not None:
                raise UserError(
                    f"{key}={section[key]!r:.80} is not supported; supported: models without it"
                )
        for rope in _rope_dicts(section):
            _check_rope(rope)


def _check_rope(rope: Section) -> None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UserError(f"rope_type={rope_type!r} is not supported; supported: 'default'")
    known = _ROPE_KEYS + _MROPE_KEYS
    for key in rope:
        if key not in known:
            raise UserError(
                f"rope parameter {key}={rope[key]!r} is not supported; supported: "
                f"{', '.join(known)}"
            )


def _layer_types(text: Section, num_hidden_layers: Any) -> tuple[str, ...]:
    layer_types = text.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list | tuple):
            raise UserError(f"layer_types={layer_types!r}: a list is expected")
        return tuple(layer_types)
    interval = text.get("full_attention_interval", _FULL_ATTENTION_INTERVAL)
    if type(interval) is not int or interval < 1:
        raise UserError(f"full_attention_interval={interval!r}: a positive integer is expected")
    if type(num_hidden_layers) is not int:
        raise UserError(f"num_hidden_layers={num_hidden_layers!r}: a positive integer is expected")
    return tuple(
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(num_hidden_layers)
    )


def _section(section: Section, key: str) -> Section | None:
    """The dictionary under `key`; None if absent or null."""
    value = section.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{key}={value!r:.80}: a JSON object is expected")
    return value


def _first(sections: Sequence[Section], *keys: str) -> Any:
    """The first value that is neither absent nor null, section by section, then key by key."""
    for section in sections:
        for key in keys:
            if section.get(key) is not None:
                return section[key]
    return None


def _rope_dicts(section: Section) -> list[Section]:
    """The rope dictionaries of a section that hold anything.

    `rope_scaling` (the old name) comes first, since in transformers it replaces
    `rope_parameters` where a file has both.
    """
    ropes = (_section(section, key) for key in ("rope_scaling", "rope_parameters"))
    return [rope for rope in ropes if rope]


def _first_rope(sections: Sequence[Section], key: str) -> Any:
    """A rope value from wherever it is written, or None.

    Within a section the order is transformers': the rope dictionary that counts, then the section
    itself ("flat"), then the dictionary that transformers would drop.
    """
    for section in sections:
        ropes = _rope_dicts(section)
        value = _first((*ropes[:1], section, *ropes[1:]), key)
        if value is not None:
            return value
    return None
