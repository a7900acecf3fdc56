"""A graph without its repetitions: each call once that differs in more than data.

Owns the reduction. Does not own what it is for: without data, a call depends on the shapes,
strides and dtypes of its arguments alone, so the calls that are left launch the same kernels as
all of them did (`runtime/kernel_builds.py`, `runtime/captures.py`). Layers of one type fall
together.

    small = skeleton(graph, states)               # the 0.8B's decode: 840 nodes become 60
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from minivllm.compiler.graph import META, SYMBOLS, Graph

# Sizes of `SYMBOLS`: primes that are no size of a model's. What is alike only because a batch has
# as many tokens as a weight has rows is not alike.
GENERIC = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)


def meta_weights(graph: Graph) -> dict[str, Tensor]:
    """The graph's weights by name, without data."""
    return {
        name: torch.empty(spec.shape, dtype=spec.dtype, device=META)
        for name, spec in graph.weights.items()
    }


def meta_inputs(graph: Graph, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The graph's inputs by name, without data.

    Args:
        sizes: of each symbol that they have as a dim.
    """

    def size(dim: str | int) -> int:
        if isinstance(dim, int):
            return dim
        return sizes["seqs"] + 1 if dim == "seqs + 1" else sizes[dim]

    specs = {name: graph.inputs[name] for name in graph.input_names}
    return {
        name: torch.empty([size(d) for d in spec.dims], dtype=spec.dtype, device=META)
        for name, spec in specs.items()
    }


def skeleton(graph: Graph, states: Mapping[str, Tensor]) -> Graph:
    """The graph with one call for all that are alike; it returns something like its output.

    Its inputs stand for themselves, so what indexes by them stays within bounds.

    Args:
        graph: after its last pass; not changed.
        states: a pool for each of its states, on meta.
    """
    leaves = meta_weights(graph) | dict(states)
    generic = dict(zip(SYMBOLS, GENERIC, strict=True))
    if graph.phase == "decode":
        generic["seqs"] = generic["tokens"]
    inputs = meta_inputs(graph, generic)
    small = fx.Graph()
    values: dict[fx.Node, Any] = {}  # of the new graph's nodes
    calls: dict[tuple[Any, ...], fx.Node] = {}
    alike: dict[Any, fx.Node] = {}  # by what a value is like: the first node that has it
    stands_for: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        if node.op == "output":
            small.output(fx.node.map_arg(node.args[0], stands_for.__getitem__))
            continue
        if node.op == "get_attr":
            kind = _description(leaves[str(node.target)], node)
            if kind in alike:
                stands_for[node] = alike[kind]
                continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), stands_for.__getitem__)
        call = (node.op, node.target, repr(args), repr(kwargs))
        if call not in calls:
            new = calls[call] = small.node_copy(node, stands_for.__getitem__)
            if node.op == "placeholder":
                values[new] = inputs[str(node.target)]
            elif node.op == "get_attr":
                values[new] = leaves[str(node.target)]
            else:
                args, kwargs = fx.node.map_arg((args, kwargs), values.__getitem__)
                values[new] = node.target(*args, **kwargs)
        known = calls[call]
        if node.op == "placeholder":
            stands_for[node] = known
            continue
        stands_for[node] = alike.setdefault(_description(values[known], known), known)
    reached = {node.target for node in values if node.op == "get_attr"}
    return dataclasses.replace(
        graph,
        fx=small,
        weights={n: spec for n, spec in graph.weights.items() if n in reached},
        states={n: spec for n, spec in graph.states.items() if n in reached},
    )


def _description(value: Any, node: fx.Node) -> Any:
    """All that a kernel's build may depend on; what is no tensor or number is like nothing else."""
    if isinstance(value, Tensor):
        aligned = value.data_ptr() % 16
        return tuple(value.shape), value.stride(), value.dtype, aligned
    if isinstance(value, (list, tuple)):
        return tuple(_description(v, node) for v in value)
    return value if isinstance(value, (bool, int, float)) else node
