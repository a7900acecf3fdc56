"""Near misses of patterns: how far a pattern fits where it does not match, and what is in the way.

Owns the comparison that goes on behind a difference. Does not own matching (pattern.py), which
stops at the first one, nor what is shown of the result (explain.py).

    for miss in near_misses(graph, context.misses):
        print(miss.at, miss.expected, miss.here, miss.reason)

The matcher only answers yes or no, so that a compilation pays nothing for explanations. Here a
pattern is laid over each call of a graph, and nodes that have their counterpart are counted. Of
the orders of a sum or product, the one in which more nodes fit is the one that was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Miss, Misses, make_miss, reader_text
from minivllm.compiler.pattern import COMMUTATIVE, Pattern, are_numbers, kind_of
from minivllm.compiler.text import argument_text, dtype_text, target_text

CAST = torch.ops.aten.to.dtype
SHARE = 0.5  # of a pattern's nodes that must fit in a near miss


@dataclass(frozen=True)
class Stop:
    """A difference: the graph's node, what the pattern has in its place, and what is wrong.

    `alike`: the two take as many arguments, as ops do that are taken for one another.
    """

    node: Node
    expected: str
    reason: str
    alike: bool = False


@dataclass
class Alignment:
    """A pattern laid over a part of a graph.

    Attributes:
        nodes: the pattern's calls that have their counterpart.
        bindings: names of inputs and scalars to nodes and literals.
        stops: the differences, in the order of the pattern's arguments.
    """

    nodes: dict[Node, Node] = field(default_factory=dict)
    bindings: dict[str, Any] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)

    def copy(self) -> Alignment:
        return Alignment(dict(self.nodes), dict(self.bindings), list(self.stops))

    @property
    def rank(self) -> tuple[int, int, int]:
        """The larger, the better it fits."""
        return len(self.nodes), -len(self.stops), sum(stop.alike for stop in self.stops)


def near_misses(graph: Graph, misses: Misses) -> list[Miss]:
    """What a pass has noted, and where its patterns nearly fit; the most advanced first.

    Places that the pass or another pattern of it has taken since are left out.
    """
    alive = set(graph.fx.nodes)
    found = [(miss, frozenset({miss.candidate})) for miss in misses.noted]
    found = [(miss, nodes) for miss, nodes in found if miss.candidate in alive]
    for pattern in misses.patterns:
        found += _of_pattern(graph, pattern)
    found.sort(key=lambda pair: pair[0].order)
    kept: list[Miss] = []
    covered: set[Node] = set()
    for miss, nodes in found:
        # one place is told once: by the pattern that fits best, from the call that fits best
        if miss.pattern and 2 * len(nodes & covered) >= len(nodes):
            continue
        kept.append(miss)
        covered |= nodes
    return kept


def nearest(graph: Graph, node: Node, pattern: Pattern) -> Stop | None:
    """Where a pattern stops at a call that it was expected at; None if it matches."""
    return next(iter(_align_at(graph, pattern, node).stops), None)


def _of_pattern(graph: Graph, pattern: Pattern) -> Iterator[tuple[Miss, frozenset[Node]]]:
    total = len(pattern.calls)
    for node in reversed(graph.nodes()):
        alignment = _align_at(graph, pattern, node)
        matched = len(alignment.nodes)
        if not alignment.stops or matched < max(SHARE * total, 1):
            continue
        stop = alignment.stops[0]
        miss = make_miss(
            graph,
            node,
            stop.node,
            stop.expected,
            stop.reason,
            None,
            matched,
            total,
            more=len(alignment.stops) - 1,
            alike=stop.alike,
            pattern=pattern.name,
        )
        yield miss, frozenset(alignment.nodes.values())


def _align_at(graph: Graph, pattern: Pattern, node: Node) -> Alignment:
    """The pattern laid over the graph so that `node` is its value."""
    aligner = _Aligner(graph, pattern)
    alignment = aligner.node(pattern.output, node, Alignment(), None, "the value")
    if not alignment.stops and not pattern.shared:
        inside = set(alignment.nodes.values())
        for wanted, inner in alignment.nodes.items():
            for user in inner.users:
                if inner is not node and user not in inside:
                    alignment.stops.append(aligner.outside_reader(wanted, inner, user))
    unique = {(stop.node, stop.reason): stop for stop in reversed(alignment.stops)}
    alignment.stops = list(reversed(unique.values()))
    return alignment


class _Aligner:
    """Lays a pattern over calls of a graph."""

    def __init__(self, graph: Graph, pattern: Pattern) -> None:
        self.graph = graph
        self.pattern = pattern

    def node(
        self, wanted: Node, value: Any, before: Alignment, reader: Node | None, place: str
    ) -> Alignment:
        """`before`, with `wanted` and all behind it laid over `value`, which `reader` reads."""
        result = before.copy()
        # what a leaf lacks is told at the call that reads it: a leaf has no line of its own
        anchor = value if isinstance(value, Node) and value.op == "call_function" else reader
        assert anchor is not None

        def stop(reason: str, at: Node = anchor) -> Alignment:
            alike = at is value and len(at.args) == len(wanted.args)
            result.stops.append(Stop(at, f"{self.text(wanted)} as {place}", reason, alike))
            return result

        if not isinstance(value, Node):
            return stop(f"another operand: {value!r} in place of a tensor")
        if wanted.op == "placeholder":
            return self.input(wanted, value, result, stop)
        if wanted in result.nodes:
            known = result.nodes[wanted]
            return result if known is value else stop(f"another operand: {self.name(known)} there")
        name = target_text(wanted.target)
        if value.target is wanted.target:
            result.nodes[wanted] = value
            return self.arguments(wanted, value, result)
        source = value.args[0] if value.args else None
        if value.target is CAST and _calls(source, wanted.target):
            cast = dtype_text(value.meta["val"].dtype)
            stop(f"a cast between: to {cast} behind {name}")
            return self.node(wanted, source, result, reader, place)
        inner = wanted.args[0] if wanted.args else None
        if wanted.target is CAST and isinstance(inner, Node) and self.could_be(inner, value):
            stop(f"another cast: none to {dtype_text(wanted.meta['val'].dtype)} here")
            return self.node(inner, value, result, reader, place)
        if value.op != "call_function":
            return stop(f"another operand: {self.name(value)} in place of {name}")
        first = not result.stops
        stop(f"another op: {target_text(value.target)} in place of {name}")
        return self.same_operands(wanted, value, result) if first else result

    def could_be(self, wanted: Node, value: Node) -> bool:
        """Whether a node may stand for the pattern's, as far as it shows by itself."""
        if wanted.op == "placeholder":
            return kind_of(wanted) == kind_of(value)
        return _calls(value, wanted.target)

    def input(self, wanted: Node, value: Node, result: Alignment, stop: Any) -> Alignment:
        kind, found = kind_of(wanted), kind_of(value)
        if kind is None or found is None:
            return stop("another operand: several tensors in place of one")
        if kind[0] != found[0]:
            dtypes = f"{dtype_text(found[0])} in place of {dtype_text(kind[0])}"
            return stop(f"another {'cast' if value.target is CAST else 'dtype'}: {dtypes}")
        if kind != found:
            names = {True: "a vector", False: "no vector"}
            return stop(f"another shape: {names[found[1]]} in place of {names[kind[1]]}")
        name = self.pattern.inputs[wanted]
        known = result.bindings.setdefault(name, value)
        if known is value:
            return result
        return stop(f"another operand: {name} is {self.name(known)} elsewhere")

    def arguments(self, wanted: Node, value: Node, before: Alignment) -> Alignment:
        """The arguments of two calls of one op, in the order that fits best."""
        result = self.ordered(wanted, value, value.args, before)
        if len(result.stops) == len(before.stops):
            return result
        commutes = wanted.target in COMMUTATIVE and not wanted.kwargs and not value.kwargs
        tensors = [i for i, a in enumerate(value.args) if isinstance(a, Node) or commutes]
        for i in tensors:
            for j in tensors:
                if i >= j:
                    continue
                args = list(value.args)
                args[i], args[j] = args[j], args[i]
                other = self.ordered(wanted, value, args, before)
                if commutes and other.rank > result.rank:
                    result = other
                elif not commutes and len(other.stops) == len(before.stops):
                    expected = f"{self.text(wanted)} with its operands in this order"
                    reason = f"swapped operands: arguments {i} and {j}"
                    other.stops.append(Stop(value, expected, reason))
                    return other
        return result

    def ordered(
        self, wanted: Node, value: Node, args: Sequence[Any], before: Alignment
    ) -> Alignment:
        result = before.copy()
        if len(args) != len(wanted.args) or set(value.kwargs) != set(wanted.kwargs):
            result.stops.append(Stop(value, self.text(wanted), "other arguments of the same op"))
        for index, (inner, argument) in enumerate(zip(wanted.args, args, strict=False)):
            place = f"argument {index} of {self.name(value)}"
            result = self.value(inner, argument, result, wanted, value, place)
        for key in wanted.kwargs.keys() & value.kwargs.keys():
            place = f"argument {key} of {self.name(value)}"
            inner, argument = wanted.kwargs[key], value.kwargs[key]
            result = self.value(inner, argument, result, wanted, value, place)
        return result

    def value(
        self, inner: Any, value: Any, result: Alignment, wanted: Node, reader: Node, place: str
    ) -> Alignment:
        """An argument of any kind; a literal's difference is told at the call that has it."""
        if isinstance(inner, Node):
            return self.node(inner, value, result, reader, place)
        if isinstance(inner, (list, tuple)):
            if isinstance(value, (list, tuple)) and len(value) == len(inner):
                for part, item in zip(inner, value, strict=True):
                    result = self.value(part, item, result, wanted, reader, place)
                return result
        elif isinstance(inner, float) and inner in self.pattern.scalars:
            name = self.pattern.scalars[inner]
            if are_numbers(value):
                known = result.bindings.setdefault(name, value)
                if known == value:
                    return result
                reason = f"another constant: {value!r} where {name} is {known!r} elsewhere"
            else:
                reason = f"another operand: {argument_text(self.graph, value)} in place of a number"
            result = result.copy()
            result.stops.append(Stop(reader, f"the number {name} as {place}", reason))
            return result
        elif (type(inner) is type(value) or are_numbers(inner, value)) and inner == value:
            return result
        expected, found = (argument_text(self.graph, v) for v in (inner, value))
        both = isinstance(inner, torch.dtype) and isinstance(value, torch.dtype)
        reason = f"another {'cast' if both else 'constant'}: {found} in place of {expected}"
        result = result.copy()
        result.stops.append(Stop(reader, f"{expected} as {place}", reason))
        return result

    def same_operands(self, wanted: Node, value: Node, result: Alignment) -> Alignment:
        """Below another op: those operands that fit as a whole."""
        tensors = [
            [a for a in call.args if isinstance(a, Node) and a.op == "call_function"]
            for call in (wanted, value)
        ]
        for inner, operand in zip(*tensors, strict=False):
            other = self.node(inner, operand, result, value, "")
            if len(other.stops) == len(result.stops):
                result = other
        return result

    def outside_reader(self, wanted: Node, inner: Node, user: Node) -> Stop:
        return Stop(
            inner,
            f"{self.text(wanted)} that only the match reads",
            f"an extra user: {reader_text(user)} reads it too",
        )

    def text(self, wanted: Node) -> str:
        """A pattern's node: its op, and where its arguments come from."""
        if wanted.op == "placeholder":
            kind = kind_of(wanted)
            assert kind is not None
            return f"{self.pattern.inputs[wanted]} ({dtype_text(kind[0])})"
        return f"{target_text(wanted.target)}({', '.join(map(self._argument, wanted.args))})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, Node):
            known = value.op == "placeholder"
            return self.pattern.inputs[value] if known else f"{target_text(value.target)}(…)"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, float) and value in self.pattern.scalars:
            return self.pattern.scalars[value]
        return argument_text(self.graph, value)

    def name(self, node: Any) -> str:
        return argument_text(self.graph, node)


def _calls(value: Any, target: Any) -> bool:
    return isinstance(value, Node) and value.op == "call_function" and value.target is target
