"""What a step of a graph costs: launches and bytes, planned from the nodes alone.

Owns the counting. Does not own measurements (`bench/`).

    table = CostTable({"tokens": 1}, context=256)
    compile_model(config, dtype, options, observers=(table.observe,))
    table.stages["decode"][-1].cost.launches

A launch is a call that computes something; views and tuple elements cost nothing. Decode attention
is two where its kernel splits the keys, and so is a linear with the norm behind it. Bytes are what
a call must read and write at least once: its tensors, but of a pool only the rows it touches, and
no scratch memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.ops import OPS
from minivllm.ops.linear import launches as linear_launches
from minivllm.ops.paged_attention import num_splits

aten = torch.ops.aten
LINEARS = {OPS[name].overload: name for name in OPS if "linear" in name}


@dataclass(frozen=True)
class Cost:
    """Of one call or of a whole graph; bytes are read and written together."""

    launches: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.launches + other.launches, self.bytes + other.bytes)


@dataclass(frozen=True)
class Stage:
    """A graph after a pass: its name, calls (views among them) and cost."""

    name: str
    calls: int
    cost: Cost


class CostTable:
    """Collects the cost of every stage while a model is compiled.

    Args:
        sizes: symbol to value; symbols that are not named count as 1.
        context: tokens of KV cache that each sequence attends to.
    """

    def __init__(self, sizes: Mapping[str, int], context: int) -> None:
        self.sizes = sizes
        self.context = context
        self.stages: dict[str, list[Stage]] = {}

    def observe(self, graph: Graph, stage: str) -> None:
        """An observer for `runner.run_passes`."""
        cost = graph_cost(graph, self.sizes, self.context)
        self.stages.setdefault(graph.phase, []).append(Stage(stage, len(graph.nodes()), cost))


def graph_cost(graph: Graph, sizes: Mapping[str, int], context: int) -> Cost:
    """The cost of one step."""
    values = {str(symbol): sizes.get(name, 1) for name, symbol in graph.symbols.items()}
    total = Cost(0, 0)
    for node in graph.nodes():
        total += call_cost(graph, node, values, context)
    return total


def call_cost(graph: Graph, node: Node, values: Mapping[str, int], context: int) -> Cost:
    """The cost of one call.

    Args:
        values: the graph's symbols, as they print, to their values.
        context: tokens of KV cache that each sequence attends to.
    """
    if is_free(node):
        return Cost(0, 0)
    output = _bytes(node.meta["val"], values)
    if node.target in (aten.embedding.default, aten.index_select.default):
        return Cost(1, 2 * output)
    if node.target is aten.index_copy_.default:
        source = node.args[3]
        assert isinstance(source, Node)
        return Cost(1, 2 * _bytes(source.meta["val"], values))
    if node.target is torch.ops.minivllm.paged_kv_write.default:
        new = node.all_input_nodes[2:4]
        return Cost(1, 2 * sum(_bytes(n.meta["val"], values) for n in new))
    moved, launches = output, 1
    if node.target in LINEARS:
        rows = node.all_input_nodes[0].meta["val"]
        launches = linear_launches(LINEARS[node.target], _size(rows.shape[0], values), rows.dtype)
    sequences = _size(graph.symbols["seqs"], values)
    for source in node.all_input_nodes:
        spec = graph.states.get(str(source.target))
        if spec is None:
            moved += _bytes(source.meta["val"], values)
        elif spec.kind == "slot":  # each sequence's entry, in and out
            moved += 2 * sequences * spec.bytes_per_entry
        else:
            block_size, kv_heads, _ = spec.shape
            moved += sequences * context * spec.bytes_per_entry // block_size
            split = num_splits(sequences, kv_heads, -(-context // block_size)) > 1
            if split and node.target is torch.ops.minivllm.paged_attention_decode.default:
                launches = 2
    return Cost(launches, moved)


def is_free(node: Node) -> bool:
    """Whether a call moves no data: a tuple's element or a view."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is aten.to.dtype:
        return bool(node.all_input_nodes[0].meta["val"].dtype == node.meta["val"].dtype)
    returns = node.target._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _bytes(value: Any, values: Mapping[str, int]) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(_size(s, values) for s in value.shape) * value.dtype.itemsize
    if isinstance(value, (list, tuple)):
        return sum(_bytes(v, values) for v in value)
    return 0


def _size(size: int | torch.SymInt, values: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({s: values[str(s)] for s in expression.free_symbols}))
