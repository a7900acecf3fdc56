"""What a legal graph is: rules checked after every pass.

Owns the rules. Does not own any repair: a broken rule is a fault of the pass that just ran.

    check(graph, may_mutate=False)
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch.fx import Node

from minivllm.compiler.graph import INPUTS, Graph

NAMESPACES = ("aten", "minivllm")


class ContractError(RuntimeError):
    """A graph breaks a rule of the compiler's contract; the message names node and rule."""


def mutated_arguments(node: Node) -> list[Node]:
    """The argument nodes that a call changes, by its schema's `(a!)`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, Node):
                found.append(value)
    return found


def is_mutation(node: Node) -> bool:
    """Whether a node changes one of its arguments."""
    return node.op == "call_function" and bool(mutated_arguments(node))


def check(graph: Graph, *, may_mutate: bool) -> None:
    """Check every rule.

    Args:
        may_mutate: whether a pass that brings mutation has run.

    Raises:
        ContractError: naming the node and the rule.
    """
    graph.fx.lint()
    writes: Counter[str] = Counter()
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            _check_input(node)
        elif node.op == "get_attr":
            _check_leaf(graph, node)
        elif node.op == "call_function":
            _check_call(node)
            for changed in mutated_arguments(node):
                _require(may_mutate, node, "changes its argument before lowering")
                _require(
                    changed.op == "get_attr" and changed.target in graph.states,
                    node,
                    f"changes {changed}, which is not state",
                )
                writes[str(changed.target)] += 1
        else:
            _require(node.op == "output", node, f"has kind {node.op}")
    for name in graph.states:
        if writes[name] != 1:
            raise ContractError(f"{name} is written {writes[name]} times a step instead of once")


def _check_input(node: Node) -> None:
    spec = INPUTS.get(str(node.target))
    _require(spec is not None, node, f"is not an input of {', '.join(INPUTS)}")
    assert spec is not None
    value = _value(node)
    _require(
        value.dtype == spec.dtype and value.ndim == len(spec.dims), node, f"differs from {spec}"
    )


def _check_leaf(graph: Graph, node: Node) -> None:
    name, value = str(node.target), _value(node)
    spec = graph.weights.get(name) or graph.states.get(name)
    _require(spec is not None, node, "names neither a weight nor a state")
    assert spec is not None
    shape = tuple(value.shape) if name in graph.weights else tuple(value.shape[1:])
    _require(shape == spec.shape and value.dtype == spec.dtype, node, f"differs from {spec}")


def _check_call(node: Node) -> None:
    target = node.target
    if target is not operator.getitem:
        known = isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES
        _require(known, node, f"calls {target}, which is no op of {' or '.join(NAMESPACES)}")
    for key in ("val", "module", "source"):
        _require(key in node.meta, node, f"carries no {key}")
    literals = [*node.args, *node.kwargs.values()]
    _require(not any(isinstance(a, torch.device) for a in literals), node, "names a device")


def _value(node: Node) -> torch.Tensor:
    _require("val" in node.meta, node, "carries no val")
    return node.meta["val"]


def _require(condition: bool, node: Node, complaint: str) -> None:
    if not condition:
        raise ContractError(f"node {node} ({node.meta.get('module', '?')}) {complaint}")
