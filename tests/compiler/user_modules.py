"""Modules as users bring them: transformers' own classes, small and random, and some by hand.

model = qwen3(layers=2); reference = copy.deepcopy(model)
assert relative_error(compiled(ids), reference(ids)) < 1e-5
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,  # rows of the merged weight are padded in bfloat16
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FAMILIES = ("qwen3", "llama")


def qwen3(layers: int = 2, **changes: Any) -> nn.Module:
    """With a norm in each head of q and k."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **(SIZES | changes))).eval()


def llama(layers: int = 2, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **(SIZES | changes))).eval()


def causal_lm(family: str, layers: int = 2, **changes: Any) -> nn.Module:
    return {"qwen3": qwen3, "llama": llama}[family](layers, **changes)


def sites(family: str, layers: int) -> dict[str, int]:
    """What each pass must find in a model of a family; canonicalize depends on torch."""
    norms = 2 * layers + 1
    heads = 2 * layers if family == "qwen3" else 0
    return {
        "fuse_norms": norms + heads,
        "fuse_residual_add": norms - 1,  # the embedding's norm has no addition before it
        "merge_linears": 2 * layers,
        "fuse_silu_mul": layers,
        "fuse_output_gate": 0,
        "flatten_rows": norms + heads + layers,
        "fit_views": 0,
    }


def token_ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value expected."""
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).abs().max() / expected.abs().max())


class SwiGLU(nn.Module):
    """With norms of torch's own, weights of its own, and regions that switch modes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-5)
        self.gate = nn.Parameter(torch.randn(12, 8))
        self.up = nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.norm(x)
        with torch.autocast("cpu", enabled=False):
            x = x * 1.5
        return F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)


class Projections(nn.Module):
    """Two linears of one input, the second of which is viewed in a way that wants its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 6)
        self.b = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.a(x), {"flat": self.b(x).view(-1)}


class Vectors(nn.Module):
    """Linears that cannot share a matrix: their weights are vectors, or one bias broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.one, self.eight = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        dots = F.linear(x, self.a) + F.linear(x, self.b)
        return F.linear(x, self.c, self.one) + F.linear(x, self.d, self.eight) * dots[..., None]


class Apply(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
