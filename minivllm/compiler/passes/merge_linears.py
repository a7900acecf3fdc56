"""merge_linears: projections of the same input become one, with a merged weight.

    %q = linear(%h, q_proj.weight)         %all = linear(%h, q_proj+k_proj+v_proj.weight)
    %k = linear(%h, k_proj.weight)   ->    %q, %k, %v = split_with_sizes(%all, ..., -1)
    %v = linear(%h, v_proj.weight)

The merged weight is a recipe (which rows hold which tensor) that the loader executes, so there
is never a second copy. Each part starts at a multiple of 16 bytes of the output row, so that
kernels can load the slices in wide words; the rows between are zero.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph, WeightPart, WeightSpec
from minivllm.compiler.passes.base import GraphPass, PassContext

aten = torch.ops.aten

ALIGNMENT = 16  # bytes


class MergeLinears(GraphPass):
    """Merge the linears of one module that read the same value."""

    name = "merge_linears"

    def expected(self, phase: str, context: PassContext) -> list[str]:
        layers = range(context.config.num_hidden_layers)
        return [f"layers.{i}.{part}" for i in layers for part in ("mixer", "mlp")]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        groups: defaultdict[tuple[Node, str, int], list[Node]] = defaultdict(list)
        context.misses.looked_for(aten.linear.default)
        for node in graph.nodes(aten.linear.default):
            x, weight, *bias = (a for a in node.args if a is not None)
            module = node.meta["module"].rpartition(".")[0]
            obstacle = _obstacle(graph, weight, bias)
            if obstacle is None:
                groups[x, module, len(bias)].append(node)  # type: ignore[index]
            else:
                at, wanted, reason = obstacle
                context.misses.add(graph, node, wanted, at=at, reason=reason, site=module)
        merged = {key: nodes for key, nodes in groups.items() if len(nodes) > 1}
        for (_, module, _), nodes in merged.items():
            _merge(graph, module, nodes)
        for (x, module, biases), nodes in groups.items():
            if len(nodes) == 1:
                reason = f"no other linear of its module reads %{x} with {biases} biases"
                wanted = "a value that several linears read"
                context.misses.add(graph, nodes[0], wanted, at=x, reason=reason, site=module)
        return [module for _, module, _ in merged]


def _obstacle(graph: Graph, weight: Any, bias: Sequence[Any]) -> tuple[Any, str, str] | None:
    """What keeps a linear from being merged: where, what is wanted in its place, and why."""
    for value in (weight, *bias):
        if not _is_private(graph, value):
            reason = "it is computed or read elsewhere, too, and would be held twice"
            return value, "a weight that this linear alone reads", reason
    shape = graph.weights[str(weight.target)].shape
    if len(shape) != 2:
        return weight, "a matrix", "another shape: a vector leaves no column to split"
    for value in bias:
        if graph.weights[str(value.target)].shape != shape[:1]:
            return value, "a vector along the weight's rows", "another shape: it broadcasts"
    return None


def _is_private(graph: Graph, weight: object) -> bool:
    """Whether it is a weight with one reader, in memory of its own."""
    if not isinstance(weight, Node) or len(weight.users) != 1:
        return False
    spec = graph.weights.get(str(weight.target))
    return spec is not None and not spec.shared


def _merge(graph: Graph, module: str, nodes: list[Node]) -> None:
    first = nodes[0]
    x = first.args[0]
    itemsize = first.meta["val"].dtype.itemsize
    step = max(ALIGNMENT // itemsize, 1)
    widths = [node.meta["val"].shape[-1] for node in nodes]
    padded = [-(-width // step) * step for width in widths]
    starts = [sum(padded[:i]) for i in range(len(nodes))]
    leaves = []
    for position in range(1, len(first.all_input_nodes)):
        parts = [node.args[position] for node in nodes]
        names = [str(p.target) for p in parts if isinstance(p, Node)]
        spec = graph.weights[names[0]]
        recipe = tuple(map(WeightPart, names, starts, widths))
        suffix = names[0].rpartition(".")[2]
        # the linears' names, or those of weights that belong to the module itself
        short = "+".join((["", *name.split(".")])[-2] or name for name in names)
        merged = WeightSpec((sum(padded), *spec.shape[1:]), spec.dtype, recipe)
        leaves.append(graph.weight(".".join(filter(None, (module, short, suffix))), merged))
    whole = graph.call(aten.linear.default, x, *leaves, like=first)
    gaps = [full - width for width, full in zip(widths, padded, strict=True)]
    sizes = [s for pair in zip(widths, gaps, strict=True) for s in pair if s > 0]
    split = graph.call(aten.split_with_sizes.default, whole, sizes, -1, like=first)
    indices = [i + sum(gap > 0 for gap in gaps[:i]) for i in range(len(nodes))]
    slices = [graph.call(operator.getitem, split, i, like=first) for i in indices]
    for node in (whole, split, *slices):
        node.meta["module"] = module
    for node, slice_ in zip(nodes, slices, strict=True):
        graph.replace(node, slice_)
