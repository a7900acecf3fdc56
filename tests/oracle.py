"""The oracle of the tests: transformers' own `Qwen3_5ForCausalLM`, with random weights.

model = random_model(vocab_size=97); save(model, folder)
logits = all_logits(model, [1, 2, 3]); tokens = greedy(model, [1, 2, 3], 64)
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

# Where FLA is installed, transformers binds its Triton kernels at import, for the CPU too, where
# they cannot run; the oracle is the torch code behind them.
for _name in (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
):
    setattr(modeling_qwen3_5, _name, inspect.unwrap(getattr(modeling_qwen3_5, _name)))

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.25,
    },
}


def random_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Qwen3_5ForCausalLM:
    """A model of `SMALL`'s shape, but for `changes`, in which every parameter matters.

    transformers initialises norm weights and dt_bias to constants, so that a wrong use of them
    would not show; here they are random, and attention and gates are far from uniform.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(SMALL | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise.mul(0.7))
            elif name.endswith("dt_bias"):
                parameter.copy_(noise.sub(2.0))
            elif "norm" in name:
                parameter.add_(noise.mul(0.2))
            elif parameter.ndim > 1 and "conv1d" not in name:
                parameter.copy_(noise.mul(parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(noise.mul(0.5))
        model.tie_weights()
    return model.to(dtype)


def with_tiny_keys(model: Qwen3_5ForCausalLM) -> Qwen3_5ForCausalLM:
    """Shrink queries and keys of the delta rule until the L2 norm's epsilon matters."""
    keys = 2 * model.config.linear_num_key_heads * model.config.linear_key_head_dim
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter[:keys].mul_(3e-4)
    return model


def save(model: Qwen3_5ForCausalLM, folder: Path) -> Path:
    """Save in transformers' own layout."""
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def all_logits(model: Qwen3_5ForCausalLM, ids: list[int]) -> Tensor:
    """Logits at every position, `[T, vocab]`, float32, from one pass without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def greedy(model: Qwen3_5ForCausalLM, ids: list[int], steps: int) -> list[int]:
    """The next `steps` most probable tokens, through transformers' cached generation."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=-1,  # no id ends it
        pad_token_id=0,
    )
    return output[0, len(ids) :].tolist()


def random_ids(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Token ids below `vocab`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()
