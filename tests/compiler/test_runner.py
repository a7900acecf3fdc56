"""The runner: what it reports, and what its errors say."""

from __future__ import annotations

from typing import Any

import pytest
from toy_graphs import aten, code

from minivllm.compiler.contract import ContractError
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.passes.lower_attention import LowerAttention
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.errors import UserError


class Named(GraphPass):
    """A pass that does what it is told."""

    def __init__(self, name: str, result: Any = (), expected: list[str] | None = None) -> None:
        self.name = name
        self.result = list(result) if isinstance(result, tuple) else result
        self.sites = expected

    def expected(self, phase: str, context: PassContext) -> list[str] | None:
        return self.sites

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def error_of(canonical: Graph, context: PassContext, *passes: GraphPass) -> CompileError:
    with pytest.raises(CompileError) as error:
        run_passes(canonical.clone("decode"), passes, context)
    return error.value


def test_reports(canonical: Graph, context: PassContext) -> None:
    graph = canonical.clone("decode")
    calls = len(graph.nodes())
    passes = [Named("first", ("a", "b")), LowerMixers(), LowerAttention()]
    first, mixers, attention = run_passes(graph, passes, context)
    assert (first.name, first.phase, first.matches, first.expected) == ("first", "decode", 2, None)
    assert (first.calls_before, first.calls_after) == (calls, calls)
    assert (mixers.name, mixers.matches, mixers.expected) == ("lower_mixers", 2, 2)
    assert (mixers.calls_before, mixers.calls_after) == (calls, calls + 8)
    assert (attention.matches, attention.expected) == (1, 1)
    assert attention.calls_after == len(graph.nodes()) == calls + 9
    assert all(0 <= r.seconds < 10 for r in (first, mixers, attention))


def test_no_passes(canonical: Graph, context: PassContext) -> None:
    graph, seen = canonical.clone("decode"), []
    before = code(graph)
    assert run_passes(graph, [], context, [lambda g, stage: seen.append(stage)]) == []
    assert seen == ["source"]
    assert code(graph) == before


def test_observers_see_every_stage_in_order(canonical: Graph, context: PassContext) -> None:
    graph, seen = canonical.clone("decode"), []

    def observer(name: str) -> Any:
        return lambda g, stage: seen.append((name, stage, g is graph, len(g.nodes())))

    calls = len(graph.nodes())
    run_passes(graph, [Named("one"), LowerMixers()], context, [observer("a"), observer("b")])
    assert seen == [
        (name, stage, True, count)
        for stage, count in (("source", calls), ("one", calls), ("lower_mixers", calls + 8))
        for name in ("a", "b")
    ]


def test_a_shortfall_names_the_layers_and_what_ran_before(
    canonical: Graph, context: PassContext
) -> None:
    sites = [f"layers.{i}" for i in range(4)]
    short = Named("short", ("layers.0", "layers.2"), sites)
    error = error_of(canonical, context, Named("one"), Named("two"), short, Named("never"))
    assert str(error) == (
        "pass short on the decode graph: matched 2 of 4 sites; "
        "unmatched: layers.1, layers.3; unexpected: none (passes before it: one, two)"
    )


def test_a_surplus_and_a_site_matched_twice(canonical: Graph, context: PassContext) -> None:
    error = error_of(canonical, context, Named("most", ("a", "a", "c"), ["a", "b"]))
    assert str(error) == (
        "pass most on the decode graph: matched 3 of 2 sites; "
        "unmatched: b; unexpected: a, c (passes before it: none)"
    )


def test_nothing_found(canonical: Graph, context: PassContext) -> None:
    """As when the model was edited and the pattern was not."""
    graph = canonical.clone("prefill")
    with pytest.raises(CompileError, match=r"matched 0 of 2 sites; unmatched: layers.0.conv, lay"):
        for node in graph.nodes():
            if "causal_conv1d" in str(node.target) or "gated_delta_rule" in str(node.target):
                node.target = aten.relu.default
        run_passes(graph, [LowerMixers()], context)


def test_the_order_of_matches_does_not_matter(canonical: Graph, context: PassContext) -> None:
    run_passes(canonical.clone("decode"), [Named("any", ("b", "a"), ["a", "b"])], context)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ValueError("a shape is wrong"), "ValueError: a shape is wrong"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (AssertionError(), "AssertionError: "),
        (StopIteration(), "StopIteration: "),
    ],
)
def test_an_exception_names_the_pass_and_its_cause(
    canonical: Graph, context: PassContext, cause: Exception, text: str
) -> None:
    error = error_of(canonical, context, Named("one"), Named("breaks", cause))
    assert str(error).startswith("pass breaks on the decode graph: ")
    assert text in str(error)
    assert str(error).endswith("(passes before it: one)")
    assert error.__cause__ is cause


@pytest.mark.parametrize("result", [None, 3, "layers.0"])
def test_a_pass_returns_a_list(canonical: Graph, context: PassContext, result: Any) -> None:
    class Wrong(Named):
        def run(self, graph: Graph, context: PassContext) -> Any:
            return result

    error = error_of(canonical, context, Wrong("wrong"))
    assert f"wrong.run returned {type(result).__name__}" in str(error)


def test_a_pass_without_run(canonical: Graph, context: PassContext) -> None:
    class Empty(GraphPass):
        name = "empty"

    with pytest.raises(UserError, match=r"^pass empty: Empty has no run; write def run\(self, gr"):
        run_passes(canonical, [Empty()], context)


def test_a_broken_contract_names_the_pass(canonical: Graph, context: PassContext) -> None:
    class Breaks(Named):
        def run(self, graph: Graph, context: PassContext) -> list[str]:
            del graph.output.meta["module"]
            return []

    error = error_of(canonical, context, Breaks("breaks"))
    assert "pass breaks on the decode graph" in str(error) and "carries no module" in str(error)
    assert isinstance(error.__cause__, ContractError)


def test_mutation_is_allowed_from_the_first_pass_that_brings_it(
    canonical: Graph, context: PassContext
) -> None:
    class Before(LowerMixers):
        name = "before"
        mutates = False

    error = error_of(canonical, context, Before(), LowerAttention())
    assert "pass before" in str(error) and "changes its argument before lowering" in str(error)
    run_passes(canonical.clone("decode"), [LowerAttention(), Before()], context)


def test_an_observers_error_names_the_pass(canonical: Graph, context: PassContext) -> None:
    def observe(graph: Graph, stage: str) -> None:
        if stage == "two":
            raise RuntimeError(f"logits differ after {stage}")

    with pytest.raises(CompileError) as error:
        run_passes(canonical.clone("decode"), [Named("one"), Named("two")], context, [observe])
    assert str(error.value) == (
        "pass two on the decode graph: RuntimeError: logits differ after two "
        "(passes before it: one)"
    )


def test_nobody_reads_what_an_observer_prints(canonical: Graph, context: PassContext) -> None:
    """As behind `| head`: no fault of a pass, and the entry point knows what to do."""

    def observe(graph: Graph, stage: str) -> None:
        if stage == "one":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_passes(canonical.clone("decode"), [Named("one")], context, [observe])


def test_an_error_stops_the_run(canonical: Graph, context: PassContext) -> None:
    seen: list[str] = []

    class Late(Named):
        def run(self, graph: Graph, context: PassContext) -> list[str]:
            seen.append(self.name)
            return []

    error_of(canonical, context, Named("breaks", ValueError("no")), Late("late"))
    assert seen == []
