"""fold_gate: the delta rule takes the raw projections.

    %q1 = l2_normalize(%q)   (six nodes)         %o = fused_gated_delta_rule(%q, %k, %v, %a, %b,
    %k1 = l2_normalize(%k)   (six nodes)                                     %A_log, %dt_bias)
    %beta = sigmoid(%b)                    ->
    %g = mul(neg(exp(to(%A_log, float32))),
             softplus(add(to(%a, float32), %dt_bias)))
    %o = gated_delta_rule(%q1, %k1, %v, %g, %beta)

The op is still opaque and stateless here; lower_mixers gives it its state.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pattern import Pattern, find
from minivllm.model.miniqwen import l2_normalize, log_decay
from minivllm.ops import OPS

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias")


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """As in `model.miniqwen.GatedDeltaNet`."""
    return torch.ops.minivllm.gated_delta_rule(
        l2_normalize(q), l2_normalize(k), v, log_decay(a, A_log, dt_bias), b.sigmoid()
    )


@functools.cache
def _pattern(dtype: torch.dtype) -> Pattern:
    heads, gates = ((2, 2, 8), dtype), ((2, 2), dtype)
    shapes = (heads, heads, heads, gates, gates, ((2,), dtype), ((2,), dtype))
    return Pattern(delta_rule, dict(zip(NAMES, shapes, strict=True)))


class FoldGate(GraphPass):
    """Fold decay, write strength and the L2 norms into the delta rule."""

    name = "fold_gate"

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}.mixer" for i in context.config.linear_layers]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        for m in find(graph, _pattern(graph.dtype), context.misses):
            op = OPS["fused_gated_delta_rule"].overload
            new = graph.call(op, *(m[name] for name in NAMES), like=m.node)
            sites.append(m.node.meta["module"])
            graph.replace(m.node, new)
        return sites
