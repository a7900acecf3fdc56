"""prefetch_states: states are read early where nobody else can have written them."""

from __future__ import annotations

import dataclasses
import operator
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
)

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.inplace_state import InplaceState
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.passes.prefetch_states import CONV, RULE, PrefetchStates
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.recipe import assemble
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.compiler.verify import Pools, Verifier, pool_entries, run, scenario
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights, parameter_shapes
from minivllm.ops import OPS
from minivllm.presets import model_preset

BLOCK_SIZE = 16


def early(node: Node) -> bool:
    """What a call promises: its argument `early`, or the schema's default."""
    arguments = node.target._schema.arguments
    return dict(zip([a.name for a in arguments], node.args, strict=False)).get("early", False)


def delta_rule(b: Builder, x: Node, layer: int) -> Node:
    """Queries, keys and values are parts of x, `[tokens, 8]`; so is the result."""
    module = f"layers.{layer}.mixer"
    parts = b.call(aten.split_with_sizes.default, x, [2, 2, 4], -1, module=module)
    q, k, v = (b.call(operator.getitem, parts, i, module=module) for i in range(3))
    rows = [b.call(aten.unflatten.int, t, -1, [-1, 2], module=module) for t in (q, k, v)]
    gates = [b.weight(f"{module}.{name}", 2) for name in ("A_log", "dt_bias")]
    rule = OPS["fused_gated_delta_rule"].overload
    o = b.call(rule, *rows, q, k, *gates, module=module)
    flat = b.call(aten.flatten.using_ints, o, -2, module=module)
    return b.call(aten.cat.default, [flat, flat], -1, module=module)


def two_layers(b: Builder) -> Node:
    return delta_rule(b, delta_rule(b, b.hidden(), 0), 1)


def without_embedding(b: Builder) -> Node:
    """The rows are computed from the positions: no kernel in front waits for the last step."""
    rows = b.call(aten.unsqueeze.default, b.input("positions"), 1)
    wide = b.call(aten.expand.default, rows, [-1, 8])
    return delta_rule(b, b.call(aten.div.Tensor, wide, 8.0), 0)


def embedded_behind(b: Builder) -> Node:
    """The embedding stands behind the first layer and in front of the second."""
    first = without_embedding(b)
    return delta_rule(b, b.call(aten.add.Tensor, first, b.hidden()), 1)


WEIGHTS = TABLE | {
    f"layers.{i}.mixer.{name}": randn(2, seed=5 + i)
    for i in (0, 1)
    for name in ("A_log", "dt_bias")
}


def on_slots(source: Graph, context: PassContext, body: Callable[[Builder], Node]) -> Graph:
    """The decode graph of `body` with ops that read and write their slots."""
    graph = toy(source, body, "decode")
    for graph_pass in (LowerMixers(), InplaceState()):
        assert apply(graph, graph_pass, context) == len(graph.states)
    return graph


def step(graph: Graph) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of one step, and the pools behind it."""
    states = {n: randn(7, *s.shape, seed=9) for n, s in graph.states.items()}
    inputs = packed((0, 0, 0), (1, 1, 1)) | {"positions": torch.tensor([0, 3, 7])}
    return evaluate(graph, inputs, WEIGHTS, states), states


@pytest.mark.parametrize(
    ("body", "promised"),
    [(two_layers, [True, True]), (without_embedding, [False]), (embedded_behind, [False, True])],
)
def test_a_toy(
    source: Graph, context: PassContext, body: Callable[[Builder], Node], promised: list[bool]
) -> None:
    """The promise is made behind an embedding, and changes neither the output nor a state."""
    graph = on_slots(source, context, body)
    before, calls = step(graph), targets(graph)
    assert [early(node) for node in graph.nodes(RULE)] == [False] * len(promised)
    assert apply(graph, PrefetchStates(), context) == sum(promised)
    assert [early(node) for node in graph.nodes(RULE)] == promised
    assert targets(graph) == calls
    output, states = step(graph)
    assert output.isfinite().all() and torch.equal(output, before[0])
    for name, pool in states.items():
        assert torch.equal(pool, before[1][name])
        assert not torch.equal(pool[[*SLOTS]], randn(*pool.shape, seed=9)[[*SLOTS]])
    assert graph.misses is not None
    assert {m.site for m in graph.misses.noted} == {
        f"layers.{i}.recurrent" for i, is_early in enumerate(promised) if not is_early
    }


def read_too(graph: Graph, node: Node, pool: Node) -> None:
    """Another node reads the slots in front of the op."""
    rows = graph.call(aten.index_select.default, pool, 0, graph.input("state_slots"), like=node)
    shift = graph.call(aten.sum.default, rows, like=node)
    q = node.args[0]
    node.args = (graph.call(aten.add.Tensor, q, shift, like=node), *node.args[1:])


def written_too(graph: Graph, node: Node, pool: Node) -> None:
    """Another node writes the slots in front of the op, which has to see that."""
    slots = graph.input("state_slots")
    rows = graph.call(aten.index_select.default, pool, 0, slots, like=node)
    halves = graph.call(aten.mul.Tensor, rows, 0.5, like=node)
    graph.call(aten.index_copy_.default, pool, 0, slots, halves, like=node)


@pytest.mark.parametrize("edit", [read_too, written_too])
def test_a_state_that_another_node_touches(
    source: Graph, context: PassContext, edit: Callable[[Graph, Node, Node], None]
) -> None:
    """That op waits, the other layer's does not; and the miss is explained."""
    graph = on_slots(source, context, two_layers)
    first, _ = graph.nodes(RULE)
    (pool,) = (n for n in first.all_input_nodes if n.target in graph.states)
    edit(graph, first, pool)
    context = dataclasses.replace(context, misses=Misses())
    assert PrefetchStates().run(graph, context) == ["layers.1.recurrent"]
    assert [early(node) for node in graph.nodes(RULE)] == [False, True]
    (miss,) = context.misses.noted
    assert (miss.candidate, miss.site) == (first, "layers.0.recurrent")
    assert miss.reason == "the state may be written by a kernel that still runs"


@pytest.mark.parametrize("name", ["slots", "A_log", "dt_bias"])
def test_what_a_kernel_computes(source: Graph, context: PassContext, name: str) -> None:
    """A kernel in front may still be about to write them."""
    graph = on_slots(source, context, two_layers)
    first, _ = graph.nodes(RULE)
    place = [a.name for a in RULE._schema.arguments].index(name)
    with graph.fx.inserting_before(first):
        clone = graph.call(aten.clone.default, first.args[place], like=first)
    first.update_arg(place, clone)
    context = dataclasses.replace(context, misses=Misses())
    assert PrefetchStates().run(graph, context) == ["layers.1.recurrent"]
    assert [early(node) for node in graph.nodes(RULE)] == [False, True]
    (miss,) = context.misses.noted
    assert miss.site == "layers.0.recurrent"
    assert miss.reason == "a kernel that still runs may compute it"


@pytest.mark.parametrize("name", ["hidden", "gathered"])
def test_a_graph_without_its_pattern(source: Graph, context: PassContext, name: str) -> None:
    graph = toy(source, Builder.hidden if name == "hidden" else two_layers, "decode")
    if name == "gathered":
        assert apply(graph, LowerMixers(), context) == 2
    before = code(graph)
    assert apply(graph, PrefetchStates(), context) == 0
    assert code(graph) == before
    assert graph.misses is not None and graph.misses.noted == []


def lowered(source: Graph, context: PassContext) -> Graph:
    graph = source.clone("decode")
    run_passes(graph, select_passes("compiled", "decode", stop_after="inplace_state"), context)
    return graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model(
    source: Graph,
    half_source: Graph,
    config: MiniQwenConfig,
    context: PassContext,
    dtype: torch.dtype,
) -> None:
    """Logits and states of five steps are the same to the bit."""
    graph = lowered(source if dtype == torch.float32 else half_source, context)
    plain = dummy_weights(parameter_shapes(config), dtype, "cpu", seed=0)
    weights = assemble(graph.weights, plain | constants(config))

    def steps() -> tuple[list[Tensor], dict[str, Tensor]]:
        entries = pool_entries(BLOCK_SIZE)
        pools = Pools(
            {n: randn(entries, *s.shape, seed=3).to(s.dtype) for n, s in graph.states.items()}
        )
        batches = scenario("decode", config.vocab_size, BLOCK_SIZE)
        return [run(graph, weights, pools, batch) for batch in batches], pools.states

    calls, (logits, states) = targets(graph), steps()
    (report,) = run_passes(graph, [PrefetchStates()], context)
    assert (report.matches, report.expected) == (2, 2)
    assert targets(graph) == calls and report.calls_after == report.calls_before
    for op, module in ((CONV, "layers.0.mixer.conv1d"), (RULE, "layers.0.mixer")):
        (node,) = graph.nodes(op)
        assert early(node) and node.meta["pass"] == "prefetch_states"
        assert node.meta["module"] == module
    again, states_again = steps()
    for now, then in zip(again, logits, strict=True):
        assert now.isfinite().all() and torch.equal(now, then)
    for name, pool in states.items():
        assert torch.equal(states_again[name], pool), name


def test_a_missing_site_is_an_error_that_tells_why(
    source: Graph, config: MiniQwenConfig, context: PassContext
) -> None:
    graph = lowered(source, context)
    (node,) = graph.nodes(RULE)
    (pool,) = (n for n in node.all_input_nodes if n.target in graph.states)
    read_too(graph, node, pool)
    with pytest.raises(CompileError) as error:
        run_passes(graph, [PrefetchStates()], context)
    text = str(error.value)
    assert "pass prefetch_states on the decode graph: matched 1 of 2 sites" in text
    assert "layers.0.recurrent: nearest miss in layers.0.recurrent" in text
    assert "from:     layers.0.mixer" in text
    assert "reason:   the state may be written by a kernel that still runs" in text


@pytest.mark.parametrize(("name", "found"), [("fold_gate", 1), ("inplace_state", 0)])
def test_without_a_pass_that_it_builds_on(
    config: MiniQwenConfig, source: Graph, name: str, found: int
) -> None:
    """The convolution has its form without the folded gate, the delta rule has not."""
    options = CompilerOptions(disable=(name,))
    model = compile_model(config, torch.float32, options, block_size=BLOCK_SIZE)
    (report,) = (r for r in model.reports if r.name == "prefetch_states")
    assert (report.matches, report.expected) == (found, None)
    assert model.decode.nodes(RULE) == []
    Verifier(config, source).check_stage(model.decode, f"all passes but {name}")


def test_left_out(config: MiniQwenConfig, compiled: CompiledModel) -> None:
    """It is optional, and the prefill graph has no such promise."""
    options = CompilerOptions(disable=("prefetch_states",))
    model = compile_model(config, torch.float32, options, block_size=BLOCK_SIZE)
    assert targets(model.decode) == targets(compiled.decode)
    assert [early(node) for node in model.decode.nodes(RULE)] == [False]
    assert code(model.prefill) == code(compiled.prefill)
    assert compiled.prefill.nodes(RULE) == []


def test_the_published_model() -> None:
    """18 layers of 24 have a recurrent state."""
    architecture: dict[str, Any] | None = model_preset("miniqwen08b").architecture
    assert architecture is not None
    config = MiniQwenConfig.from_hf(architecture)
    model = compile_model(config, torch.bfloat16, CompilerOptions())
    (report,) = (r for r in model.reports if r.name == "prefetch_states")
    assert (report.phase, report.matches, report.expected) == ("decode", 36, 36)
    nodes = [*model.decode.nodes(CONV), *model.decode.nodes(RULE)]
    assert len(nodes) == 36 and all(map(early, nodes))
