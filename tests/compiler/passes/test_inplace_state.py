"""inplace_state: one op reads and writes its slot where gather, op and scatter were."""

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
    pools,
    randn,
    targets,
    toy,
    whole_sequences,
)

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.contract import mutated_arguments
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.inplace_state import FORMS, InplaceState
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.runner import run_passes
from minivllm.compiler.verify import Verifier
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS

GATHER, SCATTER = aten.index_select.default, aten.index_copy_.default


def conv_chain(b: Builder) -> Node:
    """Two convolutions in a row, in two layers; the first one's result has two users."""
    x = b.hidden()
    for layer in (0, 1):
        weight = b.weight(f"layers.{layer}.mixer.conv1d.weight", 8, 4)
        y = b.call(OPS["causal_conv1d"].overload, x, weight, module=f"layers.{layer}.mixer.conv1d")
        x = b.call(aten.add.Tensor, y, b.call(aten.mul.Tensor, y, x), module=f"layers.{layer}")
    return x


def delta_rule(b: Builder, name: str = "fused_gated_delta_rule") -> Node:
    """Queries, keys and values are parts of the embedding: one key head, two value heads."""
    x = b.hidden()
    parts = b.call(aten.split_with_sizes.default, x, [2, 2, 4], -1)
    q, k, v = (b.call(operator.getitem, parts, i) for i in range(3))
    rows = [b.call(aten.unflatten.int, t, -1, [-1, 2]) for t in (q, k, v)]
    if name == "fused_gated_delta_rule":
        gates = [q, k, b.weight("A_log", 2), b.weight("dt_bias", 2)]
    else:
        gates = [b.call(aten.neg.default, b.call(aten.softplus.default, q)),
                 b.call(aten.sigmoid.default, k)]  # fmt: skip
    return b.call(OPS[name].overload, *rows, *gates)


def two_states(b: Builder) -> Node:
    """A convolution and a delta rule behind it, in one layer."""
    x = b.hidden()
    weight = b.weight("layers.0.mixer.conv1d.weight", 8, 4)
    y = b.call(OPS["causal_conv1d"].overload, x, weight)
    v = b.call(aten.unflatten.int, y, -1, [2, 4])
    q = b.call(aten.unflatten.int, x, -1, [2, 4])
    a = b.call(aten.slice.Tensor, x, 1, 0, 2)
    args = [q, v, v, a, a, b.weight("A_log", 2), b.weight("dt_bias", 2)]
    o = b.call(OPS["fused_gated_delta_rule"].overload, *args)
    return b.call(aten.add.Tensor, o, q)


WEIGHTS = TABLE | {f"layers.{i}.mixer.conv1d.weight": randn(8, 4, seed=i) for i in (0, 1)}
WEIGHTS |= {"A_log": randn(2, seed=5), "dt_bias": randn(2, seed=6)}


def lowered(
    source: Graph, context: PassContext, body: Callable[[Builder], Node], phase: str
) -> Graph:
    graph = toy(source, body, phase)
    apply(graph, LowerMixers(), context)
    return graph


BODIES = {
    "conv_chain": (conv_chain, ["layers.0.conv", "layers.1.conv"]),
    "delta_rule": (delta_rule, ["layers.0.recurrent"]),
    "two_states": (two_states, ["layers.0.conv", "layers.0.recurrent"]),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_same_numbers_and_states(source: Graph, context: PassContext, name: str) -> None:
    """Two prefills and a step over poisoned pools, against each whole sequence at once.

    The second sequence has no token in the first step: its slot is left as it is, and its only
    token is a prefill of a slot that holds NaN.
    """
    body, kinds = BODIES[name]
    expected = whole_sequences(toy(source, body), WEIGHTS)
    graphs = {phase: lowered(source, context, body, phase) for phase in PHASES}
    for graph in graphs.values():
        assert apply(graph, InplaceState(), context) == len(kinds)
        assert set(graph.states) == {f"state.{kind}" for kind in kinds}
    states = pools(graphs["prefill"])
    for start, end in (((0, 0, 0), (1, 0, 2)), ((1, 0, 2), (2, 1, 4))):
        result = evaluate(graphs["prefill"], packed(start, end), WEIGHTS, states)
        wanted = [e[a:b] for e, a, b in zip(expected, start, end, strict=True)]
        torch.testing.assert_close(result, torch.cat(wanted), rtol=1e-5, atol=1e-6)
        if end[1] == 0:
            assert all(pool[SLOTS[1]].isnan().all() for pool in states.values())
    kept = {n: pool[SLOTS[1]].clone() for n, pool in states.items()}
    inputs = packed((2, 1, 4), (3, 1, 5)) | {"state_slots": torch.tensor([SLOTS[0], SLOTS[2]])}
    result = evaluate(graphs["decode"], inputs, WEIGHTS, states)
    torch.testing.assert_close(
        result, torch.cat([expected[0][2:3], expected[2][4:5]]), rtol=1e-5, atol=1e-6
    )
    for n, pool in states.items():
        assert torch.equal(pool[SLOTS[1]], kept[n]), "a sequence that took no part"
        assert not pool[list(SLOTS)].isnan().any()
        assert pool[[i for i in range(7) if i not in SLOTS]].isnan().all()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("phase", PHASES)
def test_the_states_are_those_of_the_gathered_form(
    source: Graph, context: PassContext, name: str, phase: str
) -> None:
    """Output and pools are the same to the bit as before the pass."""
    body, _ = BODIES[name]
    inputs = packed((0, 0, 0), (3, 1, 5)) if phase == "prefill" else packed((0, 0, 0), (1, 1, 1))
    before = lowered(source, context, body, phase)
    after = lowered(source, context, body, phase)
    apply(after, InplaceState(), context)
    used = {n: randn(7, *s.shape, seed=9) for n, s in before.states.items()}
    copies = {n: pool.clone() for n, pool in used.items()}
    expected = evaluate(before, inputs, WEIGHTS, used)
    assert torch.equal(evaluate(after, inputs, WEIGHTS, copies), expected)
    for n, pool in used.items():
        assert torch.equal(copies[n], pool)


def test_ops(source: Graph, context: PassContext) -> None:
    for phase in PHASES:
        graph = lowered(source, context, two_states, phase)
        apply(graph, InplaceState(), context)
        assert [t for t in targets(graph) if "minivllm" in t or "index" in t] == [
            f"minivllm.causal_conv1d_{phase}_slots",
            f"minivllm.fused_gated_delta_rule_{phase}_slots",
        ]
        gone = {"aten.where.ScalarOther", "aten.gt.Scalar", "aten.view"}
        assert not gone & set(targets(graph))
        check_ops(graph)


def check_ops(graph: Graph) -> None:
    """Each state op changes one state, by its schema, and takes slots and starts beside it."""
    changed = []
    for node in graph.nodes(*FORMS.values()):
        (state,) = mutated_arguments(node)
        assert state.op == "get_attr" and state.target in graph.states
        changed.append(str(state.target))
        names = [a.name for a in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False))
        assert given["state"] is state and given["slots"] is graph.input("state_slots")
        extra = {"num_computed_tokens", "cu_seqlens", "chunk_indices"}
        assert extra & set(given) == (extra if graph.phase == "prefill" else set())
        for name in extra & set(given):
            assert given[name] is graph.input(name)
    slots = [n for n, s in graph.states.items() if s.kind == "slot"]
    assert sorted(changed) == sorted(slots)


@pytest.fixture(scope="module")
def gathered(config: MiniQwenConfig) -> CompiledModel:
    """The tiny config with an unfolded delta rule, for which there is no form in place."""
    options = CompilerOptions(disable=("fold_gate",), verify=True)
    return compile_model(config, torch.float32, options, block_size=16)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model(
    source: Graph, half_source: Graph, context: PassContext, phase: str, dtype: torch.dtype
) -> None:
    graph = (source if dtype == torch.float32 else half_source).clone(phase)
    *before, last = select_passes("compiled", phase, stop_after="inplace_state")
    assert isinstance(last, InplaceState)
    run_passes(graph, before, context)
    calls = Counter(targets(graph))
    (report,) = run_passes(graph, [last], context)
    assert (report.matches, report.expected) == (2, 2)
    gone = calls - Counter(targets(graph))
    assert gone == {
        "aten.index_select": 2, "aten.index_copy_": 2, "<built-in function getitem>": 4,
        f"minivllm.causal_conv1d_{phase}": 1, f"minivllm.fused_gated_delta_rule_{phase}": 1,
    } | ({"aten.gt.Scalar": 2, "aten.view": 2, "aten.where.ScalarOther": 2}
         if phase == "prefill" else {})  # fmt: skip
    assert graph.nodes(SCATTER) == []
    for gather in graph.nodes(GATHER):
        assert gather.args[2] is graph.input("logits_rows")
    check_ops(graph)
    # the pools themselves are as they were
    assert graph.states["state.layers.0.recurrent"].dtype == torch.float32


@pytest.mark.parametrize("phase", PHASES)
def test_an_unfolded_delta_rule_stays_gathered(gathered: CompiledModel, phase: str) -> None:
    """It was verified while it was compiled; the convolution is in place all the same."""
    graph = gathered.graphs[phase]
    (report,) = (r for r in gathered.reports if (r.phase, r.name) == (phase, "inplace_state"))
    assert (report.matches, report.expected) == (1, None)
    assert len(graph.nodes(OPS[f"gated_delta_rule_{phase}"].overload)) == 1
    (scatter,) = graph.nodes(SCATTER)
    assert scatter.args[0].target == "state.layers.0.recurrent"
    assert len(graph.nodes(OPS[f"causal_conv1d_{phase}_slots"].overload)) == 1


def test_the_folded_rule_without_the_pass(
    config: MiniQwenConfig, source: Graph, context: PassContext
) -> None:
    without = dataclasses.replace(context, disabled=frozenset({"inplace_state"}))
    verifier = Verifier(config, source)
    for phase in PHASES:
        graph = source.clone(phase)
        run_passes(graph, select_passes("compiled", phase, ["inplace_state"]), without)
        assert len(graph.nodes(SCATTER)) == 2
        verifier.check_stage(graph, "lower_attention")


def edited(edit: Callable[[Graph, Node], Any]) -> Callable[[Graph], None]:
    def run(graph: Graph) -> None:
        (scatter,) = graph.nodes(SCATTER)
        edit(graph, scatter)
        graph.fx.lint()

    return run


def other_slots(graph: Graph, scatter: Node) -> None:
    """Written to another slot than it was read from."""
    slots = scatter.args[2]
    rolled = graph.call(aten.roll.default, slots, [1], [0], like=scatter)
    scatter.args = (*scatter.args[:2], rolled, scatter.args[3])


def changed_before_it_is_written(graph: Graph, scatter: Node) -> None:
    half = graph.call(aten.mul.Tensor, scatter.args[3], 0.5, like=scatter)
    scatter.args = (*scatter.args[:3], half)


def changed_after_it_is_read(graph: Graph, scatter: Node) -> None:
    op = scatter.args[3].args[0]
    state = next(a for a in op.args if isinstance(a, Node) and a.target in (
        GATHER, aten.where.ScalarOther))  # fmt: skip
    half = graph.call(aten.mul.Tensor, state, 0.5, like=op)
    op.args = tuple(half if a is state else a for a in op.args)


def read_before_it_is_written(graph: Graph, scatter: Node) -> None:
    """A second reader between op and scatter, who must see the old state."""
    pool, _, slots, _ = scatter.args
    again = graph.call(GATHER, pool, 0, slots, like=scatter)
    total = graph.call(aten.sum.default, again, like=scatter)
    output = graph.output
    shifted = graph.call(aten.add.Tensor, output, total, like=scatter)
    graph.fx.output_node().args = (shifted,)
    scatter.prepend(total)
    scatter.append(shifted)
    if output.target is not operator.getitem:
        output.append(shifted)


def another_mask(graph: Graph, scatter: Node) -> None:
    for test in graph.nodes(aten.gt.Scalar):
        test.args = (test.args[0], 1)


def another_start(graph: Graph, scatter: Node) -> None:
    for where in graph.nodes(aten.where.ScalarOther):
        where.args = (*where.args[:2], 1.0)


EDITS = [
    *((phase, edit) for phase in PHASES for edit in (
        other_slots, changed_before_it_is_written, changed_after_it_is_read,
        read_before_it_is_written)),
    ("prefill", another_mask),
    ("prefill", another_start),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "edit"), EDITS)
def test_what_the_op_does_not_do_stays(
    source: Graph, context: PassContext, phase: str, edit: Callable[[Graph, Node], Any]
) -> None:
    graph = lowered(source, context, delta_rule, phase)
    edited(edit)(graph)
    before = code(graph)
    assert apply(graph, InplaceState(), context) == 0
    assert code(graph) == before


def test_an_unfused_rule_in_a_toy(source: Graph, context: PassContext) -> None:
    for phase in PHASES:
        graph = lowered(source, context, lambda b: delta_rule(b, "gated_delta_rule"), phase)
        before = code(graph)
        assert apply(graph, InplaceState(), context) == 0
        assert code(graph) == before


def test_a_gathered_state_with_another_reader(source: Graph, context: PassContext) -> None:
    """The gather stays for it, in front of the op; what it read is the old state."""

    def read(graph: Graph) -> None:
        (gather,) = graph.nodes(GATHER)
        total = graph.call(aten.sum.default, gather, like=gather)
        gather.append(total)
        output = graph.output
        with graph.fx.inserting_after(next(iter(output.users)).prev):
            shifted = graph.call(aten.add.Tensor, output, total, like=graph.nodes()[-1])
        graph.nodes()[-1].append(shifted)
        graph.fx.output_node().args = (shifted,)
        graph.fx.lint()

    inputs: dict[str, Tensor] = packed((0, 0, 0), (1, 1, 1))
    results, states = [], []
    for fuse in (False, True):
        graph = lowered(source, context, delta_rule, "decode")
        read(graph)
        if fuse:
            assert apply(graph, InplaceState(), context) == 1
            assert len(graph.nodes(GATHER)) == 1 and graph.nodes(SCATTER) == []
        used = {n: randn(7, *s.shape, seed=9) for n, s in graph.states.items()}
        results.append(evaluate(graph, inputs, WEIGHTS, used))
        states.append(used["state.layers.0.recurrent"])
    assert torch.equal(*results) and torch.equal(*states)
