"""canonicalize: one spelling for one meaning, before any pattern is looked for.

    %_assert_tensor_metadata(%x, ...)                    (gone)
    %y = to(%x, float32)      # x is float32      ->     %x
    %s = slice(%x, 0, 0, MAX)                            %x
    %a = unsqueeze(%cos, 1); %b = unsqueeze(%cos, 1)     %a used twice
    %t = neg(%x)              # no user                  (gone)

Nothing that changes a value is touched.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Node

from minivllm.compiler.contract import is_mutation
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext

aten = torch.ops.aten

ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)


class Canonicalize(GraphPass):
    """Drop assertions, casts and slices that do nothing, repeated and unused computations."""

    name = "canonicalize"
    mandatory = True

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        removed: list[str] = []
        seen: dict[Any, Node] = {}
        for node in list(graph.fx.nodes):
            if node.op != "call_function" or is_mutation(node):
                continue
            if node.target in ASSERTIONS:
                stand_in = None
            elif is_identity(node):
                stand_in = node.args[0]
            else:
                stand_in = seen.setdefault(_key(node), node)
                if stand_in is node:
                    continue
            if stand_in is not None:
                node.replace_all_uses_with(stand_in)
            graph.fx.erase_node(node)
            removed.append(node.meta["module"])
        return removed + remove_unused(graph)


def is_identity(node: Node) -> bool:
    """Whether a node returns its first argument unchanged: same values, dtype and shape."""
    if node.target is aten.to.dtype:
        (source,) = node.all_input_nodes
        return node.args[1:] == (source.meta["val"].dtype,) and not node.kwargs
    if node.target is aten.slice.Tensor:
        given = dict(zip(("x", "dim", "start", "end", "step"), node.args, strict=False))
        whole = given.get("start") in (0, None) and given.get("end") in (sys.maxsize, None)
        return whole and given.get("step", 1) in (1,)
    return node.target in (aten.alias.default, aten.detach.default)


def remove_unused(graph: Graph) -> list[str]:
    """Erase calls and weights that nobody reads; returns the module of each call."""
    removed = []
    for node in reversed(list(graph.fx.nodes)):
        if node.users or node.op not in ("call_function", "get_attr") or is_mutation(node):
            continue
        graph.fx.erase_node(node)
        if node.op == "get_attr":
            graph.weights.pop(str(node.target), None)
            graph.states.pop(str(node.target), None)
        else:
            removed.append(node.meta["module"])
    return removed


def _key(node: Node) -> Any:
    """Equal for calls that compute the same: same target, same arguments of the same types."""

    def freeze(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(freeze(v) for v in value)
        return value if isinstance(value, Node) else (type(value), value)

    kwargs = tuple((k, freeze(v)) for k, v in sorted(node.kwargs.items()))
    return node.target, freeze(node.args), kwargs
