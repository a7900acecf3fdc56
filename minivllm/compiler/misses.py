"""Misses: what a pass looked for and did not take, noted where it turned away.

Owns the notes of one pass on one graph. Does not own what a pattern says of its own misses
(near_miss.py) nor how they are shown (explain.py).

    if y in rest:
        context.misses.add(graph, node, "a value that it adds to another", at=y,
                           reason="it adds the product to itself")
        continue
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.text import argument_text, call_text, type_text

if TYPE_CHECKING:
    from minivllm.compiler.pattern import Match, Pattern


@dataclass(frozen=True)
class Miss:
    """A place that a pass tried and left, as it stood then.

    Attributes:
        candidate: the call that was tried; if it is gone later, something else took it.
        site: what the pass would have called the place: a module path or another name.
        at: the node where it stopped, as listings name it.
        module, source: where that node comes from: module path and line of the model.
        made_by: the pass that made the node; "trace" if it is as it was traced.
        expected: what should have stood there.
        here: what stood there: the call, its dtype and shape.
        reason: why it does not do.
        matched, total: how many of the nodes that it takes were right.
        more: differences beside this one.
        alike: what stood there is of the expected form, such as another op of one operand.
        pattern: name of the pattern; empty if the pass looks by hand.
    """

    candidate: Node
    site: str
    at: str
    module: str
    source: str
    made_by: str
    expected: str
    here: str
    reason: str
    matched: int
    total: int
    more: int = 0
    alike: bool = False
    pattern: str = ""

    @property
    def order(self) -> tuple[float, int, int, bool]:
        """Sorts the most advanced miss to the front."""
        return -self.matched / self.total, -self.total, self.more, not self.alike


class Misses:
    """Collects misses while a pass runs; the runner gives each run its own.

    Attributes:
        noted: what the pass told.
        patterns: patterns that it looked for, in order.
        targets: ops whose every call is a candidate.
    """

    def __init__(self) -> None:
        self.noted: list[Miss] = []
        self.patterns: list[Pattern] = []
        self.targets: list[Any] = []

    def tried(self, pattern: Pattern) -> None:
        """The pass looks for a pattern in the whole graph; its near misses can be found later."""
        if pattern not in self.patterns:
            self.patterns.append(pattern)

    def looked_for(self, *targets: Any) -> None:
        """The pass looks at every call of these ops: where there is none, that is the reason."""
        self.targets += [t for t in targets if t not in self.targets]

    def add(
        self,
        graph: Graph,
        candidate: Node,
        expected: str,
        *,
        reason: str,
        at: Any = None,
        site: str | None = None,
        matched: int = 1,
        total: int = 2,
    ) -> None:
        """Note a candidate that is not taken.

        Args:
            candidate: the call that was tried.
            expected: what should have stood where it stopped.
            reason: why what stood there does not do.
            at: the node where it stopped; the candidate itself if that is no node.
            site: what the pass would have called the place, if not the candidate's module.
            matched, total: how far it got: the right nodes among all that it takes.
        """
        stop = at if isinstance(at, Node) else candidate
        self.noted.append(make_miss(graph, candidate, stop, expected, reason, site, matched, total))

    def unfit(self, graph: Graph, match: Match, name: str, expected: str) -> None:
        """Note a match whose input `name` has a shape that the pass has no op for."""
        shape = type_text(graph, match[name])
        self.add(
            graph,
            match.node,
            expected,
            at=match[name],
            reason=f"another shape: {name} is {shape}",
            matched=len(match.interior),
            total=len(match.interior) + 1,
        )

    def extra_user(
        self, graph: Graph, candidate: Node, node: Node, *known: Node, site: str | None = None
    ) -> None:
        """Note that `node`, which would go with the candidate, is read by more than `known`."""
        readers = [user for user in node.users if user not in known]
        expected = f"%{node.name} read by {' and '.join(f'%{k.name}' for k in known)} alone"
        reason = f"an extra user: {reader_text(readers[0])} reads it too" if readers else "unread"
        self.add(graph, candidate, expected, reason=reason, at=node, site=site, matched=2, total=3)


def make_miss(
    graph: Graph,
    candidate: Node,
    at: Node,
    expected: str,
    reason: str,
    site: str | None,
    matched: int,
    total: int,
    **more: Any,
) -> Miss:
    """A miss whose texts are written now: the graph may change later."""
    return Miss(
        candidate=candidate,
        site=candidate.meta["module"] if site is None else site,
        at=argument_text(graph, at),
        module=at.meta.get("module", ""),
        source=at.meta.get("source", ""),
        made_by=at.meta.get("pass", "trace"),
        expected=expected,
        here=node_text(graph, at),
        reason=reason,
        matched=matched,
        total=total,
        **more,
    )


def node_text(graph: Graph, node: Node) -> str:
    """A node and its type: `%add_3 = aten.add.Tensor(%mean, 1e-06): float32[tokens, 1]`."""
    if node.op != "call_function":
        return f"{argument_text(graph, node)}: {type_text(graph, node)}"
    return f"%{node.name} = {call_text(graph, node)}: {type_text(graph, node)}"


def reader_text(user: Node) -> str:
    """A reader of a value, and where it is."""
    if user.op == "output":
        return "the graph's output"
    return f"%{user.name} ({user.meta['module'] or 'top'})"
