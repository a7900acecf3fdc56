"""select_logits: the head sees the wanted rows only, and they are the same."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node
from toy_graphs import IDS, TABLE, Builder, aten, evaluate, randn, targets, toy

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.select_logits import SelectLogits
from minivllm.compiler.runner import CompileError, run_passes


def head(b: Builder, *, bias: bool) -> Node:
    x = b.call(aten.relu.default, b.hidden(), module="norm")
    biases = [b.weight("lm_head.bias", 61)] if bias else []
    return b.call(aten.linear.default, x, b.weight("lm_head.weight", 61, 8), *biases, module="")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [[8], [0, 3, 8], [3, 3], list(range(9))])
def test_select_logits(source: Graph, context: PassContext, rows: list[int], bias: bool) -> None:
    weights = TABLE | {"lm_head.weight": randn(61, 8, seed=2), "lm_head.bias": randn(61, seed=3)}
    graph = toy(source, lambda b: head(b, bias=bias))
    expected = evaluate(graph, {"input_ids": IDS}, weights)[rows]
    (report,) = run_passes(graph, [SelectLogits()], context)
    assert (report.matches, report.expected, report.calls_after - report.calls_before) == (1, 1, 1)
    assert targets(graph)[-2:] == ["aten.index_select", "aten.linear"]
    value = graph.output.meta["val"]
    assert [graph.named(s) for s in value.shape] == ["rows", "61"]
    inputs = {"input_ids": IDS, "logits_rows": torch.tensor(rows)}
    torch.testing.assert_close(evaluate(graph, inputs, weights), expected)


def test_select_logits_is_for_prefill_and_a_linear_head(
    source: Graph, context: PassContext
) -> None:
    assert SelectLogits.phases == ("prefill",)
    with pytest.raises(CompileError, match=r"matched 0 of 1 sites; unmatched: head"):
        run_passes(
            toy(source, lambda b: b.call(aten.relu.default, b.hidden())), [SelectLogits()], context
        )
