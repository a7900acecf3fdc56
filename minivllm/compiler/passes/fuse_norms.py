"""fuse_norms: the arithmetic of a norm becomes one op.

    %x32 = to(%x, float32)                       %y = rms_norm(%x, %w, eps, 1.0, False)
    %p = pow(%x32, 2)
    %m = mean(%p, [-1], True)
    %a = add(%m, eps)                      ->
    %r = rsqrt(%a)
    %n = mul(%x32, %r)
    %w1 = add(to(%w, float32), 1.0)
    %y = to(mul(%n, %w1), bfloat16)

Three places of the weight are known: `1 + w` in float32 (Qwen3.5, Gemma), `w` in float32, and
`w` behind the cast (Llama). A gated norm (`w` behind the cast, times `silu(gate)`) contains the
last of them, so it is looked for first. torch's own `rms_norm` is the second of them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import GraphPass, PassContext, shape_of
from minivllm.compiler.pattern import Match, Pattern, find
from minivllm.model.miniqwen import GatedRMSNorm, RMSNorm
from minivllm.ops import OPS


def one_plus_weight(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Qwen3.5 and Gemma: the model's own."""
    return RMSNorm.forward(SimpleNamespace(weight=w, eps=eps), x)  # type: ignore[arg-type]


def plain_weight(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """The weight is w, applied in float32."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * w.float()).to(x.dtype)


def weight_behind_the_cast(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Llama: normalised, cast, then times w."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return w * x32.to(x.dtype)


def gated(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    """The norm of Gated DeltaNet: the model's own."""
    norm = SimpleNamespace(weight=w, eps=eps)
    return GatedRMSNorm.forward(norm, x, gate)  # type: ignore[arg-type]


# function, offset, cast_first
VARIANTS = (
    (one_plus_weight, 1.0, False),
    (plain_weight, 0.0, False),
    (weight_behind_the_cast, 0.0, True),
)


@functools.cache
def _patterns(dtype: torch.dtype) -> tuple[Pattern, list[tuple[Pattern, float, bool]]]:
    x, w = ((2, 8), dtype), ((8,), dtype)
    norms = [
        (Pattern(function, {"x": x, "w": w}, ("eps",)), offset, cast_first)
        for function, offset, cast_first in VARIANTS
    ]
    return Pattern(gated, {"x": x, "gate": x, "w": w}, ("eps",)), norms


class FuseNorms(GraphPass):
    """Fold every RMSNorm and gated RMSNorm into an op."""

    name = "fuse_norms"

    def expected(self, phase: str, context: PassContext) -> list[str]:
        config = context.config
        layers = [f"layers.{i}" for i in range(config.num_hidden_layers)]
        norms = [f"{p}.{n}_layernorm" for p in layers for n in ("input", "post_attention")]
        heads = [f"layers.{i}.mixer.{n}_norm" for i in config.attention_layers for n in "qk"]
        gates = [f"layers.{i}.mixer.norm" for i in config.linear_layers]
        return [*norms, *heads, *gates, "norm"]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return [site for dtype in graph.dtypes for site in self._fuse(graph, dtype, context)]

    def _fuse(self, graph: Graph, dtype: torch.dtype, context: PassContext) -> list[str]:
        gated_norm, norms = _patterns(dtype)
        sites = _respell_torch_norms(graph, dtype, context.misses)
        for m in find(graph, gated_norm, context.misses):
            if not _is_weight(graph, m, context.misses):
                continue
            if shape_of(graph, m["gate"]) != shape_of(graph, m["x"]):
                context.misses.unfit(graph, m, "gate", "a gate of x's shape")
                continue
            new = graph.call(
                OPS["gated_rms_norm"].overload, m["x"], m["gate"], m["w"], m["eps"], like=m.node
            )
            sites.append(m.node.meta["module"])
            graph.replace(m.node, new)
        for pattern, offset, cast_first in norms:
            for m in find(graph, pattern, context.misses):
                if not _is_weight(graph, m, context.misses):
                    continue
                arguments = m["x"], m["w"], m["eps"], offset, cast_first
                new = graph.call(OPS["rms_norm"].overload, *arguments, like=m.node)
                sites.append(m.node.meta["module"])
                graph.replace(m.node, new)
        return sites


def _respell_torch_norms(graph: Graph, dtype: torch.dtype, misses: Misses) -> list[str]:
    """torch's own norm (`nn.RMSNorm`) is one call already, but no op of ours can take it along."""
    sites = []
    for node in graph.nodes(torch.ops.aten.rms_norm.default):
        x, sizes, weight, eps = (*node.args, None, None)[:4]
        assert isinstance(x, Node)
        value = x.meta["val"]
        if value.dtype != dtype:
            continue
        fits = isinstance(weight, Node) and weight.meta["val"].dtype == dtype
        if not fits or len(sizes) != 1 or not isinstance(eps, float):  # type: ignore[arg-type]
            reason = "our norm is over one dim, with a weight of x's dtype and an epsilon"
            misses.add(graph, node, "rms_norm(x, [D], weight, eps)", reason=reason)
            continue
        # the weight is applied in float32, and the product rounded
        arguments = x, weight, eps, 0.0, False
        new = graph.call(OPS["rms_norm"].overload, *arguments, like=node)
        sites.append(node.meta["module"])
        graph.replace(node, new)
    return sites


def _is_weight(graph: Graph, m: Match, misses: Misses) -> bool:
    """Whether w is a vector along x's last dim: what is one value a token is no weight."""
    fits = shape_of(graph, m["w"]) == shape_of(graph, m["x"])[-1:]
    if not fits:
        misses.unfit(graph, m, "w", "a weight along x's last dim")
    return fits
