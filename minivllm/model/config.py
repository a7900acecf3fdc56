"""The architecture of a MiniQwen (Qwen3.5's dense text model) as one frozen dataclass.

Owns the sizes, the sizes derived from them and the rules they must obey. Reading a Hugging Face
`config.json` is `hf_config`'s; reading files is `weights`'.

    config = MiniQwenConfig.from_hf(json.loads(text)); config.conv_dim
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import UserError
from minivllm.model.hf_config import fields_from_hf

LAYER_TYPES = ("linear_attention", "full_attention")
DTYPES = ("float32", "bfloat16", "float16")

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class MiniQwenConfig:
    """Architecture of one model; head dims and sizes count elements, ids count from 0.

    `layer_types` has one of `LAYER_TYPES` per layer. `rope_theta` is the rotary base,
    `partial_rotary_factor` the share of `head_dim` that rotates. `dtype` is the checkpoint's,
    `mamba_ssm_dtype` the one it asks for the recurrent state; both are None where it does not
    say. `eos_token_ids` are all ids that end a text.

    Raises UserError for sizes that are not positive integers or do not divide one another.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    max_position_embeddings: int
    mamba_ssm_dtype: str | None = None
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> MiniQwenConfig:
        """The architecture a Hugging Face `config.json` describes, text-only or composite.

        Whatever is absent takes transformers' default. Raises UserError for an architecture or an
        option that MiniQwen does not have, and for values of a wrong type or range.
        """
        return cls(**fields_from_hf(data))

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name}={value!r}: a positive integer is expected")
        for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                raise UserError(f"{name}={value!r}: a positive number is expected")
        for name in ("tie_word_embeddings", "attention_bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UserError(f"{name}={value!r}: true or false is expected")
        for name in ("mamba_ssm_dtype", "dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise UserError(f"{name}={value!r} is not supported; choices: {', '.join(DTYPES)}")
        self._check_layers()
        self._check_heads()

    def _check_layers(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"layer_types has {len(self.layer_types)} entries, "
                f"but num_hidden_layers={self.num_hidden_layers}"
            )
        for index, layer_type in enumerate(self.layer_types):
            if layer_type not in LAYER_TYPES:
                raise UserError(
                    f"layer_types[{index}]={layer_type!r} is not supported; "
                    f"choices: {', '.join(LAYER_TYPES)}"
                )

    def _check_heads(self) -> None:
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise UserError(
                    f"{many}={getattr(self, many)} is not a multiple of {few}={getattr(self, few)}"
                )
        if self.linear_conv_kernel_dim < 2:
            raise UserError("linear_conv_kernel_dim=1: a causal convolution needs 2 taps or more")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim} with partial_rotary_factor={self.partial_rotary_factor} "
                f"rotates {self.rotary_dim} dims; an even number from 2 to head_dim is expected"
            )

    @property
    def rotary_dim(self) -> int:
        """Leading dims of an attention head that rotate; even."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Width of the queries, and of the keys, of all heads of a linear attention layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of the values of all heads of a linear attention layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the linear attention (Gated DeltaNet) layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")
