"""fuse_residual_add: the addition to the residual stream and the norm that reads it.

    %sum = add(%x, %branch)                        %both = add_rms_norm(%branch, %x, %w, ...)
    %y = rms_norm(%sum, %w, ...)             ->    %y    = getitem(%both, 0)
    ... %sum is read again further down            %sum  = getitem(%both, 1)

The norm is usually the next layer's first, so this crosses layers; only the embedding's norm has
no addition before it.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext, shape_of
from minivllm.ops import OPS

aten = torch.ops.aten


class FuseResidualAdd(GraphPass):
    """Let each norm behind an addition do the addition."""

    name = "fuse_residual_add"
    after = ("fuse_norms",)

    def expected(self, phase: str, context: PassContext) -> list[str]:
        layers = [f"layers.{i}" for i in range(context.config.num_hidden_layers)]
        norms = [f"{p}.{n}_layernorm" for p in layers for n in ("input", "post_attention")]
        return [*norms[1:], "norm"]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        context.misses.looked_for(OPS["rms_norm"].overload)
        for norm in graph.nodes(OPS["rms_norm"].overload):
            total, *rest = norm.args
            if not isinstance(total, Node) or not _is_sum(graph, total):
                reason = "the norm reads no sum of two tensors of one shape and dtype"
                context.misses.add(graph, norm, "add.Tensor(x, branch)", at=total, reason=reason)
                continue
            if not isinstance(rest[0], Node) or rest[0].op != "get_attr":
                reason = "the weight is computed, maybe behind the addition"
                context.misses.add(graph, norm, "a weight", at=rest[0], reason=reason)
                continue
            x, residual = total.all_input_nodes
            both = graph.call(OPS["add_rms_norm"].overload, residual, x, *rest, like=total)
            both.meta |= {"module": norm.meta["module"], "source": norm.meta["source"]}
            normed = graph.call(operator.getitem, both, 0, like=total)
            stream = graph.call(operator.getitem, both, 1, like=total)
            sites.append(norm.meta["module"])
            graph.replace(total, stream)
            graph.replace(norm, normed)
        return sites


def _is_sum(graph: Graph, node: Node) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    value, shape = node.meta["val"], shape_of(graph, node)
    return all(
        n.meta["val"].dtype == value.dtype and shape_of(graph, n) == shape
        for n in node.all_input_nodes
    )
