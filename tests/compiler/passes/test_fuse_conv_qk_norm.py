"""fuse_conv_qk_norm: a prefill's convolution leaves q, k and v as the delta rule takes them."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from toy_graphs import (
    SLOTS,
    TABLE,
    Builder,
    apply,
    aten,
    code,
    evaluate,
    packed,
    randn,
    targets,
    toy,
    whole_sequences,
)

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.cost import call_costs
from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.fuse_conv_qk_norm import (
    CONV,
    CONV_QKV,
    NORMALIZED,
    RULE,
    FuseConvQkNorm,
)
from minivllm.compiler.passes.inplace_state import InplaceState
from minivllm.compiler.passes.keep_snapshots import KeepSnapshots
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.compiler.verify import Verifier
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS

SPLIT, VIEW = aten.split_with_sizes.default, aten.unflatten.int
PARTS = ([2, 2, 4], (0, 1, 2))


def mixer(b: Builder, x: Node, layer: int, parts: tuple[list[int], tuple[int, ...]]) -> Node:
    """A convolution of x, `[tokens, 8]`, and a delta rule of `parts`: sizes, and q, k, v of them.

    One key head and two value heads, all of two channels.
    """
    module = f"layers.{layer}.mixer"
    weight = b.weight(f"{module}.conv1d.weight", 8, 4)
    y = b.call(OPS["causal_conv1d"].overload, x, weight, module=f"{module}.conv1d")
    sizes, order = parts
    split = b.call(SPLIT, y, sizes, -1, module=module)
    q, k, v = (b.call(operator.getitem, split, i, module=module) for i in order)
    rows = [b.call(VIEW, t, -1, [-1, 2], module=module) for t in (q, k, v)]
    a = b.call(aten.slice.Tensor, x, 1, 0, 2, module=module)
    gates = [b.weight(f"{module}.{name}", 2) for name in ("A_log", "dt_bias")]
    o = b.call(OPS["fused_gated_delta_rule"].overload, *rows, a, a, *gates, module=module)
    flat = b.call(aten.flatten.using_ints, o, -2, module=module)
    return b.call(aten.cat.default, [flat, flat], -1, module=module)


def one_layer(b: Builder) -> Node:
    return mixer(b, b.hidden(), 0, PARTS)


def two_layers(b: Builder) -> Node:
    return mixer(b, mixer(b, b.hidden(), 0, PARTS), 1, PARTS)


def q_and_k_swapped(b: Builder) -> Node:
    return mixer(b, b.hidden(), 0, ([2, 2, 4], (1, 0, 2)))


def four_parts(b: Builder) -> Node:
    return mixer(b, b.hidden(), 0, ([2, 2, 2, 2], (0, 1, 2)))


def without_a_convolution(b: Builder) -> Node:
    """q, k and v are parts of the embedding."""
    split = b.call(SPLIT, b.hidden(), [2, 2, 4], -1)
    parts = [b.call(operator.getitem, split, i) for i in range(3)]
    rows = [b.call(VIEW, t, -1, [-1, 2]) for t in parts]
    gates = [b.weight(f"layers.0.mixer.{name}", 2) for name in ("A_log", "dt_bias")]
    rule = OPS["fused_gated_delta_rule"].overload
    return b.call(rule, *rows, parts[0], parts[1], *gates)


WEIGHTS = TABLE | {
    f"layers.{i}.mixer.{name}": randn(*shape, seed=5 + i)
    for i in (0, 1)
    for name, shape in (("A_log", (2,)), ("dt_bias", (2,)), ("conv1d.weight", (8, 4)))
}


def on_slots(source: Graph, context: PassContext, body: Callable[[Builder], Node]) -> Graph:
    """The prefill graph of `body` with ops that read and write their slots."""
    graph = toy(source, body)
    apply(graph, LowerMixers(), context)
    apply(graph, InplaceState(), context)
    return graph


def steps(graph: Graph, pools: dict[str, Tensor]) -> list[Tensor]:
    """The outputs of two prefills; the second sequence has no token in the first."""
    spans = (((0, 0, 0), (1, 0, 2)), ((1, 0, 2), (3, 1, 5)))
    return [evaluate(graph, packed(*span), WEIGHTS, pools) for span in spans]


@pytest.mark.parametrize("body", [one_layer, two_layers])
def test_the_same_numbers_and_states(
    source: Graph, context: PassContext, body: Callable[[Builder], Node]
) -> None:
    """To the bit, over poisoned pools; and each whole sequence's, up to the order of sums."""
    before, after = (on_slots(source, context, body) for _ in range(2))
    layers = 1 if body is one_layer else 2
    assert apply(after, FuseConvQkNorm(), context) == layers
    pools = [
        {n: torch.full((7, *s.shape), torch.nan) for n, s in before.states.items()}
        for _ in range(2)
    ]
    expected, actual = steps(before, pools[0]), steps(after, pools[1])
    for a, e in zip(actual, expected, strict=True):
        assert a.isfinite().all() and torch.equal(a, e)
    for name, pool in pools[0].items():
        assert torch.equal(pools[1][name][[*SLOTS]], pool[[*SLOTS]])
        assert pools[1][name][[0, 1, 3, 6]].isnan().all()
    whole = whole_sequences(toy(source, body), WEIGHTS)
    wanted = torch.cat([whole[0][:1], whole[2][:2]])
    torch.testing.assert_close(actual[0], wanted, rtol=1e-5, atol=1e-6)
    wanted = torch.cat([whole[0][1:], whole[1], whole[2][2:]])
    torch.testing.assert_close(actual[1], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("snapshots_first", [False, True])
def test_ops_before_and_after(source: Graph, context: PassContext, snapshots_first: bool) -> None:
    """With the places of snapshots or without, the arguments stay what they were."""
    graph = on_slots(source, context, two_layers)
    if snapshots_first:
        assert apply(graph, KeepSnapshots(), context) == 4
    before = Counter(targets(graph))
    tails = [node.args[2:] for node in graph.nodes(CONV)]
    assert apply(graph, FuseConvQkNorm(), context) == 2
    removed, added = before - Counter(targets(graph)), Counter(targets(graph)) - before
    assert removed == {
        "minivllm.causal_conv1d_prefill_slots": 2,
        "aten.split_with_sizes": 2,
        "aten.unflatten.int": 6,
    }
    assert added == {"minivllm.causal_conv1d_qkv_prefill_slots": 2}
    for node, tail in zip(graph.nodes(CONV_QKV), tails, strict=True):
        assert (*node.args[2:7], *node.args[10:]) == tail and node.args[7:10] == (1, 2, 2)
        assert node.meta["module"].endswith("mixer.conv1d")
    for rule in graph.nodes(RULE):
        parts = rule.args[:3]
        assert [p.args[1] for p in parts] == [0, 1, 2] and len({p.args[0] for p in parts}) == 1
        last = graph.input("chunk_slots") if snapshots_first else None
        assert rule.args[NORMALIZED - 1 :] == (last, True)
    if not snapshots_first:
        assert apply(graph, KeepSnapshots(), context) == 4


def test_it_moves_the_same_bytes(source: Graph, context: PassContext) -> None:
    """What a kernel copies for itself is not counted: three parts are as large as the whole."""
    graph = on_slots(source, context, one_layer)
    (conv,) = graph.nodes(CONV)
    cost = call_costs(graph)[conv]
    assert cost.bytes > 0 and cost.flops > 0
    assert apply(graph, FuseConvQkNorm(), context) == 1
    (fused,) = graph.nodes(CONV_QKV)
    assert call_costs(graph)[fused] == cost


@pytest.mark.parametrize("body", [q_and_k_swapped, four_parts, without_a_convolution])
def test_a_graph_without_its_pattern(
    source: Graph, context: PassContext, body: Callable[[Builder], Node]
) -> None:
    graph = on_slots(source, context, body)
    before = code(graph)
    assert apply(graph, FuseConvQkNorm(), context) == 0
    assert code(graph) == before
    assert graph.misses is not None
    (miss,) = graph.misses.noted
    assert miss.site == "layers.0.mixer" and miss.expected.startswith("q: heads of part 0")


def test_graphs_without_slots(source: Graph, context: PassContext) -> None:
    """The gathered form, and a graph without any mixer: nothing to see."""
    gathered = toy(source, two_layers)
    apply(gathered, LowerMixers(), context)
    for graph in (gathered, toy(source, Builder.hidden)):
        before = code(graph)
        assert apply(graph, FuseConvQkNorm(), context) == 0
        assert code(graph) == before
        assert graph.misses is not None and graph.misses.noted == []


@pytest.mark.parametrize("which", ["convolution", "part", "heads"])
def test_another_reader(source: Graph, context: PassContext, which: str) -> None:
    """Of the first layer's convolution, or of its q: that layer stays, the other goes."""
    graph = on_slots(source, context, two_layers)
    conv, _ = graph.nodes(CONV)
    rule, _ = graph.nodes(RULE)
    heads = rule.args[0]
    assert isinstance(heads, Node)
    node = {"convolution": conv, "part": heads.args[0], "heads": heads}[which]
    assert isinstance(node, Node)
    flat = next(n for n in graph.nodes(aten.flatten.using_ints) if n.args[0] is rule)
    total = graph.call(aten.sum.default, node, like=flat)
    shifted = graph.call(aten.add.Tensor, rule, total, like=flat)
    flat.args = (shifted, *flat.args[1:])
    context = dataclasses.replace(context, misses=Misses())
    pools = [{n: randn(7, *s.shape, seed=9) for n, s in graph.states.items()} for _ in range(2)]
    expected = steps(graph, pools[0])
    assert FuseConvQkNorm().run(graph, context) == ["layers.1"]
    assert [len(graph.nodes(op)) for op in (CONV, CONV_QKV)] == [1, 1]
    (miss,) = context.misses.noted
    assert (miss.candidate, miss.site) == (rule, "layers.0.mixer")
    assert miss.reason == f"an extra user: %{total.name} (layers.0.mixer) reads it too"
    for a, e in zip(steps(graph, pools[1]), expected, strict=True):
        assert torch.equal(a, e)


def test_a_second_run_finds_nothing(source: Graph, context: PassContext) -> None:
    graph = on_slots(source, context, two_layers)
    assert apply(graph, FuseConvQkNorm(), context) == 2
    before = code(graph)
    assert apply(graph, FuseConvQkNorm(), context) == 0
    assert code(graph) == before
    assert graph.misses is not None and graph.misses.noted == []


def test_a_model_whose_convolution_is_read_twice_says_so(
    source: Graph, config: MiniQwenConfig, context: PassContext
) -> None:
    """The count is checked, and the explanation names the reader."""
    graph = source.clone("prefill")
    full = compile_model(config, torch.float32, CompilerOptions(), block_size=16)
    assert [r.matches for r in full.reports if r.name == "fuse_conv_qk_norm"] == [1]
    run_passes(graph, select_passes("compiled", "prefill", stop_after="inplace_state"), context)
    (conv,) = graph.nodes(CONV)
    anchor = graph.nodes(RULE)[0]
    total = graph.call(aten.sum.default, conv, like=anchor)
    view = graph.call(aten.add.Tensor, anchor.args[2], total, like=anchor)
    anchor.args = (*anchor.args[:2], view, *anchor.args[3:])
    with pytest.raises(CompileError) as error:
        run_passes(graph, [FuseConvQkNorm()], context)
    assert "pass fuse_conv_qk_norm on the prefill graph: matched 0 of 1 sites" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model(source: Graph, half_source: Graph, config: MiniQwenConfig, dtype: Any) -> None:
    """Counts, and the verifier's numbers behind each pass."""
    options = CompilerOptions()
    model: CompiledModel = compile_model(config, dtype, options, block_size=16)
    (report,) = (r for r in model.reports if r.name == "fuse_conv_qk_norm")
    assert (report.phase, report.matches, report.expected) == ("prefill", 1, 1)
    assert report.calls_before - report.calls_after == 4
    if dtype == torch.float32:
        Verifier(config, source).check_stage(model.prefill, "fuse_conv_qk_norm")


def test_switched_off(config: MiniQwenConfig, source: Graph) -> None:
    options = CompilerOptions(disable=("fuse_conv_qk_norm",))
    model = compile_model(config, torch.float32, options, block_size=16)
    assert len(model.prefill.nodes(CONV)) == 1 and not model.prefill.nodes(CONV_QKV)
    (rule,) = model.prefill.nodes(RULE)
    assert len(rule.args) == NORMALIZED and rule.args[-1] is model.prefill.input("chunk_slots")
    Verifier(config, source).check_stage(model.prefill, "all but fuse_conv_qk_norm")
