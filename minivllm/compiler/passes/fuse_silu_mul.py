"""fuse_silu_mul: the activation of SwiGLU.

%s = silu(%gate)               %y = silu_mul(%gate, %up)
%y = mul(%s, %up)        ->
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.compiler.graph import MODULE, Graph
from minivllm.compiler.passes.base import GraphPass, PassContext, shape_of
from minivllm.compiler.pattern import Pattern, find
from minivllm.ops import OPS


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As in `model.miniqwen.MLP`."""
    return F.silu(gate) * up


@functools.cache
def _pattern(dtype: torch.dtype) -> Pattern:
    row = ((2, 8), dtype)
    return Pattern(swiglu, {"gate": row, "up": row})


class FuseSiluMul(GraphPass):
    """Fold `silu(gate) * up` into an op."""

    name = "fuse_silu_mul"

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}.mlp" for i in range(context.config.num_hidden_layers)]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return [site for dtype in graph.dtypes for site in self._fuse(graph, dtype, context)]

    def _fuse(self, graph: Graph, dtype: torch.dtype, context: PassContext) -> list[str]:
        sites = []
        for m in find(graph, _pattern(dtype), context.misses):
            gate, up = (shape_of(graph, m[name]) for name in ("gate", "up"))
            any_rank = graph.phase == MODULE
            if gate != up or not (any_rank or len(gate) == 2):
                # a broadcast, or a gated norm's tail by heads
                context.misses.unfit(graph, m, "up", "an up of gate's shape, [tokens, N]")
                continue
            new = graph.call(OPS["silu_mul"].overload, m["gate"], m["up"], like=m.node)
            sites.append(m.node.meta["module"])
            graph.replace(m.node, new)
        return sites
