"""The matcher: what stands for a pattern's nodes, inputs and scalars, and what does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from toy_graphs import Builder, aten, toy

from minivllm.compiler.graph import Graph
from minivllm.compiler.pattern import Match, Pattern, find, match_at

F32, BF16 = torch.float32, torch.bfloat16
ROW = ((2, 8), F32)


def pattern(
    function: Callable[..., Tensor], *names: str, scalars: Sequence[str] = (), shared: bool = False
) -> Pattern:
    """A pattern of float32 rows."""
    return Pattern(function, dict.fromkeys(names, ROW), scalars, shared)


def found(source: Graph, wanted: Pattern, body: Callable[[Builder], Node]) -> list[Match]:
    """The matches in the graph that `body` builds."""
    return find(toy(source, body), wanted)


def test_inputs_and_the_interior(source: Graph) -> None:
    wanted = pattern(lambda x, y: torch.relu(x.neg() * y).exp(), "x", "y")

    def body(b: Builder) -> Node:
        x = b.hidden()
        y = b.call(aten.sin.default, x)
        z = b.call(aten.mul.Tensor, b.call(aten.neg.default, x), y)
        return b.call(aten.cos.default, b.call(aten.exp.default, b.call(aten.relu.default, z)))

    graph = toy(source, body)
    (m,) = find(graph, wanted)
    (embedding,), (sin,) = graph.nodes(aten.embedding.default), graph.nodes(aten.sin.default)
    assert m.node.target is aten.exp.default
    assert m["x"] is embedding and m["y"] is sin
    assert {n.target for n in m.interior} == {
        aten.relu.default, aten.mul.Tensor, aten.neg.default,
    }  # fmt: skip
    assert m.node not in m.interior
    assert match_at(sin, wanted) is None
    assert match_at(m.node, wanted) == m


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sums_and_products_match_in_either_order(
    source: Graph, op: Any, order: tuple[int, int]
) -> None:
    wanted = pattern(lambda x, y: (torch.add if op is aten.add.Tensor else torch.mul)(
        x.relu(), y.exp()), "x", "y")  # fmt: skip

    def body(b: Builder) -> Node:
        x = b.hidden()
        sides = [
            b.call(aten.relu.default, b.call(aten.sin.default, x)),
            b.call(aten.exp.default, x),
        ]
        return b.call(op, *(sides[i] for i in order))

    (m,) = found(source, wanted, body)
    assert (m["x"].target, m["y"].target) == (aten.sin.default, aten.embedding.default)


def test_differences_and_alphas_do_not(source: Graph) -> None:
    def body(op: Any, **kwargs: Any) -> Callable[[Builder], Node]:
        def build(b: Builder) -> Node:
            x = b.hidden()
            left, right = b.call(aten.exp.default, x), b.call(aten.relu.default, x)
            return b.call(op, left, right, **kwargs)

        return build

    difference = pattern(lambda x, y: x.relu() - y.exp(), "x", "y")
    assert found(source, difference, body(aten.sub.Tensor)) == []
    scaled = pattern(lambda x, y: torch.add(x.relu(), y.exp(), alpha=2), "x", "y")
    assert found(source, scaled, body(aten.add.Tensor, alpha=2)) == []
    other = pattern(lambda x, y: torch.add(x.exp(), y.relu(), alpha=2), "x", "y")
    assert len(found(source, other, body(aten.add.Tensor, alpha=2))) == 1
    assert found(source, other, body(aten.add.Tensor, alpha=3)) == []
    assert found(source, other, body(aten.add.Tensor)) == []


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_an_order_that_leads_nowhere_is_taken_back(source: Graph, outer: bool, inner: bool) -> None:
    """`x * y + x`: which factor is x is only known at the sum."""
    wanted = pattern(lambda x, y: (x * y) + x.exp(), "x", "y")

    def body(b: Builder) -> Node:
        x = b.hidden()
        y = b.call(aten.sin.default, x)
        factors = (y, x) if inner else (x, y)
        terms = [b.call(aten.mul.Tensor, *factors), b.call(aten.exp.default, x)]
        return b.call(aten.add.Tensor, *(reversed(terms) if outer else terms))

    (m,) = found(source, wanted, body)
    assert (m["x"].target, m["y"].target) == (aten.embedding.default, aten.sin.default)


def test_both_sides_could_be_either(source: Graph) -> None:
    """Two products under a sum: four orders, one of which fits."""
    wanted = pattern(lambda x, y, z: (x * y) + (y.relu() * z), "x", "y", "z")

    ops = (aten.sin.default, aten.cos.default, aten.exp.default)

    def body(b: Builder) -> Node:
        hidden = b.hidden()
        x, y, z = (b.call(op, hidden) for op in ops)
        right = b.call(aten.mul.Tensor, y, x)
        left = b.call(aten.mul.Tensor, z, b.call(aten.relu.default, y))
        return b.call(aten.add.Tensor, left, right)

    (m,) = found(source, wanted, body)
    assert [m[n].target for n in "xyz"] == list(ops)


@pytest.mark.parametrize("same", [True, False])
def test_an_input_that_occurs_twice_is_one_node(source: Graph, same: bool) -> None:
    wanted = pattern(lambda x: x.exp() * x.relu(), "x")

    def body(b: Builder) -> Node:
        x = b.hidden()
        other = x if same else b.call(aten.sin.default, x)
        return b.call(
            aten.mul.Tensor, b.call(aten.relu.default, x), b.call(aten.exp.default, other)
        )

    assert len(found(source, wanted, body)) == int(same)


@pytest.mark.parametrize("same", [True, False])
def test_a_value_read_twice_is_one_node(source: Graph, same: bool) -> None:
    """The pattern's `exp(x)` has two readers; two different ones of the graph cannot be it."""
    wanted = pattern(lambda x: (e := x.exp()).relu() * e.neg(), "x")

    def body(b: Builder) -> Node:
        x = b.hidden()
        first = b.call(aten.exp.default, x)
        second = first if same else b.call(aten.exp.default, x)
        return b.call(
            aten.mul.Tensor, b.call(aten.relu.default, first), b.call(aten.neg.default, second)
        )

    assert len(found(source, wanted, body)) == int(same)


def test_two_inputs_may_be_one_node(source: Graph) -> None:
    wanted = pattern(lambda x, y: x.exp() * y.relu(), "x", "y")

    def body(b: Builder) -> Node:
        x = b.hidden()
        return b.call(aten.mul.Tensor, b.call(aten.exp.default, x), b.call(aten.relu.default, x))

    (m,) = found(source, wanted, body)
    assert m["x"] is m["y"]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_input_has_its_dtype(source: Graph, dtype: torch.dtype) -> None:
    """Else a product of a bfloat16 and a float32 value would be taken for one of two bfloat16."""
    wanted = Pattern(lambda x, y: x.relu() * y, {"x": ROW, "y": ((2, 8), dtype)})

    def body(b: Builder) -> Node:
        x = b.hidden()
        y = b.call(aten.to.dtype, b.call(aten.neg.default, x), BF16)
        return b.call(aten.mul.Tensor, b.call(aten.relu.default, x), y)

    assert len(found(source, wanted, body)) == int(dtype == BF16)


@pytest.mark.parametrize("flip", [False, True])
def test_a_vector_is_told_from_rows(source: Graph, flip: bool) -> None:
    """`x + w` and `w + x`: the order does not say which of them is the weight."""
    wanted = Pattern(lambda x, w: (x + w).exp(), {"x": ROW, "w": ((8,), F32)})

    def body(other: bool) -> Callable[[Builder], Node]:
        def build(b: Builder) -> Node:
            x = b.hidden()
            w = b.call(aten.neg.default, x) if other else b.weight("w", 8)
            total = b.call(aten.add.Tensor, *((w, x) if flip else (x, w)))
            return b.call(aten.exp.default, total)

        return build

    (m,) = found(source, wanted, body(False))
    assert (m["x"].target, m["w"].target) == (aten.embedding.default, "w")
    assert found(source, wanted, body(True)) == []


@pytest.mark.parametrize("value", [1e-6, 0.5, 3, 0])
def test_a_scalar_matches_any_number(source: Graph, value: float) -> None:
    wanted = pattern(lambda x, a, b: (x.exp() + a) * b, "x", scalars=("a", "b"))

    def body(b: Builder) -> Node:
        total = b.call(aten.add.Tensor, b.call(aten.exp.default, b.hidden()), value)
        return b.call(aten.mul.Tensor, total, -2.5)

    (m,) = found(source, wanted, body)
    assert (m["a"], m["b"]) == (value, -2.5)


def test_a_scalar_is_no_tensor_and_no_bool(source: Graph) -> None:
    wanted = pattern(lambda x, a: x.exp() + a, "x", scalars=("a",))

    def with_tensor(b: Builder) -> Node:
        x = b.hidden()
        return b.call(aten.add.Tensor, b.call(aten.exp.default, x), x)

    def with_bool(b: Builder) -> Node:
        return b.call(aten.add.Tensor, b.call(aten.exp.default, b.hidden()), True)

    assert found(source, wanted, with_tensor) == []
    assert found(source, wanted, with_bool) == []


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (0.5, 0.25)])
def test_a_scalar_that_occurs_twice_is_one_number(
    source: Graph, first: float, second: float
) -> None:
    wanted = pattern(lambda x, a: (x.exp() + a).relu() + a, "x", scalars=("a",))

    def body(b: Builder) -> Node:
        inner = b.call(aten.add.Tensor, b.call(aten.exp.default, b.hidden()), first)
        return b.call(aten.add.Tensor, b.call(aten.relu.default, inner), second)

    assert len(found(source, wanted, body)) == int(first == second)


@pytest.mark.parametrize(
    ("value", "fits"), [(1.0, True), (1, True), (True, False), (2.0, False), (-1.0, False)]
)
def test_a_literal_matches_by_value(source: Graph, value: Any, fits: bool) -> None:
    """`1 + w` and `1.0 + w` are one thing; `True` is a flag."""
    wanted = pattern(lambda x: x.exp() + 1.0, "x")

    def body(b: Builder) -> Node:
        return b.call(aten.add.Tensor, b.call(aten.exp.default, b.hidden()), value)

    assert len(found(source, wanted, body)) == int(fits)


@pytest.mark.parametrize(
    ("dims", "keepdim", "fits"),
    [([-1], True, True), ([-1], False, False), ([0], True, False), ([0, -1], True, False)],
)
def test_list_arguments(source: Graph, dims: list[int], keepdim: bool, fits: bool) -> None:
    wanted = pattern(lambda x: x.exp().mean([-1], True).expand(-1, 8), "x")

    def body(b: Builder) -> Node:
        mean = b.call(aten.mean.dim, b.call(aten.exp.default, b.hidden()), dims, keepdim)
        if not keepdim:
            mean = b.call(aten.unsqueeze.default, mean, -1)
        return b.call(aten.expand.default, mean, [-1, 8])

    assert len(found(source, wanted, body)) == int(fits)


def test_lists_of_nodes(source: Graph) -> None:
    wanted = pattern(lambda x, y: torch.cat([x.neg(), y.exp()], -1), "x", "y")

    def body(flip: bool, count: int = 2) -> Callable[[Builder], Node]:
        def build(b: Builder) -> Node:
            x = b.hidden()
            parts = [b.call(aten.neg.default, x), b.call(aten.exp.default, x)]
            parts = [*(reversed(parts) if flip else parts), *[x] * (count - 2)]
            return b.call(aten.cat.default, parts, -1)

        return build

    assert len(found(source, wanted, body(False))) == 1
    assert found(source, wanted, body(True)) == [], "a list has an order"
    assert found(source, wanted, body(False, 3)) == []


def test_keywords(source: Graph) -> None:
    wanted = pattern(lambda x: x.exp().sum([-1], dtype=torch.float64), "x")

    def body(**kwargs: Any) -> Callable[[Builder], Node]:
        return lambda b: b.call(
            aten.sum.dim_IntList, b.call(aten.exp.default, b.hidden()), [-1], **kwargs
        )

    assert len(found(source, wanted, body(dtype=torch.float64))) == 1
    assert found(source, wanted, body(dtype=BF16)) == []
    assert found(source, wanted, body()) == []


def with_outside_user(b: Builder) -> Node:
    """exp(-x), whose interior is read again."""
    x = b.hidden()
    inner = b.call(aten.neg.default, x)
    return b.call(aten.add.Tensor, b.call(aten.exp.default, inner), inner)


def test_an_interior_value_that_is_read_outside(source: Graph) -> None:
    assert found(source, pattern(lambda x: x.neg().exp(), "x"), with_outside_user) == []
    (m,) = found(source, pattern(lambda x: x.neg().exp(), "x", shared=True), with_outside_user)
    assert {n.target for n in m.interior} == {aten.neg.default}


def test_the_graphs_output_may_not_be_interior(source: Graph) -> None:
    def body(b: Builder) -> Node:
        inner = b.call(aten.neg.default, b.hidden())
        b.call(aten.exp.default, inner)
        return inner

    assert found(source, pattern(lambda x: x.neg().exp(), "x"), body) == []


def test_a_value_and_an_input_may_have_other_readers(source: Graph) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        value = b.call(aten.exp.default, b.call(aten.neg.default, x))
        return b.call(aten.add.Tensor, b.call(aten.mul.Tensor, value, value), x)

    assert len(found(source, pattern(lambda x: x.neg().exp(), "x"), body)) == 1


def test_another_order_with_a_private_interior_is_found(source: Graph) -> None:
    """`relu(x) + y` at a sum of two relus, one of which is read again: the other one is x's."""
    wanted = pattern(lambda x, y: x.relu() + y, "x", "y")

    def body(b: Builder) -> Node:
        x = b.hidden()
        public = b.call(aten.relu.default, x)
        private = b.call(aten.relu.default, b.call(aten.sin.default, x))
        total = b.call(aten.add.Tensor, public, private)
        return b.call(aten.mul.Tensor, total, public)

    (m,) = found(source, wanted, body)
    assert (m["x"].target, m["y"].target) == (aten.sin.default, aten.relu.default)


def chain(length: int) -> Callable[[Builder], Node]:
    def build(b: Builder) -> Node:
        x = b.hidden()
        for _ in range(length):
            x = b.call(aten.neg.default, x)
        return x

    return build


@pytest.mark.parametrize(("length", "count"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_outermost_first_and_never_overlapping(source: Graph, length: int, count: int) -> None:
    graph = toy(source, chain(length))
    matches = find(graph, pattern(lambda x: x.neg().neg(), "x"))
    nodes = graph.nodes(aten.neg.default)
    # from the end: the last two, then the two before them
    assert [m.node for m in matches] == [nodes[length - 1 - 2 * i] for i in range(count)]
    covered = [n for m in matches for n in (m.node, *m.interior)]
    assert len(set(covered)) == len(covered) == 2 * count
    for outer, inner in itertools.pairwise(matches):
        assert outer["x"] is inner.node, "a chain: one match's input is the next one's value"


def test_shared_matches_do_not_overlap_either(source: Graph) -> None:
    def body(b: Builder) -> Node:
        inner = b.call(aten.neg.default, b.hidden())
        return b.call(
            aten.add.Tensor, *(b.call(aten.exp.default, inner, module=m) for m in ("a", "b"))
        )

    matches = found(source, pattern(lambda x: x.neg().exp(), "x", shared=True), body)
    assert [m.node.meta["module"] for m in matches] == ["b"]


def test_patterns_are_canonical(source: Graph) -> None:
    """A pattern's no-op casts, squares and repetitions have the spelling of the graph's."""
    wanted = pattern(lambda x: (x.float() * x.float()).type_as(x) + x.to(F32).exp(), "x")

    def body(b: Builder) -> Node:
        x = b.hidden()
        return b.call(
            aten.add.Tensor,
            b.call(aten.exp.default, x),
            b.call(aten.pow.Tensor_Scalar, x, 2),
        )

    assert len(found(source, wanted, body)) == 1


def test_a_pattern_that_is_an_input_or_a_graph_without_calls(source: Graph) -> None:
    wanted = pattern(lambda x: x.exp(), "x")
    assert found(source, wanted, lambda b: b.hidden()) == []
    graph = toy(source, lambda b: b.hidden())
    leaf = next(n for n in graph.fx.nodes if n.op == "get_attr")
    assert match_at(leaf, wanted) is None
