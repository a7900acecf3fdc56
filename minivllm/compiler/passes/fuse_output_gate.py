"""fuse_output_gate: the gate behind attention.

%s = sigmoid(%gate)            %y = sigmoid_mul(%o, %gate)
%y = mul(%o, %s)         ->
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from minivllm.compiler.graph import MODULE, Graph
from minivllm.compiler.passes.base import GraphPass, PassContext, shape_of
from minivllm.compiler.pattern import Pattern, find
from minivllm.ops import OPS


def output_gate(o: Tensor, gate: Tensor) -> Tensor:
    """As in `model.miniqwen.GatedAttention`."""
    return o * gate.sigmoid()


@functools.cache
def _pattern(dtype: torch.dtype) -> Pattern:
    heads = ((2, 2, 8), dtype)
    return Pattern(output_gate, {"o": heads, "gate": heads})


class FuseOutputGate(GraphPass):
    """Fold `o * sigmoid(gate)` into an op."""

    name = "fuse_output_gate"

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}.mixer" for i in context.config.attention_layers]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return [site for dtype in graph.dtypes for site in self._fuse(graph, dtype, context)]

    def _fuse(self, graph: Graph, dtype: torch.dtype, context: PassContext) -> list[str]:
        sites = []
        for m in find(graph, _pattern(dtype), context.misses):
            o, gate = (shape_of(graph, m[name]) for name in ("o", "gate"))
            if o != gate or not (graph.phase == MODULE or len(o) == 3):  # a broadcast
                context.misses.unfit(graph, m, "gate", "a gate of o's shape, [tokens, H, D]")
                continue
            new = graph.call(OPS["sigmoid_mul"].overload, m["o"], m["gate"], like=m.node)
            sites.append(m.node.meta["module"])
            graph.replace(m.node, new)
        return sites
