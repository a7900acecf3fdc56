"""Runs passes over a graph: checks the contract, counts, times, dumps, verifies after each.

Owns everything that is the same for all passes. Does not own their order (pipeline.py).

    reports = run_passes(graph, passes, context, observers=(dump,))
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.compiler import contract
from minivllm.compiler.explain import Explain, explanation, shortfall
from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Miss, Misses
from minivllm.compiler.near_miss import near_misses
from minivllm.compiler.pass_check import check_passes, check_sites, explain_error
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.passes.canonicalize import remove_unused
from minivllm.errors import UserError

Observer = Callable[[Graph, str], None]


class CompileError(RuntimeError):
    """A pass failed or missed sites; the message names it and the passes that ran before.

    Attributes:
        details: for each site that was missed, where the pass turned away and why; lines that
            stand behind the message.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(f"{message}\n{details}" if details else message)
        self.message = message
        self.details = details


@dataclass(frozen=True)
class PassReport:
    """What one pass did to one graph.

    Attributes:
        matches: sites it rewrote.
        expected: sites the config says it must rewrite, or None.
        seconds: spent in the pass itself.
        calls_before, calls_after: `call_function` nodes.
        document: what it is for: the docstring of its module.
        misses: what it nearly took, on a user's module, which has no sites that it must rewrite.
    """

    name: str
    phase: str
    matches: int
    expected: int | None
    seconds: float
    calls_before: int
    calls_after: int
    document: str = ""
    misses: tuple[Miss, ...] = ()


def run_passes(
    graph: Graph,
    passes: Sequence[GraphPass],
    context: PassContext,
    observers: Sequence[Observer] = (),
    explain: Explain | None = None,
) -> list[PassReport]:
    """Run the passes in order on one graph, in place.

    Args:
        observers: called with the graph and the stage's name, first for the source ("source")
            and then after each pass: dumps, verification. `graph.misses` is the pass's then.
        explain: a pass whose matches and near misses are told, even if it fails then.

    Raises:
        UserError: something that is no pass, or two passes of one name.
        CompileError: a pass raised, broke the contract, or missed sites it must find.
    """
    check_passes(passes)
    reports: list[PassReport] = []
    for observe in observers:
        observe(graph, "source")
    may_mutate = False
    for graph_pass in passes:
        may_mutate |= graph_pass.mutates
        try:
            report = _run_one(graph, graph_pass, context, may_mutate, explain)
            for observe in observers:
                observe(graph, graph_pass.name)
        except (UserError, BrokenPipeError):  # the user's input, and whoever reads what is printed
            raise
        except Exception as error:
            cause, details = explain_error(graph, error), ""
            if isinstance(error, CompileError):
                cause, details = error.message, error.details
            before = ", ".join(r.name for r in reports) or "none"
            raise CompileError(
                f"pass {graph_pass.name} on the {graph.phase} graph: {cause} "
                f"(passes before it: {before})",
                details,
            ) from error
        reports.append(report)
    return reports


def _run_one(
    graph: Graph,
    graph_pass: GraphPass,
    context: PassContext,
    may_mutate: bool,
    explain: Explain | None,
) -> PassReport:
    context = dataclasses.replace(context, misses=Misses())
    graph.stage, graph.misses = graph_pass.name, context.misses
    calls_before = len(graph.nodes())
    before = contract.snapshot(graph)
    start = time.perf_counter()
    matches = graph_pass.run(graph, context)
    seconds = time.perf_counter() - start
    complaint = check_sites(graph_pass, matches)
    if complaint is not None:
        raise CompileError(complaint)
    contract.check_changes(graph, before)
    remove_unused(graph)
    if explain is not None and explain.name == graph_pass.name:
        explain.say(explanation(graph, graph_pass.name, matches, context.misses))
    expected = None
    misses: tuple[Miss, ...] = ()
    if context.architecture is not None:
        expected = graph_pass.expected(graph.phase, context)
    else:
        misses = tuple(near_misses(graph, context.misses))
    if not context.disabled.isdisjoint(graph_pass.after):
        expected = None
    if expected is not None:
        _compare_sites(graph, matches, expected, context.misses)
    contract.check(graph, may_mutate=may_mutate)
    return PassReport(
        name=graph_pass.name,
        phase=graph.phase,
        matches=len(matches),
        expected=None if expected is None else len(expected),
        seconds=seconds,
        calls_before=calls_before,
        calls_after=len(graph.nodes()),
        document=(sys.modules[type(graph_pass).__module__].__doc__ or "").strip(),
        misses=misses,
    )


def _compare_sites(graph: Graph, matches: list[str], expected: list[str], misses: Misses) -> None:
    missing = Counter(expected) - Counter(matches)
    surplus = Counter(matches) - Counter(expected)
    if missing or surplus:
        raise CompileError(
            f"matched {len(matches)} of {len(expected)} sites; "
            f"unmatched: {', '.join(missing.elements()) or 'none'}; "
            f"unexpected: {', '.join(surplus.elements()) or 'none'}",
            shortfall(graph, missing, misses),
        )
