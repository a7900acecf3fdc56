"""A value that is taken from an earlier call of the same types is the one that torch infers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import Builder, aten, tiny_config, toy

from minivllm.compiler.compile import compile_model
from minivllm.compiler.graph import Graph
from minivllm.config import CompilerOptions


def layout(graph: Graph, value: Any) -> Any:
    """Dtype, device, sizes and strides."""
    if isinstance(value, (list, tuple)):
        return [layout(graph, v) for v in value]
    sizes = [graph.named(size) for size in (*value.shape, *value.stride())]
    return value.dtype, value.device, sizes


@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stage_has_the_types_that_torch_infers(mode: str, dtype: torch.dtype) -> None:
    seen: dict[Node, Any] = {}

    def observe(graph: Graph, stage: str) -> None:
        for node in graph.nodes():
            if seen.get(node) is node.meta["val"]:
                continue
            seen[node] = node.meta["val"]
            args, kwargs = torch.fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda n: n.meta["val"]
            )
            fresh = graph._inferred(node, args, kwargs)
            assert layout(graph, node.meta["val"]) == layout(graph, fresh), (stage, node)

    config = tiny_config(
        num_hidden_layers=4, layer_types=("linear_attention", "full_attention") * 2
    )
    compile_model(config, dtype, CompilerOptions(mode=mode), observers=[observe])
    assert len(seen) > 500


def test_what_differs_is_inferred_again(source: Graph) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden(8)
        calls = [
            b.call(aten.sum.dim_IntList, x, [1], True),
            b.call(aten.sum.dim_IntList, x, [1], False),
            b.call(aten.sum.dim_IntList, x, [1]),
            b.call(aten.sum.dim_IntList, x, [0], True),
            b.call(aten.sum.dim_IntList, x, [1], True, dtype=torch.float64),
            b.call(aten.transpose.int, x, 0, 1),
            b.call(aten.mul.Tensor, x, 1.0),
            b.call(aten.mul.Tensor, x, 1),
            b.call(aten.argmax.default, x, 1, True),
        ]
        transposed = calls[5]
        calls += [
            b.call(aten.clone.default, x),
            b.call(aten.clone.default, transposed),
            b.call(aten.relu.default, transposed),
            b.call(aten.relu.default, x),
        ]
        for call in calls:
            fresh = b.graph._inferred(
                call,
                *torch.fx.node.map_arg((call.args, dict(call.kwargs)), lambda n: n.meta["val"]),
            )
            assert layout(b.graph, call.meta["val"]) == layout(b.graph, fresh), call
        return x

    toy(source, body)


def test_equal_calls_are_inferred_once(source: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    inferred: list[Any] = []
    inner = Graph._inferred
    monkeypatch.setattr(
        Graph, "_inferred", lambda g, n, *a: (inferred.append(n), inner(g, n, *a))[1]
    )

    def body(b: Builder) -> Node:
        x = b.hidden(8)
        inferred.clear()
        first = b.call(aten.cosh.default, x)
        second = b.call(aten.cosh.default, first)
        assert second.meta["val"] is first.meta["val"]
        assert inferred == [first]
        return second

    graph = toy(source, body)
    copied = graph.clone("decode")
    (first, _) = copied.nodes(aten.cosh.default)
    inferred.clear()
    copied.call(aten.cosh.default, first, like=copied.output)
    assert inferred == [], "clones share what is known"
