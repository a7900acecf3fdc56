"""Patterns: a piece of model code, traced, and found again in a graph.

Owns tracing a pattern and matching it. Does not own what takes a match's place (the passes).

    norm = Pattern(lambda x, w, eps: RMSNorm.forward(SimpleNamespace(weight=w, eps=eps), x),
                   {"x": ((2, 8), dtype), "w": ((8,), dtype)}, scalars=("eps",))
    for match in find(graph, norm): match["x"], match["eps"]

A pattern is traced by the same front end as the model, in the model's dtype, and canonicalized
like it, so that both have the same spelling. Its scalars match any literal. Additions and
products match in either order, numbers by value (`1 + w`, `1.0 + w`). An input matches any node
of the dtype it was declared with that is a vector if it was declared as one, which tells
`dt_bias` from `a` in their sum; the rest of its shape is for the passes to compare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.canonicalize import canonicalize

if TYPE_CHECKING:
    from minivllm.compiler.misses import Misses

COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)
SENTINEL = 0.17320508  # stands for a pattern's first scalar while it is traced; no model has it


class Pattern:
    """A function of tensors and scalars, as a graph to look for.

    Args:
        function: returns one tensor.
        inputs: name to shape and dtype of each tensor; the shape counts where the function's
            trace contains it.
        scalars: names of float arguments that match any literal.
        shared: whether interior values may have users outside the match (they then stay).
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Mapping[str, tuple[Sequence[int], torch.dtype]],
        scalars: Sequence[str] = (),
        shared: bool = False,
    ) -> None:
        plain = function.func if isinstance(function, functools.partial) else function
        self.name = plain.__name__
        self.names = tuple(inputs)
        self.scalars = {SENTINEL * (i + 1): name for i, name in enumerate(scalars)}
        self.shared = shared
        values = {name: value for value, name in self.scalars.items()}
        tensors = [torch.empty(s, dtype=d, device="meta") for s, d in inputs.values()]

        def positional(*args: Tensor) -> Tensor:
            return function(**dict(zip(self.names, args, strict=True)), **values)

        traced = make_fx(positional, pre_dispatch=True, tracing_mode="fake")(*tensors).graph
        for node in traced.nodes:
            node.meta = {"val": node.meta.get("val"), "module": "", "source": ""}
        placeholders = [n for n in traced.nodes if n.op == "placeholder"]
        graph = Graph(traced, "pattern", {}, placeholders[0].meta["val"].fake_mode)
        canonicalize(graph)
        self.output = graph.output
        self.calls = graph.nodes()
        self.inputs = dict(zip(placeholders, self.names, strict=True))


@dataclass(frozen=True)
class Match:
    """A place where a pattern was found.

    Attributes:
        node: the graph's node that computes the pattern's value.
        bindings: names of inputs and scalars to nodes and literals.
        interior: the other nodes that the pattern covers.
    """

    node: Node
    bindings: Mapping[str, Any]
    interior: frozenset[Node]

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]


def find(graph: Graph, pattern: Pattern, misses: Misses | None = None) -> list[Match]:
    """All matches, outermost (last in program order) first; no two share a covered node.

    Args:
        misses: told of the pattern, so that near misses can be shown where one is wanted.
    """
    if misses is not None:
        misses.tried(pattern)
    matches: list[Match] = []
    covered: set[Node] = set()
    for node in reversed(graph.nodes()):
        if node in covered:
            continue
        match = match_at(node, pattern)
        if match is not None and not (covered & match.interior):
            matches.append(match)
            covered |= match.interior | {node}
    return matches


def match_at(node: Node, pattern: Pattern) -> Match | None:
    """The match whose value is `node`, or None."""
    for state in _match_node(pattern, pattern.output, node, _State()):
        interior = frozenset(state.nodes.values()) - {node}
        inside = interior | {node}
        if pattern.shared or all(u in inside for n in interior for u in n.users):
            return Match(node, state.bindings, interior)
    return None


@dataclass(frozen=True)
class _State:
    """A partial match: pattern calls to graph nodes, and names to what they stand for."""

    nodes: Mapping[Node, Node] = field(default_factory=dict)
    bindings: Mapping[str, Any] = field(default_factory=dict)

    def bind(self, name: str, value: Any) -> _State | None:
        if name in self.bindings:
            same = self.bindings[name] is value or self.bindings[name] == value
            return self if same else None
        return _State(self.nodes, {**self.bindings, name: value})


def _match_node(pattern: Pattern, wanted: Node, node: Any, state: _State) -> Iterator[_State]:
    """All ways in which `node` can stand for the pattern's node `wanted`."""
    if wanted.op == "placeholder":
        fits = isinstance(node, Node) and kind_of(node) == kind_of(wanted)
        bound = state.bind(pattern.inputs[wanted], node) if fits else None
        if bound is not None:
            yield bound
        return
    if not isinstance(node, Node) or node.op != "call_function" or node.target is not wanted.target:
        return
    if wanted in state.nodes:
        if state.nodes[wanted] is node:
            yield state
        return
    if len(node.args) != len(wanted.args) or set(node.kwargs) != set(wanted.kwargs):
        return
    state = _State({**state.nodes, wanted: node}, state.bindings)
    kwargs = [wanted.kwargs[k] for k in wanted.kwargs], [node.kwargs[k] for k in wanted.kwargs]
    orders = [node.args]
    if wanted.target in COMMUTATIVE and not wanted.kwargs:  # alpha scales the second addend
        orders.append((node.args[1], node.args[0], *node.args[2:]))
    for order in orders:
        yield from _match_all(pattern, [*wanted.args, *kwargs[0]], [*order, *kwargs[1]], state)


def _match_all(
    pattern: Pattern, wanted: Sequence[Any], values: Sequence[Any], state: _State
) -> Iterator[_State]:
    """All ways in which a list of arguments can stand for the pattern's."""
    if not wanted:
        yield state
        return
    for matched in _match_value(pattern, wanted[0], values[0], state):
        yield from _match_all(pattern, wanted[1:], values[1:], matched)


def _match_value(pattern: Pattern, wanted: Any, value: Any, state: _State) -> Iterator[_State]:
    if isinstance(wanted, Node):
        yield from _match_node(pattern, wanted, value, state)
    elif isinstance(wanted, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(wanted):
            yield from _match_all(pattern, list(wanted), list(value), state)
    elif isinstance(wanted, float) and wanted in pattern.scalars:
        bound = state.bind(pattern.scalars[wanted], value) if are_numbers(value) else None
        if bound is not None:
            yield bound
    elif (type(wanted) is type(value) or are_numbers(wanted, value)) and wanted == value:
        yield state


def are_numbers(*values: Any) -> bool:
    """Whether all values are numbers; `True` is none."""
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def kind_of(node: Node) -> tuple[torch.dtype, bool] | None:
    """The dtype of a tensor and whether it is a vector; None for several tensors."""
    value = node.meta["val"]
    return (value.dtype, value.ndim == 1) if isinstance(value, Tensor) else None
