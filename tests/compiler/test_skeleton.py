"""The graph without its repetitions: what is left, and that nothing else is."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from minivllm.compiler.bind import bind
from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import META, SYMBOLS, Graph
from minivllm.compiler.skeleton import meta_inputs, meta_weights, skeleton
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig


def states(graph: Graph) -> dict[str, Tensor]:
    return {
        n: torch.empty((2, *s.shape), dtype=s.dtype, device=META) for n, s in graph.states.items()
    }


def reduced(graph: Graph) -> Graph:
    return skeleton(graph, states(graph))


def calls(graph: Graph) -> Counter[str]:
    return Counter(str(n.target) for n in graph.nodes())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_layers_of_a_kind_fall_together(phase: str, compiled: CompiledModel) -> None:
    graph = compiled.graphs[phase]
    before = list(graph.fx.nodes)
    small = reduced(graph)
    small.fx.lint()
    assert list(graph.fx.nodes) == before, "the graph given has changed"
    assert small.input_names == graph.input_names and small.phase == phase
    assert set(calls(small)) == set(calls(graph)), "a target is gone"
    assert len(small.fx.nodes) < len(graph.fx.nodes)
    assert set(small.weights) < set(graph.weights)


def test_more_layers_are_no_more_calls(config: MiniQwenConfig) -> None:
    counts = []
    for repeats in (1, 3):
        types = config.layer_types * repeats
        longer = dataclasses.replace(config, layer_types=types, num_hidden_layers=len(types))
        model = compile_model(longer, torch.float32, CompilerOptions(mode="compiled"))
        counts.append([calls(reduced(graph)) for graph in model.graphs.values()])
    # one layer of each kind, and the end: the last layer's norm is followed by no other layer
    for short, long in zip(*counts, strict=True):
        assert (long - short).total() <= 4


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_it_runs_at_other_sizes(phase: str, compiled: CompiledModel) -> None:
    graph = compiled.graphs[phase]
    small = reduced(graph)
    sizes = dict(zip(SYMBOLS, (24, 24 if phase == "decode" else 3, 5, 7, 9, 11, 4, 6), strict=True))
    every = meta_weights(graph) | states(graph)

    def call_of(op, _):
        def call(*args):
            return op.overload(*args)

        call.__name__ = call.__qualname__ = op.name
        return call

    results = [
        bind(g, every, every, torch.device("cpu"), torch.float32, None, call_of)(
            **meta_inputs(graph, sizes)
        )
        for g in (graph, small)
    ]
    assert results[0].shape == results[1].shape and results[0].dtype == results[1].dtype


def test_what_differs_stays() -> None:
    """By target, constant, shape, stride or place in 16 bytes; a chain of equals is one."""
    traced = fx.Graph()
    x = traced.placeholder("input_ids")
    first = traced.call_function(torch.ops.aten.relu.default, (x,))
    y = traced.call_function(torch.ops.aten.mul.Tensor, (first, 2))
    z = traced.call_function(torch.ops.aten.mul.Tensor, (y, 2))  # as y is like what it is of, as y
    more = traced.call_function(torch.ops.aten.mul.Tensor, (z, 3))
    plus = traced.call_function(torch.ops.aten.add.Tensor, (more, 2))
    even = traced.call_function(torch.ops.aten.slice.Tensor, (plus, 0, 2, 1000))
    odd = traced.call_function(torch.ops.aten.slice.Tensor, (plus, 0, 3, 1001))
    parts = [traced.call_function(torch.ops.aten.neg.default, (p,)) for p in (even, odd, even)]
    wide = traced.call_function(torch.ops.aten.expand.default, (parts[0], [2, 998]))
    traced.output((wide, parts[1], parts[2]))
    graph = Graph(traced, "decode", {}, None)
    small = skeleton(graph, {})
    assert calls(small) == {
        "aten.relu.default": 1,
        "aten.mul.Tensor": 2,  # by 2 and by 3
        "aten.add.Tensor": 1,
        "aten.slice.Tensor": 2,
        "aten.neg.default": 2,  # of an aligned and of another
        "aten.expand.default": 1,
    }
