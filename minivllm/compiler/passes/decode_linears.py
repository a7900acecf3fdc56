"""decode_linears: what is left of a decode step's linears gets the op for few rows.

%y = linear(%x, %w)            %y = minivllm.linear(%x, %w)
                         ->

The op's kernels are for few rows and know no bias; a linear with one stays as it is.
"""

from __future__ import annotations

import torch

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.passes.fuse_linear_epilogues import FuseLinearEpilogues
from minivllm.ops import OPS

aten = torch.ops.aten


class DecodeLinears(GraphPass):
    """Replace linears without bias by the op for few rows."""

    name = "decode_linears"
    phases = ("decode",)
    after = (*FuseLinearEpilogues.after, "fuse_linear_epilogues")

    def expected(self, phase: str, context: PassContext) -> list[str]:
        if phase not in self.phases:
            return []
        config = context.config
        attention = () if config.attention_bias else config.attention_layers
        return [*(f"layers.{i}.mixer" for i in (*config.linear_layers, *attention)), "head"]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        context.misses.looked_for(aten.linear.default)
        for node in graph.nodes(aten.linear.default):
            value = node.meta["val"]
            site = "head" if node is graph.output else node.meta["module"]
            if len(node.args) != 2 or node.kwargs or value.ndim != 2:
                reason = "the kernels for few rows know no bias and two dims only"
                wanted = "linear(x, w) without bias, [tokens, N]"
                context.misses.add(graph, node, wanted, reason=reason, site=site)
                continue
            new = graph.call(OPS["linear"].overload, *node.args, like=node)
            sites.append(site)
            node.replace_all_uses_with(new)
            graph.fx.erase_node(node)
        return sites
