"""Nodes as text: how dumps and explanations write a call, an argument and a type.

Owns the spelling. Does not own what is written where (dump.py, near_miss.py).

    f"%{node.name} = {call_text(graph, node)}: {type_text(graph, node)}"

Names are FX's, sizes are the vocabulary's symbols, weights stand inline; there are no addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx import Node

from minivllm.compiler.graph import Graph


def call_text(graph: Graph, node: Node) -> str:
    """A call without its name: `aten.mean.dim(%pow_1, [-1], True)`."""
    arguments = [argument_text(graph, a) for a in node.args]
    arguments += [f"{k}={argument_text(graph, v)}" for k, v in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def target_text(target: Any) -> str:
    """The name of what a call calls: `aten.rsqrt`, `aten.mul.Tensor`, `getitem`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def argument_text(graph: Graph, value: Any) -> str:
    """An argument: a leaf by its target, a call by its name, a literal as Python writes it."""
    if isinstance(value, Node):
        return str(value.target) if value.op != "call_function" else f"%{value.name}"
    if isinstance(value, (list, tuple, fx.immutable_collections.immutable_list)):
        return f"[{', '.join(argument_text(graph, v) for v in value)}]"
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    return repr(value)


def type_text(graph: Graph, node: Node) -> str:
    """Dtype and shape of a node's value: `float32[tokens, 8]`; of a graph from a file, as kept."""
    return node.meta["type"] if "type" in node.meta else value_text(graph, node.meta["val"])


def value_text(graph: Graph, value: Any) -> str:
    """Dtype and shape of a fake value: `float32[tokens, 8]`; of several, `(float32[...], ...)`."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}[{', '.join(graph.named(s) for s in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(value_text(graph, v) for v in value)})"
    return type(value).__name__


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
