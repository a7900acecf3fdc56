"""canonicalize: what does nothing goes, what is computed twice is computed once."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import IDS, TABLE, Builder, apply, aten, code, evaluate, randn, targets, toy

from minivllm.compiler.contract import check, is_mutation
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.canonicalize import (
    ASSERTIONS,
    Canonicalize,
    is_identity,
    remove_unused,
)
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.runner import run_passes


@pytest.mark.parametrize("phase", PHASES)
def test_canonicalize_the_model(source: Graph, context: PassContext, phase: str) -> None:
    graph = source.clone(phase)
    before = Counter(n.target for n in graph.nodes())
    (report,) = run_passes(graph, [Canonicalize()], context)
    after = Counter(n.target for n in graph.nodes())
    assert (
        report.matches
        == before.total() - after.total()
        == report.calls_before - (report.calls_after)
    )
    assert not any(after[a] for a in ASSERTIONS)
    assert not any(is_identity(n) for n in graph.nodes())
    assert len(graph.nodes()) == len({call_text(n) for n in graph.nodes()})
    # in float32 one cast is left, that of the positions
    assert (before[aten.to.dtype], after[aten.to.dtype]) == (34, 1)
    # of each head's slices, those that take a part of it: the turned dims and the others, twice
    assert before[aten.slice.Tensor] > after[aten.slice.Tensor] == 4
    for target in (aten.linear.default, aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.cat.default):
        assert before[target] == after[target] > 0
    assert set(graph.weights) == set(source.weights)


def call_text(node: Node) -> str:
    return f"{node.target} {node.args} {node.kwargs}"


def test_canonicalize_keeps_the_casts_of_bfloat16(half_source: Graph, context: PassContext) -> None:
    graph = half_source.clone("decode")
    casts = [n for n in graph.nodes(aten.to.dtype) if not is_identity(n)]
    run_passes(graph, [Canonicalize()], context)
    left = graph.nodes(aten.to.dtype)
    assert len(left) == len({(n.args[0], n.args[1]) for n in casts}) > 20
    for node in left:
        assert node.args[0].meta["val"].dtype != node.args[1]


@pytest.mark.parametrize("phase", PHASES)
def test_canonicalize_twice_is_once(source: Graph, context: PassContext, phase: str) -> None:
    graph = source.clone(phase)
    Canonicalize().run(graph, context)
    once = code(graph)
    assert Canonicalize().run(graph, context) == []
    assert code(graph) == once


def test_canonicalize_does_not_undo_the_lowering(source: Graph, context: PassContext) -> None:
    for phase in PHASES:
        graph = source.clone(phase)
        run_passes(graph, select_passes("compiled", phase), context)
        before = Counter(n.target for n in graph.nodes() if is_mutation(n))
        removed = Canonicalize().run(graph, context)
        check(graph, may_mutate=True)
        assert Counter(n.target for n in graph.nodes() if is_mutation(n)) == before
        assert removed == []


def test_equal_calls_become_one(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        first = b.call(aten.relu.default, b.call(aten.neg.default, x))
        second = b.call(aten.relu.default, b.call(aten.neg.default, x))
        return b.call(aten.sub.Tensor, first, second)

    graph = toy(source, body)
    assert apply(graph, Canonicalize(), context) == 2
    assert targets(graph) == ["aten.embedding", "aten.neg", "aten.relu", "aten.sub.Tensor"]
    result = evaluate(graph, {"input_ids": IDS}, TABLE)
    assert torch.equal(result, torch.zeros(9, 8))


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (1, True), (1.0, True), (0, False), (0.0, -0.0), (2, 3), (1.0, 1.0 + 1e-16 + 2e-16)],
)
def test_arguments_of_another_type_or_value_stay_apart(
    source: Graph, context: PassContext, first: Any, second: Any
) -> None:
    """`1 == 1.0 == True` in Python, and not in torch: the sum's dtype follows the type."""

    def body(b: Builder) -> Node:
        x = b.hidden()
        return b.call(
            aten.cat.default,
            [b.call(aten.add.Scalar, x, v, module=f"layers.{i}.mlp")
             for i, v in enumerate((first, second))],
        )  # fmt: skip

    graph = toy(source, body)
    assert apply(graph, Canonicalize(), context) == 0
    assert targets(graph).count("aten.add.Scalar") == 2
    same = toy(source, lambda b: body_with(b, first))
    assert apply(same, Canonicalize(), context) == 1
    assert targets(same).count("aten.add.Scalar") == 1


def body_with(b: Builder, value: Any) -> Node:
    x = b.hidden()
    return b.call(aten.cat.default, [b.call(aten.add.Scalar, x, value) for _ in range(2)])


def test_keywords_and_lists_tell_calls_apart(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        sums = [
            b.call(aten.sum.dim_IntList, x, [-1], True),
            b.call(aten.sum.dim_IntList, x, [-1], True, dtype=torch.float64),
            b.call(aten.sum.dim_IntList, x, [-1], True, dtype=torch.float32),
            b.call(aten.sum.dim_IntList, x, [0], True, dtype=torch.float32),
            b.call(aten.sum.dim_IntList, x, [0], True, dtype=torch.float32),
        ]
        total = sums[0]
        for s in sums[1:]:
            total = b.call(aten.add.Tensor, total, s)
        return total

    graph = toy(source, body)
    assert apply(graph, Canonicalize(), context) == 1
    assert targets(graph).count("aten.sum.dim_IntList") == 4


def test_mutations_are_never_merged_or_dropped(source: Graph, context: PassContext) -> None:
    """Two equal writes are two writes, and a read behind a write is another read."""

    def body(b: Builder) -> Node:
        pool, slots = b.state("layers.0.conv", "slot", 8), b.input("state_slots")
        old = b.call(aten.index_select.default, pool, 0, slots)
        more = b.call(aten.add.Scalar, old, 1.0)
        b.call(aten.index_copy_.default, pool, 0, slots, more)
        again = b.call(aten.index_select.default, pool, 0, slots)
        b.call(aten.index_add_.default, pool, 0, slots, old)
        b.call(aten.index_add_.default, pool, 0, slots, old)
        last = b.call(aten.index_select.default, pool, 0, slots)
        return b.call(aten.cat.default, [old, again, last])

    graph = toy(source, body)
    before = code(graph)
    assert Canonicalize().run(graph, context) == []
    assert code(graph) == before
    pool = randn(5, 8)
    start = pool.clone()
    slots = torch.tensor([3, 1])
    result = evaluate(graph, {"state_slots": slots}, {}, {"state.layers.0.conv": pool})
    old = start[slots]
    torch.testing.assert_close(result, torch.cat([old, old + 1, 3 * old + 1]))


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "same"),
    [
        (aten.to.dtype, (torch.float32,), {}, True),
        (aten.to.dtype, (torch.bfloat16,), {}, False),
        (aten.to.dtype, (torch.float32, False, True), {}, False),  # an explicit copy
        (aten.slice.Tensor, (), {}, True),
        (aten.slice.Tensor, (0, 0, sys.maxsize), {}, True),
        (aten.slice.Tensor, (1, None, None, 1), {}, True),
        (aten.slice.Tensor, (1, 0, 8), {}, False),  # all of it, but that is not looked up
        (aten.slice.Tensor, (1, 2, sys.maxsize), {}, False),
        (aten.slice.Tensor, (1, 0, 7), {}, False),
        (aten.slice.Tensor, (1, 0, sys.maxsize, 2), {}, False),
        (aten.slice.Tensor, (1,), {"start": 2}, False),
        (aten.slice.Tensor, (1, -8, sys.maxsize), {}, False),
        (aten.alias.default, (), {}, True),
        (aten.detach.default, (), {}, True),
        (aten.clone.default, (), {}, False),
        (aten.relu.default, (), {}, False),
    ],
)
def test_what_does_nothing_is_dropped(
    source: Graph, context: PassContext, target: Any, args: Any, kwargs: Any, same: bool
) -> None:
    graph = toy(source, lambda b: b.call(target, b.hidden(), *args, **kwargs))
    expected = evaluate(graph, {"input_ids": IDS}, TABLE)
    assert apply(graph, Canonicalize(), context) == int(same)
    assert len(graph.nodes()) == (1 if same else 2)
    torch.testing.assert_close(evaluate(graph, {"input_ids": IDS}, TABLE), expected)


def test_unused_calls_and_weights_are_dropped(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        b.call(aten.relu.default, b.call(aten.mul.Tensor, x, b.weight("norm.weight", 8)))
        return x

    graph = toy(source, body)
    assert set(graph.weights) == {"embed_tokens.weight", "norm.weight"}
    assert apply(graph, Canonicalize(), context) == 2
    assert targets(graph) == ["aten.embedding"]
    assert set(graph.weights) == {"embed_tokens.weight"}
    assert remove_unused(graph) == []


def test_an_unused_state_is_dropped_and_a_written_one_kept(source: Graph) -> None:
    def body(b: Builder) -> Node:
        slots = b.input("state_slots")
        b.call(aten.index_select.default, b.state("layers.0.conv", "slot", 8), 0, slots)
        x = b.hidden()
        b.call(aten.index_copy_.default, b.state("layers.1.conv", "slot", 8), 0, slots, x)
        return x

    graph = toy(source, body, "decode")
    assert remove_unused(graph) == ["layers.0.mixer"]
    assert set(graph.states) == {"state.layers.1.conv"}
    assert "aten.index_copy_" in targets(graph)


def test_assertions_are_dropped_with_what_they_ask(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        b.call(aten._assert_tensor_metadata.default, x, dtype=torch.float32)
        return x

    graph = toy(source, body)
    assert apply(graph, Canonicalize(), context) == 1
    assert targets(graph) == ["aten.embedding"]


@pytest.mark.parametrize("spelling", ["square", "product", "power"])
def test_squares_have_one_spelling(source: Graph, context: PassContext, spelling: str) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        if spelling == "square":
            return b.call(aten.square.default, x)
        if spelling == "product":
            return b.call(aten.mul.Tensor, x, x)
        return b.call(aten.pow.Tensor_Scalar, x, 2)

    graph = toy(source, body)
    expected = evaluate(graph, {"input_ids": IDS}, TABLE)
    apply(graph, Canonicalize(), context)
    assert targets(graph) == ["aten.embedding", "aten.pow.Tensor_Scalar"]
    assert graph.output.args[1] == 2 and isinstance(graph.output.args[1], int)
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, TABLE), expected)


def test_a_product_of_two_things_is_no_square(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        y = b.call(aten.mul.Tensor, x, b.call(aten.relu.default, x))
        return b.call(aten.mul.Tensor, y, 2.0)

    graph = toy(source, body)
    before = code(graph)
    assert apply(graph, Canonicalize(), context) == 0
    assert code(graph) == before


def test_what_only_a_respelled_call_read_may_be_needed_again(
    source: Graph, context: PassContext
) -> None:
    """The first relu loses its only reader; the second one, equal to it, must not vanish too."""

    def body(b: Builder) -> Node:
        x = b.hidden()
        y = b.call(aten.type_as.default, b.call(aten.neg.default, x), b.call(aten.relu.default, x))
        return b.call(aten.add.Tensor, y, b.call(aten.relu.default, x))

    graph = toy(source, body)
    expected = evaluate(graph, {"input_ids": IDS}, TABLE)
    apply(graph, Canonicalize(), context)
    assert sorted(targets(graph)) == ["aten.add.Tensor", "aten.embedding", "aten.neg", "aten.relu"]
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, TABLE), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_type_as_is_a_cast(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    """And a cast to the type that is there already is none."""

    def body(b: Builder) -> Node:
        x = b.hidden()
        other = b.call(aten.to.dtype, b.call(aten.relu.default, x), dtype)
        return b.call(aten.mul.Tensor, b.call(aten.type_as.default, x, other), other)

    graph = toy(source, body)
    expected = evaluate(graph, {"input_ids": IDS}, TABLE)
    apply(graph, Canonicalize(), context)
    assert "aten.type_as" not in targets(graph)
    assert targets(graph).count("aten.to.dtype") == (0 if dtype == torch.float32 else 2)
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, TABLE), expected)
