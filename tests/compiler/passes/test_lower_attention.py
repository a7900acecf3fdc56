"""lower_attention: attention over the paged cache computes what it did without."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node
from toy_graphs import TABLE, Builder, apply, aten, evaluate, packed, pools, toy, whole_sequences

from minivllm.compiler.graph import PHASES, Graph, StateSpec
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.lower_attention import LowerAttention
from minivllm.compiler.runner import run_passes
from minivllm.ops import OPS


def attention(b: Builder) -> Node:
    """Two query heads over one key head, all of them parts of the embedding."""
    x = b.hidden()
    parts = b.call(aten.split_with_sizes.default, x, [4, 2, 2], -1)
    q, k, v = (b.call(operator.getitem, parts, i) for i in range(3))
    q, k, v = (b.call(aten.unflatten.int, t, -1, [-1, 2]) for t in (q, k, v))
    o = b.call(OPS["attention"].overload, q, k, v, 0.7)
    return b.call(aten.add.Tensor, o, q)


def test_lowered_attention_computes_the_same(source: Graph, context: PassContext) -> None:
    expected = whole_sequences(toy(source, attention), TABLE)
    graphs = {phase: toy(source, attention, phase) for phase in PHASES}
    small = PassContext(context.config, torch.float32, block_size=2)
    for graph in graphs.values():
        assert apply(graph, LowerAttention(), small) == 1
    spec = StateSpec("block", (2, 1, 2), torch.float32)
    assert (
        graphs["prefill"].states
        == graphs["decode"].states
        == {
            "state.layers.0.k_cache": spec,
            "state.layers.0.v_cache": spec,
        }
    )
    states = pools(graphs["prefill"], entries=9)
    blocks = torch.tensor([[7, 3, 0], [5, 0, 0], [1, 8, 2]])
    cuts = ((0, 0, 0), (1, 0, 2), (2, 0, 4), (3, 1, 5))
    for step, (start, end) in enumerate(itertools.pairwise(cuts)):
        places = [
            int(blocks[n, p // 2]) * 2 + p % 2 for n in range(3) for p in range(start[n], end[n])
        ]
        used = torch.tensor([-(-e // 2) for e in end])
        inputs = packed(start, end) | {
            "block_table": blocks.int(),
            "kv_indptr": F.pad(used.cumsum(0), (1, 0)).int(),
            "kv_indices": torch.cat([row[:u] for row, u in zip(blocks, used, strict=True)]).int(),
            "seq_lens": torch.tensor(end, dtype=torch.int32),
            "slot_mapping": torch.tensor(places),
        }
        phase = "decode" if step == 2 else "prefill"
        result = evaluate(graphs[phase], inputs, TABLE, states)
        wanted = [e[a:b] for e, a, b in zip(expected, start, end, strict=True)]
        torch.testing.assert_close(result, torch.cat(wanted), rtol=1e-5, atol=1e-6)
    for pool in states.values():
        assert pool[[0, 4, 6]].isnan().all()
        assert int((~pool.isnan()).sum()) == 9 * 2


@pytest.mark.parametrize("phase", PHASES)
def test_lower_attention_ops(canonical: Graph, context: PassContext, phase: str) -> None:
    graph = canonical.clone(phase)
    (report,) = run_passes(graph, [LowerAttention()], context)
    assert (report.matches, report.expected) == (1, 1)
    assert graph.nodes(OPS["attention"].overload) == []
    (write,) = graph.nodes(OPS["paged_kv_write"].overload)
    (read,) = graph.nodes(OPS[f"paged_attention_{phase}"].overload)
    order = graph.nodes()
    assert order.index(write) < order.index(read), "a token attends to itself"
    assert write.args[:2] == read.args[1:3]
    assert read.args[-1] == 0.25
    for name in ("kv_indptr", "kv_indices", "cu_seqlens"):
        assert (name in graph.input_names) == (phase == "prefill")
    assert ("block_table" in graph.input_names) == (phase == "decode")
    assert report.calls_after - report.calls_before == 1
    assert set(graph.states) == {"state.layers.1.k_cache", "state.layers.1.v_cache"}


def test_each_layer_has_its_own_cache(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        for layer in (3, 11):
            rows = b.call(aten.unflatten.int, x, -1, [2, 4], module=f"layers.{layer}.mixer")
            o = b.call(OPS["attention"].overload, rows, rows, rows, 0.5,
                       module=f"layers.{layer}.mixer")  # fmt: skip
            x = b.call(aten.flatten.using_ints, o, -2)
        return x

    graph = toy(source, body)
    assert apply(graph, LowerAttention(), context) == 2
    assert sorted(graph.states) == sorted(
        f"state.layers.{i}.{kind}_cache" for i in (3, 11) for kind in "kv"
    )
