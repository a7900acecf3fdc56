"""fit_views: a view of what has become columns of a wider row copies them, if it has to.

    %q = linear(%h, q_proj.weight)           %q = getitem(%split, 0)     # strides [W, 1]
    %v = view(%q, [-1])                 ->   %v = reshape(%q, [-1])

Which views fit depends on strides, and merge_linears changes those. In a user's own module only:
MiniQwen's views are known to fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext

aten = torch.ops.aten

COPIES: dict[Any, Any] = {  # what does the same to any strides
    aten.view.default: aten.reshape.default,
    aten.view_as.default: aten.reshape_as.default,
}


class FitViews(GraphPass):
    """Infer again what reads new values, and let views that no longer fit be copies."""

    name = "fit_views"
    mandatory = True

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        moved: set[Node] = set()  # nodes whose strides may be others than when they were traced
        for node in graph.nodes():
            if node.meta["pass"] != "trace":
                moved.add(node)
            elif moved.isdisjoint(node.all_input_nodes):
                continue
            before = _strides(node.meta["val"])
            try:
                node.meta["val"] = graph.infer(node)
            except (RuntimeError, ValueError):  # torch raises either, by the size that does not fit
                if node.target not in COPIES:
                    raise
                sites.append(node.meta["module"])
                new = graph.call(COPIES[node.target], *node.args, like=node)
                graph.replace(node, new)
                moved.add(new)
                continue
            if _strides(node.meta["val"]) != before:
                moved.add(node)
        return sites


def _strides(value: Any) -> Any:
    """Strides as text: to compare two symbols can tie one to a number."""
    return tuple(map(str, value.stride())) if isinstance(value, Tensor) else None
