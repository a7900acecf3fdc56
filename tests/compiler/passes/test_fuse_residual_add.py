"""fuse_residual_add: a norm does the addition it stands behind, and hands on the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import IDS, Builder, apply, aten, code, evaluate, randn, targets, toy

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.canonicalize import remove_unused
from minivllm.compiler.passes.fuse_norms import FuseNorms
from minivllm.compiler.passes.fuse_residual_add import FuseResidualAdd
from minivllm.compiler.runner import run_passes
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
NORM, BOTH = OPS["rms_norm"].overload, OPS["add_rms_norm"].overload
EPS = 1e-2
WEIGHTS = {
    "embed_tokens.weight": randn(61, 8),
    "w": randn(8, seed=1),
    "v": randn(8, seed=2),
    "u": randn(8, seed=3),
}


class Typed(Builder):
    """Builds in one dtype."""

    dtype = torch.float32

    def start(self) -> tuple[Node, Node, Node, Node]:
        """Two values and two weights."""
        x = self.hidden(dtype=self.dtype)
        weights = [self.weight(name, 8, dtype=self.dtype) for name in ("w", "v")]
        return x, self.call(aten.sin.default, x), *weights

    def add(self, x: Node, y: Node) -> Node:
        return self.call(aten.add.Tensor, x, y)

    def norm(self, x: Node, w: Node, module: str = "norm", **changes: Any) -> Node:
        settings = {"eps": EPS, "offset": 1.0, "cast_first": False} | changes
        return self.call(NORM, x, w, *settings.values(), module=module)


Body = Callable[[Typed], Node]


def fused(source: Graph, context: PassContext, body: Body, sites: int, dtype: Any) -> Graph:
    """The graph of `body` behind the pass; its output is the same to the bit."""

    def build(b: Builder) -> Node:
        typed = Typed(b.graph, b.anchor)
        typed.dtype = dtype
        return body(typed)

    graph = toy(source, build)
    remove_unused(graph)
    before = code(graph)
    expected = evaluate(graph, {"input_ids": IDS}, WEIGHTS)
    assert apply(graph, FuseResidualAdd(), context) == sites
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, WEIGHTS), expected)
    assert (code(graph) == before) == (sites == 0)
    return graph


def one(b: Typed) -> Node:
    """The sum is normalised and read again."""
    x, y, w, _ = b.start()
    total = b.add(x, y)
    return b.add(b.norm(total, w, "layers.1.norm"), total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    graph = fused(source, context, one, 1, dtype)
    assert targets(graph) == [
        "aten.embedding", "aten.sin", "minivllm.add_rms_norm",
        "<built-in function getitem>", "<built-in function getitem>", "aten.add.Tensor",
    ]  # fmt: skip
    (both,) = graph.nodes(BOTH)
    x, residual = both.args[:2]
    # the branch is added to the stream: residual + x
    assert (x.target, residual.target) == (aten.sin.default, aten.embedding.default)
    assert both.args[3:] == (EPS, 1.0, False)
    # it is the norm's: the addition may belong to the layer before
    assert both.meta["module"] == "layers.1.norm"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "cast_first"), [(0.0, False), (0.0, True), (1.0, False)])
def test_every_convention(
    source: Graph, context: PassContext, offset: float, cast_first: bool, dtype: torch.dtype
) -> None:
    def body(b: Typed) -> Node:
        x, y, w, _ = b.start()
        return b.norm(b.add(x, y), w, eps=0.5, offset=offset, cast_first=cast_first)

    graph = fused(source, context, body, 1, dtype)
    assert graph.nodes(BOTH)[0].args[3:] == (0.5, offset, cast_first)
    # the sum itself is not read: it is not handed on
    assert targets(graph)[-2:] == ["minivllm.add_rms_norm", "<built-in function getitem>"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    """A residual stream through four blocks."""

    def body(b: Typed) -> Node:
        x, y, w, v = b.start()
        for i in range(4):
            x = b.add(x, y)
            y = b.call(aten.cos.default, b.norm(x, (w, v)[i % 2], f"layers.{i}"))
        return b.add(x, y)

    graph = fused(source, context, body, 4, dtype)
    names = Counter(targets(graph))
    assert names["minivllm.add_rms_norm"] == 4 and names["aten.add.Tensor"] == 1
    assert "minivllm.rms_norm" not in names
    assert [n.meta["module"] for n in graph.nodes(BOTH)] == [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_norms_of_one_sum(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    """The first one adds, the second one reads the sum."""

    def body(b: Typed) -> Node:
        x, y, w, v = b.start()
        total = b.add(x, y)
        b.call(aten.relu.default, total)
        return b.add(b.norm(total, w), b.norm(total, v))

    graph = fused(source, context, body, 1, dtype)
    (norm,) = graph.nodes(NORM)
    assert norm.args[0].args == (graph.nodes(BOTH)[0], 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_read_before_the_norm(
    source: Graph, context: PassContext, dtype: torch.dtype
) -> None:
    def body(b: Typed) -> Node:
        x, y, w, _ = b.start()
        total = b.add(x, y)
        early = b.call(aten.exp.default, total)
        return b.add(early, b.norm(total, w))

    fused(source, context, body, 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_norm(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    """Only what stands right behind an addition; a norm can be a branch, too."""

    def body(b: Typed) -> Node:
        x, y, w, v = b.start()
        inner = b.norm(b.add(x, y), w)
        return b.norm(b.add(inner, b.norm(inner, v)), w)

    graph = fused(source, context, body, 2, dtype)
    assert len(graph.nodes(NORM)) == 1


def without_addition(b: Typed) -> Node:
    x, _, w, _ = b.start()
    return b.norm(x, w)


def twice_one_value(b: Typed) -> Node:
    x, _, w, _ = b.start()
    return b.norm(b.add(x, x), w)


def plus_a_number(b: Typed) -> Node:
    x, _, w, _ = b.start()
    return b.norm(b.call(aten.add.Tensor, x, 0.5), w)


def with_alpha(b: Typed) -> Node:
    x, y, w, _ = b.start()
    return b.norm(b.call(aten.add.Tensor, x, y, alpha=0.5), w)


def a_bias(b: Typed) -> Node:
    """One row for all tokens."""
    x, _, w, v = b.start()
    return b.norm(b.add(x, v), w)


def a_column(b: Typed) -> Node:
    x, y, w, _ = b.start()
    return b.norm(b.add(b.call(aten.slice.Tensor, x, 1, 0, 1), y), w)


def another_dtype(b: Typed) -> Node:
    """The sum is promoted: the op would take the dtype of one addend."""
    x, y, _, _ = b.start()
    other = torch.bfloat16 if b.dtype == torch.float32 else torch.float32
    total = b.add(b.call(aten.to.dtype, x, other), y)
    return b.norm(total, b.weight("u", 8))


def subtraction(b: Typed) -> Node:
    x, y, w, _ = b.start()
    return b.norm(b.call(aten.sub.Tensor, x, y), w)


def behind_a_view(b: Typed) -> Node:
    x, y, w, _ = b.start()
    total = b.call(aten.relu.default, b.add(x, y))
    return b.norm(total, w)


def computed_weight(b: Typed) -> Node:
    """A weight that exists only behind the addition, where the fused op would stand."""
    x, y, w, _ = b.start()
    total = b.add(x, y)
    return b.norm(total, b.call(aten.exp.default, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", [
    without_addition, twice_one_value, plus_a_number, with_alpha, a_bias, a_column, another_dtype,
    subtraction, behind_a_view, computed_weight,
])  # fmt: skip
def test_what_is_no_residual_addition_stays(
    source: Graph, context: PassContext, body: Body, dtype: torch.dtype
) -> None:
    fused(source, context, body, 0, dtype)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model(
    canonical: Graph, half_canonical: Graph, context: PassContext, phase: str, dtype: torch.dtype
) -> None:
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    run_passes(graph, [FuseNorms()], context)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [FuseResidualAdd()], context)
    assert (report.matches, report.expected) == (4, 4)
    after = Counter(targets(graph))
    # of the norms, that of the embedding and those of q and k are left
    assert (before["minivllm.rms_norm"], after["minivllm.rms_norm"]) == (7, 3)
    assert before["aten.add.Tensor"] - after["aten.add.Tensor"] == 4
    assert after["minivllm.add_rms_norm"] == 4
    modules = [n.meta["module"] for n in graph.nodes(BOTH)]
    assert modules == [
        "layers.0.post_attention_layernorm",
        "layers.1.input_layernorm",  # whose addition is layer 0's last
        "layers.1.post_attention_layernorm",
        "norm",
    ]
