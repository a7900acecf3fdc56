"""MiniQwen: the dense Qwen3.5 text model, written for one sequence.

Owns the mathematics of the model and nothing else: no batch dimension, no cache, no state, no
fused weight. Only three operations mix tokens (causal convolution, gated delta rule, attention);
they are named ops of `minivllm.ops`, everything else acts on each token by itself. That is why
one trace of this file can become a batched, paged, stateful program: the compiler's passes
replace the three ops and need not look at the rest.

    logits = MiniQwen(config)(input_ids, positions)

Shapes: T tokens, D hidden size, H query heads, HK key/value heads, HV value heads of the delta
rule, K/V its head dims, vocab the head's rows. Parameters have the names and, but for the
convolution (`[C, W]` here), the shapes of the checkpoint, with `self_attn` and `linear_attn`
both called `mixer`. The published definition is transformers' `Qwen3_5ForCausalLM`, which the
tests compare with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minivllm.ops  # noqa: F401  (registers torch.ops.minivllm)
from minivllm.model.config import MiniQwenConfig

ops = torch.ops.minivllm


class RMSNorm(nn.Module):
    """`x / rms(x) * (1 + weight)` over the last dim, in float32, cast last."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """`x / rms(x) * weight * silu(gate)` over the last dim; the weight is plain, not 1 + w.

    The normalised x is cast before the weight is applied, and the gate is applied in float32.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * x32.to(x.dtype)
        return (y * F.silu(gate.float())).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: MiniQwenConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dim, in float32, cast last."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`-exp(A_log) * softplus(a + dt_bias)`, the logarithm of a head's decay, in float32."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias)


class CausalConv1d(nn.Module):
    """Causal depthwise convolution of `taps` inputs and SiLU."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))

    def forward(self, x: Tensor) -> Tensor:
        return ops.causal_conv1d(x, self.weight)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, with a short convolution before it."""

    def __init__(self, config: MiniQwenConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        self.in_proj_qkv = nn.Linear(size, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(size, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(size, heads, bias=False)
        self.in_proj_a = nn.Linear(size, heads, bias=False)
        self.conv1d = CausalConv1d(config.conv_dim, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.conv1d(self.in_proj_qkv(x))
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q = l2_normalize(q.unflatten(-1, (-1, self.key_head_dim)))
        k = l2_normalize(k.unflatten(-1, (-1, self.key_head_dim)))
        v = v.unflatten(-1, (-1, self.value_head_dim))
        beta = self.in_proj_b(x).sigmoid()
        g = log_decay(self.in_proj_a(x), self.A_log, self.dt_bias)
        o = ops.gated_delta_rule(q, k, v, g, beta)
        z = self.in_proj_z(x).unflatten(-1, (-1, self.value_head_dim))
        return self.out_proj(self.norm(o, z).flatten(-2))


class RotaryEmbedding(nn.Module):
    """cos and sin of the rotary angles, `[T, 1, rotary_dim]`, from `inv_freq` (always float32)."""

    inv_freq: Tensor

    def __init__(self, config: MiniQwenConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None, None] * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def inv_freq(config: MiniQwenConfig) -> Tensor:
    """`theta ** (-2i / rotary_dim)`, `[rotary_dim / 2]`, float32."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    return 1.0 / (config.rope_theta**exponent)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary_dim` of each head, half against half; the rest passes.

    x is `[T, H, D]`, cos and sin are `[T, 1, rotary_dim]`.
    """
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    turned = turned * cos + rotated * sin
    return torch.cat([turned, passed], dim=-1)


class GatedAttention(nn.Module):
    """Grouped-query attention with per-head q/k RMSNorm, partial rotary and an output gate.

    `q_proj` yields, head by head, the query and then the gate.
    """

    def __init__(self, config: MiniQwenConfig) -> None:
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(size, 2 * config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, size, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_rotary(self.q_norm(q), cos, sin)
        k = apply_rotary(self.k_norm(k), cos, sin)
        o = ops.attention(q, k, v, self.head_dim**-0.5)
        return self.o_proj((o * gate.sigmoid()).flatten(-2))


class DecoderLayer(nn.Module):
    """A token mixer and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: MiniQwenConfig, index: int) -> None:
        super().__init__()
        self.is_linear = config.layer_types[index] == "linear_attention"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = GatedDeltaNet(config) if self.is_linear else GatedAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        x = x + (self.mixer(h) if self.is_linear else self.mixer(h, cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))


class MiniQwen(nn.Module):
    """The whole model: token ids and positions of one sequence to logits at every position."""

    def __init__(self, config: MiniQwenConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits at every position.

        Args:
            input_ids: `[T]`, int64.
            positions: `[T]`, int64.

        Returns:
            `[T, vocab]` in the parameters' dtype.
        """
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.norm(x), head.weight)


def constants(config: MiniQwenConfig) -> dict[str, Tensor]:
    """The buffers of the model that no checkpoint holds, by state_dict name, on the CPU."""
    return {"rotary_emb.inv_freq": inv_freq(config)}
