"""canonicalize: one spelling for one meaning, before any pattern is looked for.

    %_assert_tensor_metadata(%x, ...)                    (gone)
    %y = to(%x, float32)      # x is float32      ->     %x
    %s = slice(%x, 0, 0, MAX)                            %x
    %a = unsqueeze(%cos, 1); %b = unsqueeze(%cos, 1)     %a used twice
    %t = neg(%x)              # no user                  (gone)
    %p = mul(%x, %x)          # or square(%x)      ->    %p = pow(%x, 2)
    %y = type_as(%x, %z)                           ->    %y = to(%x, dtype of z)

Nothing that changes a value is touched. Each call that draws random numbers or returns nothing
stays.
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
        return canonicalize(graph)


def canonicalize(graph: Graph) -> list[str]:
    """Bring a graph into the one spelling; returns the module of each node that went."""
    removed: list[str] = []
    seen: dict[Any, Node] = {}
    for node in list(graph.fx.nodes):
        if node.op != "call_function":
            continue
        if is_mutation(node):
            seen.clear()  # the same read behind a write reads something else
            continue
        if node.target in ASSERTIONS:
            graph.fx.erase_node(node)
            removed.append(node.meta["module"])
            continue
        if has_effect(node):
            continue
        node = respell(graph, node)
        stand_in = node.args[0] if is_identity(node) else seen.setdefault(_key(node), node)
        if stand_in is not node:
            assert isinstance(stand_in, Node)
            node.replace_all_uses_with(stand_in)
            graph.fx.erase_node(node)
            removed.append(node.meta["module"])
    return removed + remove_unused(graph)


def respell(graph: Graph, node: Node) -> Node:
    """The call in the spelling that patterns use; the node itself if it has it already."""
    x, *rest = node.args or (None,)
    if not isinstance(x, Node):
        return node
    if node.target is aten.type_as.default:
        (other,) = rest
        assert isinstance(other, Node)
        value = other.meta["val"]
        if value.device != x.meta["val"].device:
            return node  # type_as moves, too
        new = graph.call(aten.to.dtype, x, value.dtype, like=node)
    elif node.target is aten.square.default or (
        node.target is aten.mul.Tensor and rest and rest[0] is x
    ):
        if x.meta["val"].dtype is torch.bool:
            return node  # its power is an integer
        new = graph.call(aten.pow.Tensor_Scalar, x, 2, like=node)
    else:
        return node
    # its sources stay for now, even without readers: an equal call further down may need them
    node.replace_all_uses_with(new)
    graph.fx.erase_node(node)
    return new


def is_identity(node: Node) -> bool:
    """Whether a node returns its first argument unchanged: same values, dtype and shape."""
    if node.target is aten.to.dtype:
        (source,) = node.all_input_nodes
        return node.args[1:] == (source.meta["val"].dtype,) and not node.kwargs
    if node.target is aten.slice.Tensor:
        given = dict(zip(("x", "dim", "start", "end", "step"), node.args, strict=False))
        whole = given.get("start") in (0, None) and given.get("end") in (sys.maxsize, None)
        return whole and given.get("step", 1) in (1,) and not node.kwargs
    return node.target in (aten.alias.default, aten.detach.default)


def has_effect(node: Node) -> bool:
    """Whether a call does more than compute: it returns nothing, or draws random numbers (two equal
    calls differ, and one call less moves all later ones)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags or not node.target._schema.returns


def remove_unused(graph: Graph) -> list[str]:
    """Erase calls and weights that nobody reads; returns the module of each call."""
    removed = []
    for node in reversed(list(graph.fx.nodes)):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if is_mutation(node) or has_effect(node):
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
        # as text, since 1 == 1.0 == True and 0.0 == -0.0
        return value if isinstance(value, Node) else (type(value), repr(value))

    kwargs = tuple((k, freeze(v)) for k, v in sorted(node.kwargs.items()))
    return node.target, freeze(node.args), kwargs
