"""transformers' own model over the same weights, as a row of `compile_vs_eager.py`.

Prefill is a forward with a cache; decode is its cached `generate`, timed from the first new token
to the last by a stopping criterion, so that its prefill does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.samples import working_time

if TYPE_CHECKING:
    from bench.contenders import Lengths
    from bench.model import Model

# Where FLA is installed, transformers binds its Triton kernels at import, for the CPU too, where
# they cannot run; the torch code is behind them.
KERNELS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)


class HuggingFaceContender:
    """`Qwen3_5ForCausalLM`; it shares the weights, which it never changes."""

    def __init__(self, model: Model, sizes: Lengths) -> None:
        self.name = "hf"
        self.batches = sizes.batches
        self.device = model.device
        self.shared_bytes = sum(w.nbytes for w in model.weights.values())
        self.model = _transformers_model(model)
        self._ids = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        """With the cache that a generation would go on with."""
        tokens = torch.tensor([list(ids)], device=self.device)
        return self.model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[0, -1]

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """`generate` runs the prompts itself."""
        self._ids = torch.tensor([list(p) for p in prompts], device=self.device)

    def decode(self, batch: int, steps: int) -> float:
        """Seconds between the first and the last of `steps` + 1 tokens."""
        times: list[float] = []

        def clock(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            times.append(working_time(self.device))
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        self.model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            max_new_tokens=steps + 1,
            do_sample=False,
            eos_token_id=-1,  # no id ends it
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        assert len(times) == steps + 1, times
        return (times[-1] - times[0]) / steps

    @torch.inference_mode()
    def forced(self, ids: Sequence[int], continuation: Sequence[int]) -> Tensor:
        """One forward without a cache."""
        tokens = torch.tensor([[*ids, *continuation]], device=self.device)
        keep = len(continuation) + 1
        logits = self.model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits
        return logits[0].float().cpu()


def _transformers_model(model: Model) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5

    if model.device.type == "cpu":
        for name in KERNELS:
            setattr(modeling_qwen3_5, name, inspect.unwrap(getattr(modeling_qwen3_5, name)))
    c = model.config
    config = Qwen3_5TextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        layer_types=list(c.layer_types),
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        attention_bias=c.attention_bias,
        linear_num_key_heads=c.linear_num_key_heads,
        linear_num_value_heads=c.linear_num_value_heads,
        linear_key_head_dim=c.linear_key_head_dim,
        linear_value_head_dim=c.linear_value_head_dim,
        linear_conv_kernel_dim=c.linear_conv_kernel_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.partial_rotary_factor,
        },
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        dtype=model.dtype,
    )
    with torch.device("meta"):
        built = Qwen3_5ForCausalLM(config).eval()
    weights = {_name(n, c.layer_types): w for n, w in model.weights.items() if "inv_freq" not in n}
    for name, weight in weights.items():
        if name.endswith("conv1d.weight"):
            weights[name] = weight[:, None]  # of a depthwise Conv1d
    missing, unexpected = built.load_state_dict(weights, assign=True, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    built.tie_weights()
    rotary = built.model.rotary_emb
    rotary.inv_freq = rotary.original_inv_freq = model.weights["rotary_emb.inv_freq"]
    return built.requires_grad_(False)


def _name(plain: str, layer_types: Sequence[str]) -> str:
    """transformers' name of a parameter of the plain model."""
    parts = plain.split(".")
    if parts[0] == "lm_head":
        return plain
    if parts[0] == "layers" and parts[2] == "mixer":
        full = layer_types[int(parts[1])] == "full_attention"
        parts[2] = "self_attn" if full else "linear_attn"
    return ".".join(["model", *parts])
