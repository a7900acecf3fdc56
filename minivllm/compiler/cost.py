"""What a step of a graph costs: launches, bytes and FLOPs, planned from the nodes alone.

Owns the counting. Does not own measurements (`bench/`).

    table = CostTable()
    compile_model(config, dtype, options, observers=(table.observe,))
    table.stages["decode"][-1].cost.launches

A launch is a call that computes something; views and tuple elements cost nothing. Decode attention
is two where its kernel splits the keys, and so is a linear with the norm behind it; the chunked
delta rule is three, and one more for rows that are not normalized; prefill attention's second
kernel, behind a short part that is split as well, is not counted. Bytes are what a call must read
and write at least once: its tensors, but of a pool only the rows it touches, and no scratch memory.
FLOPs are those of linears, convolutions, attention (of the keys that a token sees) and the delta
rule as it is defined, token by token; a multiplication and an addition are two. What acts on each
element by itself is bound by its bytes and counts none.
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
from minivllm.ops.chunked_delta_rule import launches as chunked_launches
from minivllm.ops.linear import launches as linear_launches
from minivllm.ops.paged_attention import num_splits

aten = torch.ops.aten
LINEARS = {OPS[name].overload: name for name in OPS if "linear" in name}
CHUNKED = [OPS[f"fused_gated_delta_rule_prefill{end}"].overload for end in ("", "_slots")]
NORMALIZED = [a.name for a in CHUNKED[1]._schema.arguments].index("normalized")
CONTEXT = 256  # tokens of KV cache that a sequence of a planned step attends to, or its own if more
STEPS = {"prefill": 512, "decode": 1}  # phase to the tokens of the one sequence of a planned step


@dataclass(frozen=True)
class Cost:
    """Of one call or of a whole graph; bytes are read and written together."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.launches + other.launches, self.bytes + other.bytes, self.flops + other.flops
        )


@dataclass(frozen=True)
class Stage:
    """A graph after a pass: its name, calls (views among them), all nodes and cost."""

    name: str
    calls: int
    nodes: int
    cost: Cost


class CostTable:
    """Collects the cost of every stage of the planned steps while a model is compiled."""

    def __init__(self) -> None:
        self.stages: dict[str, list[Stage]] = {}

    def observe(self, graph: Graph, stage: str) -> None:
        """An observer for `runner.run_passes`."""
        self.add(graph, stage, call_costs(graph))

    def add(self, graph: Graph, stage: str, costs: Mapping[Node, Cost]) -> None:
        """A stage whose calls' costs are known."""
        cost = sum(costs.values(), Cost())
        counted = Stage(stage, len(costs), len(graph.fx.nodes), cost)
        self.stages.setdefault(graph.phase, []).append(counted)


def planned_context(phase: str) -> int:
    """Tokens that the sequence of the planned step attends to, with its own."""
    return max(CONTEXT, STEPS[phase])


def call_costs(graph: Graph) -> dict[Node, Cost]:
    """The cost of each call in the planned step of the graph's phase."""
    values = Sizes(graph, {"tokens": STEPS[graph.phase]})
    context = planned_context(graph.phase)
    return {node: call_cost(graph, node, values, context) for node in graph.nodes()}


class Sizes:
    """The values of a graph's symbolic sizes.

    Args:
        sizes: symbol to value; symbols that are not named count as 1.
    """

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self._symbols = {str(s): sizes.get(name, 1) for name, s in graph.symbols.items()}
        self._known: dict[Any, int] = {}  # substitution is slow, and there are few expressions

    def __getitem__(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._known:
            symbols = {s: self._symbols[str(s)] for s in expression.free_symbols}
            self._known[expression] = int(expression.subs(symbols))
        return self._known[expression]


def call_cost(graph: Graph, node: Node, values: Sizes, context: int) -> Cost:
    """The cost of one call.

    Args:
        context: tokens of KV cache that each sequence attends to.
    """
    if is_free(node):
        return Cost()
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
        launches = linear_launches(LINEARS[node.target], values[rows.shape[0]], rows.dtype)
    if node.target in CHUNKED:
        launches = chunked_launches(len(node.args) > NORMALIZED and bool(node.args[NORMALIZED]))
    sequences = values[graph.symbols["seqs"]]
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
    return Cost(launches, moved, _flops(node, values, sequences, context))


def _flops(node: Node, values: Sizes, sequences: int, context: int) -> int:
    """Of a call: multiplications and additions of products."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    name = str(node.target).removesuffix(".default").removeprefix("minivllm.")
    names = [argument.name for argument in node.target._schema.arguments]
    shapes = {
        argument: [values[s] for s in value.meta["val"].shape]
        for argument, value in zip(names, node.args, strict=False)
        if isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor)
    }
    if name == "aten.linear" or node.target in LINEARS:
        rows = shapes["input" if name == "aten.linear" else "x"][0]
        return 2 * rows * math.prod(shapes["weight"])
    if name.startswith("causal_conv1d"):
        return 2 * shapes["x"][0] * math.prod(shapes["weight"])
    if "gated_delta_rule" in name:  # of a [K, V] state: decay, read, write and read again
        (tokens, heads, value_dim), key_dim = shapes["v"], shapes["k"][-1]
        return 7 * tokens * heads * value_dim * key_dim
    if name == "attention" or name.startswith("paged_attention"):
        tokens, heads, dim = shapes["q"]
        own = tokens // sequences
        seen = context - own if name != "attention" else 0  # before a sequence's own first token
        pairs = tokens * seen + sequences * own * (own + 1) // 2
        return 4 * heads * dim * pairs
    return 0


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


def _bytes(value: Any, values: Sizes) -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(values[s] for s in value.shape) * value.dtype.itemsize
    if isinstance(value, (list, tuple)):
        return sum(_bytes(v, values) for v in value)
    return 0
