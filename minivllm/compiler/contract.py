"""What a legal graph is: rules checked after every pass.

Owns the rules. Does not own any repair: a broken rule is a fault of the pass that just ran.

    before = snapshot(graph)
    graph_pass.run(graph, context)
    check_changes(graph, before)
    check(graph, may_mutate=False)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from minivllm.compiler.graph import MODULE, Graph
from minivllm.compiler.text import type_text, value_text

NAMESPACES = ("aten", "minivllm")
CALL = "make it with graph.call(op, ..., like=node), which types it and says where it comes from"
EARLY = (
    "changes its argument before lowering; call the op that returns a new value (without the "
    "underscore at its end), or set mutates = True on the pass and place it among the last "
    "(before = 'inplace_state')"
)

Snapshot = Mapping[Node, tuple[Any, Any, Any]]


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


def snapshot(graph: Graph) -> Snapshot:
    """What each node calls and reads, to compare with after a pass."""
    return {node: (node.target, node.args, node.kwargs) for node in graph.fx.nodes}


def check_changes(graph: Graph, before: Snapshot) -> None:
    """Check what a pass made and what it handed to other readers, before anything is tidied up.

    A call made by `graph.call`, and a value handed on by `graph.replace`, have the right type. For
    what was done by other means the type is inferred again.

    Args:
        before: of the graph that the pass was given.

    Raises:
        ContractError: a call without meta, of another type than it says, or that nobody reads.
    """
    known: set[Node] = set()
    for node in graph.fx.nodes:
        for read in node.all_input_nodes:
            _require(
                read in known,
                node,
                f"reads %{read}, which stands behind it; put that in front with "
                f"graph.call(op, ..., like={node})",
            )
        known.add(node)
        if node.op == "call_function":
            _check_meta(node)
        elif node.op != "output":
            _value(node)
    graph.fx.lint()
    for node in graph.nodes():
        if node not in before:
            _require(
                bool(node.users) or is_mutation(node),
                node,
                "is new and nobody reads it; let it take a node's place: graph.replace(node, new)",
            )
            if node.meta.get("pass") != graph.stage:
                _check_type(graph, node, CALL)
        elif _reads_other_types(graph, node, before[node]):
            readable = ", ".join(f"%{n.name}: {type_text(graph, n)}" for n in node.all_input_nodes)
            _check_type(
                graph,
                node,
                f"now that it reads {readable}; what takes a value's place must have its shape "
                "and dtype, which graph.replace(node, new) checks",
            )
    _check_output(graph, before)


def _check_meta(node: Node) -> None:
    for key in ("val", "module", "source"):
        _require(key in node.meta, node, f"carries no {key} in its meta; {CALL}")


def _reads_other_types(graph: Graph, node: Node, before: tuple[Any, Any, Any]) -> bool:
    """Whether a call has another op or literal than before, or reads values of other types."""
    if all(a is b for a, b in zip(before, (node.target, node.args, node.kwargs), strict=True)):
        return False
    old, new = (
        (target, map_arg((args, dict(kwargs)), lambda n: type_text(graph, n)))
        for target, args, kwargs in (before, (node.target, node.args, node.kwargs))
    )
    return bool(old != new)


def _check_type(graph: Graph, node: Node, remedy: str) -> None:
    said = type_text(graph, node)
    try:
        value = graph.infer(node)
    except Exception as error:
        complaint = f"cannot be called so ({type(error).__name__}: {error})"
        raise ContractError(_message(node, f"{complaint}; {remedy}")) from error
    found = value_text(graph, value)
    _require(found == said, node, f"is {said} by its meta and {found} by its op; {remedy}")


def _check_output(graph: Graph, before: Snapshot) -> None:
    """A pass may change how many rows come out, but not what a row is."""
    old = [node for end, (_, args, _) in before.items() if end.op == "output" for node in _in(args)]
    new = [node for end in graph.fx.nodes if end.op == "output" for node in _in(end.args)]
    for was, now in zip(old, new, strict=True):
        _require(
            _row(graph, was) == _row(graph, now),
            now,
            f"is the graph's output and {type_text(graph, now)}, where {type_text(graph, was)} "
            "stood; what takes a value's place must have its shape and dtype",
        )


def _in(arguments: Any) -> list[Node]:
    nodes: list[Node] = []
    map_arg(arguments, nodes.append)
    return nodes


def _row(graph: Graph, node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    return value.dtype, *(graph.named(size) for size in value.shape[1:])


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
            _check_input(graph, node)
        elif node.op == "get_attr":
            _check_leaf(graph, node)
        elif node.op == "call_function":
            _check_call(graph, node)
            for changed in mutated_arguments(node):
                _require(may_mutate, node, EARLY)
                _require(
                    changed.op == "get_attr" and changed.target in graph.states,
                    node,
                    f"changes {changed}, which is not state; call the op that returns a new value "
                    "(without the underscore at its end)",
                )
                writes[str(changed.target)] += 1
        else:
            _require(node.op == "output", node, f"has kind {node.op}")
    for name in graph.states:
        if writes[name] != 1:
            raise ContractError(f"{name} is written {writes[name]} times a step instead of once")


def _check_input(graph: Graph, node: Node) -> None:
    spec = graph.inputs.get(str(node.target))
    _require(spec is not None, node, f"is not an input of {', '.join(graph.inputs)}")
    assert spec is not None
    if graph.phase == MODULE and isinstance(node.meta.get("val"), torch.SymInt):
        return  # a size that changes from call to call
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


def _check_call(graph: Graph, node: Node) -> None:
    if graph.phase == MODULE:  # a user's module calls what it likes, on the device it is on
        _check_meta(node)
        return
    target = node.target
    if target is not operator.getitem:
        known = isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES
        _require(
            known,
            node,
            f"calls {target}, which is no op of {' or '.join(NAMESPACES)}; call those, or define "
            "an op of your own with minivllm.ops.op.define_op",
        )
    _check_meta(node)
    literals = [*node.args, *node.kwargs.values()]
    _require(not any(isinstance(a, torch.device) for a in literals), node, "names a device")


def _value(node: Node) -> torch.Tensor:
    _require("val" in node.meta, node, "carries no val")
    return node.meta["val"]


def _require(condition: bool, node: Node, complaint: str) -> None:
    if not condition:
        raise ContractError(_message(node, complaint))


def _message(node: Node, complaint: str) -> str:
    return f"node {node} ({node.meta.get('module', '?')}) {complaint}"
