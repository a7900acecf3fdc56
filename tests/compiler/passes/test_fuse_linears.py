"""fuse_linear_epilogues, fuse_linear_prologues, decode_linears: what stands around a linear."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import IDS, Builder, apply, aten, code, evaluate, randn, targets, toy

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.passes.canonicalize import remove_unused
from minivllm.compiler.passes.decode_linears import DecodeLinears
from minivllm.compiler.passes.fuse_linear_epilogues import FuseLinearEpilogues
from minivllm.compiler.passes.fuse_linear_prologues import FuseLinearPrologues
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.runner import run_passes
from minivllm.compiler.verify import Verifier
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
PASSES = [FuseLinearEpilogues(), FuseLinearPrologues(), DecodeLinears()]
EPILOGUES, PROLOGUES, LINEARS = PASSES
GETITEM = "<built-in function getitem>"
SHAPES = {
    "embed_tokens.weight": (61, 8),
    "w": (8, 8),
    "u": (8, 8),
    "merged": (24, 8),
    "n": (8,),
    "g": (4,),
    "b": (8,),
}
WEIGHTS = {name: randn(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


class Typed(Builder):
    """Builds in one dtype; `x` is the residual stream."""

    dtype = torch.float32
    x: Node

    def leaf(self, name: str) -> Node:
        known = [n for n in self.graph.fx.nodes if n.op == "get_attr" and n.target == name]
        return known[0] if known else self.weight(name, *SHAPES[name], dtype=self.dtype)

    def linear(self, x: Node, name: str = "w", **meta: str) -> Node:
        return self.call(aten.linear.default, x, self.leaf(name), **meta)

    def norm(self, y: Node, x: Node, **meta: str) -> tuple[Node, Node]:
        """The norm of a branch added to the stream, and the sum."""
        op = OPS["add_rms_norm"].overload
        both = self.call(op, y, x, self.leaf("n"), 1e-2, 1.0, False, **meta)
        return tuple(self.call(operator.getitem, both, i) for i in range(2))  # type: ignore[return-value]

    def swiglu(self, x: Node, sizes: Any = (12, 12), halves: Any = (0, 1)) -> Node:
        split = self.call(aten.split_with_sizes.default, self.linear(x, "merged"), list(sizes), -1)
        parts = [self.call(operator.getitem, split, i) for i in halves]
        return self.call(OPS["silu_mul"].overload, *parts, module="layers.0.mlp")

    def heads(self, x: Node) -> Node:
        return self.call(aten.unflatten.int, x, -1, [-1, 4])

    def flat(self, x: Node) -> Node:
        return self.call(aten.flatten.using_ints, x, -2)

    def gated_norm(self, x: Node, z: Node) -> Node:
        op = OPS["gated_rms_norm"].overload
        return self.call(op, self.heads(x), self.heads(z), self.leaf("g"), 0.5)

    def output_gate(self, x: Node, z: Node) -> Node:
        return self.call(OPS["sigmoid_mul"].overload, self.heads(x), self.heads(z))


Body = Callable[[Typed], Node]


def fused(
    source: Graph,
    context: PassContext,
    body: Body,
    passes: dict[GraphPass, int],
    dtype: torch.dtype = torch.float32,
) -> Graph:
    """The decode graph of `body` behind passes with so many sites; it computes the same bits."""

    def build(b: Builder) -> Node:
        typed = Typed(b.graph, b.anchor)
        typed.dtype = dtype
        typed.x = typed.hidden(dtype=dtype)
        return body(typed)

    graph = toy(source, build, "decode")
    remove_unused(graph)
    before = code(graph)
    expected = evaluate(graph, {"input_ids": IDS}, WEIGHTS)
    for graph_pass, sites in passes.items():
        assert apply(graph, graph_pass, context) == sites
    actual = evaluate(graph, {"input_ids": IDS}, WEIGHTS)
    assert torch.equal(actual, expected) and actual.isfinite().all()
    assert (code(graph) == before) == (sum(passes.values()) == 0)
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_behind_a_linear(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    def body(b: Typed) -> Node:
        y = b.linear(b.call(aten.sin.default, b.x), module="layers.0.mlp.down_proj")
        normed, total = b.norm(y, b.x, module="layers.1.input_layernorm")
        return b.call(aten.add.Tensor, normed, total)

    graph = fused(source, context, body, {EPILOGUES: 1, PROLOGUES: 0, LINEARS: 0}, dtype)
    assert targets(graph) == [
        "aten.embedding", "aten.sin", "minivllm.linear_add_rms_norm", GETITEM, GETITEM,
        "aten.add.Tensor",
    ]  # fmt: skip
    (both,) = graph.nodes(OPS["linear_add_rms_norm"].overload)
    x, w, residual, norm, *rest = both.args
    assert [x.target, residual.target] == [aten.sin.default, aten.embedding.default]
    assert [w.target, norm.target, *rest] == ["w", "n", 1e-2, 1.0, False]
    assert both.meta["module"] == "layers.1.input_layernorm"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "halves", "size"), [((12, 12), (0, 1), 12), ((10, 2, 10, 2), (0, 2), 10)]
)
def test_an_activation_behind_a_linear(
    source: Graph, context: PassContext, sizes: Any, halves: Any, size: int, dtype: torch.dtype
) -> None:
    """Of whole halves, and of halves with padding behind them."""
    passes = {EPILOGUES: 1, LINEARS: 0}
    graph = fused(source, context, lambda b: b.swiglu(b.x, sizes, halves), passes, dtype)
    assert targets(graph) == ["aten.embedding", "minivllm.linear_silu_mul"]
    x, w, given = graph.output.args
    assert (x.target, w.target, given) == (aten.embedding.default, "merged", size)
    assert graph.output.meta["module"] == "layers.0.mlp"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gated_rms_norm", "sigmoid_mul"])
def test_a_gate_before_a_linear(
    source: Graph, context: PassContext, kind: str, dtype: torch.dtype
) -> None:
    def body(b: Typed) -> Node:
        z = b.call(aten.cos.default, b.x)
        made = b.gated_norm(b.x, z) if kind == "gated_rms_norm" else b.output_gate(b.x, z)
        normed, total = b.norm(b.linear(b.flat(made)), b.x)
        return b.call(aten.add.Tensor, normed, total)

    graph = fused(source, context, body, {EPILOGUES: 1, PROLOGUES: 1, LINEARS: 0}, dtype)
    name = f"{kind}_linear_add_rms_norm"
    assert targets(graph)[2:] == [
        "aten.unflatten.int", "aten.unflatten.int", f"minivllm.{name}", GETITEM, GETITEM,
        "aten.add.Tensor",
    ]  # fmt: skip
    (both,) = graph.nodes(OPS[name].overload)
    gated = ["g", 0.5] if kind == "gated_rms_norm" else []
    arguments = [a.target if isinstance(a, Node) else a for a in both.args[2:]]
    assert arguments == [*gated, "w", aten.embedding.default, "n", 1e-2, 1.0, False]
    # without the epilogue there is nothing to take it
    fused(source, context, body, {PROLOGUES: 0}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(source: Graph, context: PassContext, dtype: torch.dtype) -> None:
    """Three layers, each a mixer and an MLP on one stream, and a head."""

    def body(b: Typed) -> Node:
        x, stream = b.call(aten.sin.default, b.x), b.x
        for i in range(3):
            y = b.linear(x, "u", module=f"layers.{i}.mixer")
            made = (b.gated_norm, b.output_gate)[i % 2](y, x)
            x, stream = b.norm(b.linear(b.flat(made)), stream)
            wide = b.swiglu(x)
            narrow = b.call(aten.slice.Tensor, wide, 1, 0, 8)
            x, stream = b.norm(b.linear(narrow), stream)
        return b.linear(x, "merged")

    graph = fused(source, context, body, {EPILOGUES: 9, PROLOGUES: 3, LINEARS: 4}, dtype)
    names = Counter(n for n in targets(graph) if "linear" in n or "norm" in n or "mul" in n)
    assert names == {
        "minivllm.linear": 4,
        "minivllm.linear_silu_mul": 3,
        "minivllm.linear_add_rms_norm": 3,
        "minivllm.gated_rms_norm_linear_add_rms_norm": 2,
        "minivllm.sigmoid_mul_linear_add_rms_norm": 1,
    }


def test_a_linear_that_is_read_again(source: Graph, context: PassContext) -> None:
    def norm(b: Typed) -> Node:
        y = b.linear(b.x)
        return b.call(aten.add.Tensor, b.norm(y, b.x)[0], y)

    def both_addends(b: Typed) -> Node:
        y = b.linear(b.x)
        return b.norm(y, y)[0]

    def two_norms(b: Typed) -> Node:
        y = b.linear(b.x)
        return b.call(aten.add.Tensor, b.norm(y, b.x)[0], b.norm(y, b.x)[1])

    def a_half(b: Typed) -> Node:
        y = b.swiglu(b.x)
        return b.call(aten.add.Tensor, y, y.args[1])

    def the_whole(b: Typed) -> Node:
        y = b.swiglu(b.x)
        return b.call(aten.add.Tensor, y, b.call(aten.slice.Tensor, y.args[0].args[0].args[0], 1, 0, 12))  # fmt: skip  # noqa: E501

    for body in (norm, both_addends, two_norms, a_half, the_whole):
        fused(source, context, body, {EPILOGUES: 0, LINEARS: 1})


def test_a_gate_that_is_read_again(source: Graph, context: PassContext) -> None:
    def made_again(b: Typed) -> Node:
        made = b.gated_norm(b.x, b.x)
        normed, _ = b.norm(b.linear(b.flat(made)), b.x)
        return b.call(aten.add.Tensor, normed, b.call(aten.flatten.using_ints, made, 1, 2))

    def flat_again(b: Typed) -> Node:
        flat = b.flat(b.output_gate(b.x, b.x))
        return b.call(aten.add.Tensor, b.norm(b.linear(flat), b.x)[0], flat)

    for body in (made_again, flat_again):
        fused(source, context, body, {EPILOGUES: 1, PROLOGUES: 0})


def bias(b: Typed) -> Node:
    y = b.call(aten.linear.default, b.x, b.leaf("w"), b.leaf("b"))
    return b.norm(y, b.x)[0]


def computed_weight(b: Typed) -> Node:
    y = b.call(aten.linear.default, b.x, b.call(aten.sin.default, b.leaf("w")))
    return b.norm(y, b.x)[0]


def heads_of_rows(b: Typed) -> Node:
    """A linear of each of a token's rows: three dims."""
    op = OPS["add_rms_norm"].overload
    x = b.call(aten.unsqueeze.default, b.x, 1)
    both = b.call(op, b.linear(x), x, b.leaf("n"), 1e-2, 1.0, False)
    return b.call(operator.getitem, both, 0)


def swapped(b: Typed) -> Node:
    return b.swiglu(b.x, halves=(1, 0))


def one_half(b: Typed) -> Node:
    return b.swiglu(b.x, halves=(0, 0))


def uneven(b: Typed) -> Node:
    """Halves that do not begin where two projections of one width do."""
    return b.swiglu(b.x, (8, 8, 8), (0, 1))


def behind_another(b: Typed) -> Node:
    y = b.call(aten.relu.default, b.linear(b.x))
    return b.norm(y, b.x)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", [
    bias, computed_weight, heads_of_rows, swapped, one_half, uneven, behind_another,
])  # fmt: skip
def test_what_is_no_epilogue_stays(
    source: Graph, context: PassContext, body: Body, dtype: torch.dtype
) -> None:
    fused(source, context, body, {EPILOGUES: 0, PROLOGUES: 0}, dtype)


def test_what_is_no_prologue_stays(source: Graph, context: PassContext) -> None:
    def tokens_joined(b: Typed) -> Node:
        """The heads of two tokens would be one row."""
        made = b.call(aten.flatten.using_ints, b.output_gate(b.x, b.x), 0, 1)
        made = b.call(aten.flatten.using_ints, b.call(aten.unflatten.int, made, 0, [-1, 2]), 1)
        return b.norm(b.linear(made), b.x)[0]

    def another_op(b: Typed) -> Node:
        made = b.call(aten.mul.Tensor, b.heads(b.x), b.heads(b.x))
        return b.norm(b.linear(b.flat(made)), b.x)[0]

    def a_row(b: Typed) -> Node:
        """silu(gate) * up of the MLP is no gate by heads."""
        y = b.call(aten.slice.Tensor, b.swiglu(b.x), 1, 0, 8)
        return b.norm(b.linear(y), b.x)[0]

    for body, epilogues in ((tokens_joined, 1), (another_op, 1), (a_row, 2)):
        fused(source, context, body, {EPILOGUES: epilogues, PROLOGUES: 0})


def test_other_linears(source: Graph, context: PassContext) -> None:
    def two(b: Typed) -> Node:
        return b.linear(b.call(aten.sin.default, b.linear(b.x)), "u")

    graph = fused(source, context, two, {LINEARS: 2})
    assert targets(graph).count("minivllm.linear") == 2
    fused(source, context, bias, {LINEARS: 0})
    fused(source, context, heads_of_rows, {LINEARS: 0})
    assert targets(fused(source, context, computed_weight, {LINEARS: 1})).count("minivllm.linear")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model(
    config: MiniQwenConfig, source: Graph, half_source: Graph, context: PassContext,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    traced = source if dtype == torch.float32 else half_source
    graph = traced.clone("decode")
    passes = select_passes("compiled", "decode")
    names = [p.name for p in passes]
    start = names.index("fuse_linear_epilogues")
    assert names[start : start + 3] == [p.name for p in PASSES]
    run_passes(graph, passes[:start], context)
    before = Counter(targets(graph))
    verify = Verifier(config, traced).check_stage
    reports = run_passes(graph, passes[start : start + 3], context, (verify,))
    assert [(r.matches, r.expected) for r in reports] == [(6, 6), (2, 2), (3, 3)]
    after = Counter(targets(graph))
    assert before - after == {
        "aten.linear": 9,
        "aten.split_with_sizes": 2,
        "aten.flatten.using_ints": 2,
        GETITEM: 4,
        "minivllm.silu_mul": 2,
        "minivllm.add_rms_norm": 4,
        "minivllm.gated_rms_norm": 1,
        "minivllm.sigmoid_mul": 1,
    }
    assert after - before == {
        "minivllm.linear": 3,
        "minivllm.linear_silu_mul": 2,
        "minivllm.linear_add_rms_norm": 2,
        "minivllm.gated_rms_norm_linear_add_rms_norm": 1,
        "minivllm.sigmoid_mul_linear_add_rms_norm": 1,
    }


def test_a_prefill_keeps_its_linears(context: PassContext) -> None:
    for graph_pass in PASSES:
        assert graph_pass.phases == ("decode",)
        assert graph_pass.expected("prefill", context) == []
    assert not {p.name for p in PASSES} & {p.name for p in select_passes("compiled", "prefill")}
    assert PHASES == ("prefill", "decode")
