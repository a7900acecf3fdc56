"""lower_mixers: convolution and delta rule with state compute what they did without."""

from __future__ import annotations

import itertools
import operator
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
    evaluate,
    packed,
    pools,
    randn,
    targets,
    toy,
    whole_sequences,
)

from minivllm.compiler.graph import PHASES, Graph, StateSpec
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.ops import OPS


def conv_chain(b: Builder) -> Node:
    """Two convolutions in a row, in two layers; the first one's result has two users."""
    x = b.hidden()
    for layer in (0, 1):
        weight = b.weight(f"layers.{layer}.mixer.conv1d.weight", 8, 4)
        y = b.call(OPS["causal_conv1d"].overload, x, weight, module=f"layers.{layer}.mixer.conv1d")
        x = b.call(aten.add.Tensor, y, b.call(aten.mul.Tensor, y, x), module=f"layers.{layer}")
    return x


def delta_rule(b: Builder) -> Node:
    """Queries, keys and values are parts of the embedding: one key head, two value heads."""
    x = b.hidden()
    parts = b.call(aten.split_with_sizes.default, x, [2, 2, 4], -1)
    q, k, v = (b.call(operator.getitem, parts, i) for i in range(3))
    g = b.call(aten.neg.default, b.call(aten.softplus.default, q))
    beta = b.call(aten.sigmoid.default, k)
    q, k = (b.call(aten.unflatten.int, t, -1, [1, 2]) for t in (q, k))
    v = b.call(aten.unflatten.int, v, -1, [2, 2])
    return b.call(OPS["gated_delta_rule"].overload, q, k, v, g, beta)


CONV_WEIGHTS = TABLE | {f"layers.{i}.mixer.conv1d.weight": randn(8, 4, seed=i) for i in (0, 1)}


@pytest.mark.parametrize(("body", "weights", "kinds"), [
    (conv_chain, CONV_WEIGHTS, ["layers.0.conv", "layers.1.conv"]),
    (delta_rule, TABLE, ["layers.0.recurrent"]),
], ids=["conv_chain", "delta_rule"])  # fmt: skip
def test_lowered_mixers_compute_the_same(
    source: Graph, context: PassContext, body: Any, weights: dict[str, Tensor], kinds: list[str]
) -> None:
    """Two prefills and a step over poisoned pools, against each whole sequence at once."""
    expected = whole_sequences(toy(source, body), weights)
    graphs = {phase: toy(source, body, phase) for phase in PHASES}
    for graph in graphs.values():
        assert apply(graph, LowerMixers(), context) == len(kinds)
        assert list(graph.states) == [f"state.{kind}" for kind in kinds]
    states = pools(graphs["prefill"])
    cuts = ((0, 0, 0), (1, 0, 2), (2, 0, 4), (3, 1, 5))
    for step, (start, end) in enumerate(itertools.pairwise(cuts)):
        inputs = packed(start, end)
        last = step == 2
        result = evaluate(graphs["decode" if last else "prefill"], inputs, weights, states)
        wanted = [e[a:b] for e, a, b in zip(expected, start, end, strict=True)]
        torch.testing.assert_close(result, torch.cat(wanted), rtol=1e-5, atol=1e-6)
        if not last:
            # the sequence without a token yet has zeros, not what its slot held
            for pool in states.values():
                assert torch.equal(pool[SLOTS[1]], torch.zeros_like(pool[0]))
    for pool in states.values():
        untouched = [i for i in range(7) if i not in SLOTS]
        assert pool[untouched].isnan().all()
        assert not pool[list(SLOTS)].isnan().any()


def test_lower_mixers_ops(source: Graph, context: PassContext) -> None:
    graph = toy(source, conv_chain)
    apply(graph, LowerMixers(), context)
    one = [
        "aten.index_select",
        "aten.gt.Scalar",
        "aten.view",
        "aten.where.ScalarOther",
        "minivllm.causal_conv1d_prefill",
        "<built-in function getitem>",
        "<built-in function getitem>",
        "aten.index_copy_",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    # which sequences start is asked once, for all states of a rank
    again = [t for t in one if t not in ("aten.gt.Scalar", "aten.view")]
    assert targets(graph) == ["aten.embedding", *one, *again]
    graph = toy(source, conv_chain, "decode")
    apply(graph, LowerMixers(), context)
    masked = ("aten.gt.Scalar", "aten.view", "aten.where.ScalarOther")
    one = [t.replace("prefill", "decode") for t in one if t not in masked]
    assert targets(graph) == ["aten.embedding", *one, *one]
    assert "num_computed_tokens" not in graph.input_names
    assert "cu_seqlens" not in graph.input_names


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_mixers_of_the_model(
    canonical: Graph, half_canonical: Graph, context: PassContext, phase: str, dtype: torch.dtype
) -> None:
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    (report,) = run_passes(graph, [LowerMixers()], context)
    assert (report.matches, report.expected) == (2, 2)
    for name in ("causal_conv1d", "gated_delta_rule"):
        assert graph.nodes(OPS[name].overload) == []
        assert len(graph.nodes(OPS[f"{name}_{phase}"].overload)) == 1
    assert len(graph.nodes(OPS["attention"].overload)) == 1
    assert graph.states == {
        "state.layers.0.conv": StateSpec("slot", (80, 4), dtype),
        "state.layers.0.recurrent": StateSpec("slot", (4, 12, 8), torch.float32),
    }


def test_the_state_dtype_is_the_contexts(half_canonical: Graph, context: PassContext) -> None:
    graph = half_canonical.clone("decode")
    half = PassContext(context.config, torch.bfloat16, 16)
    run_passes(graph, [LowerMixers()], half)
    assert graph.states["state.layers.0.recurrent"].dtype == torch.bfloat16


def test_two_mixers_of_one_layer_cannot_share_a_state(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x, weight = b.hidden(), b.weight("layers.0.mixer.conv1d.weight", 8, 4)
        for _ in range(2):
            x = b.call(OPS["causal_conv1d"].overload, x, weight)
        return x

    with pytest.raises(CompileError, match=r"state\.layers\.0\.conv is written 2 times a step"):
        apply(toy(source, body), LowerMixers(), context)
