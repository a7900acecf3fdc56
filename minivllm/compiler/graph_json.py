"""A finished graph as JSON, and back: what binding and running it need, and its listing.

Owns the spelling. Does not own files (graph_cache.py).

    data = graph_data(compiled.decode)
    graph = read_graph(json.loads(json.dumps(data)))

A node is `[name, op, target, args, kwargs, meta]`. In arguments a node is `"%name"`, a dtype
`{"dtype": "bfloat16"}`, a tuple `{"tuple": [...]}` and a text `{"text": "..."}`; numbers, booleans,
null and lists are themselves. A graph that was read cannot be rewritten: the types of its values
are text, and there is nothing to infer others with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from minivllm.compiler.graph import INPUTS, Graph, StateSpec, WeightPart, WeightSpec
from minivllm.compiler.text import dtype_text, type_text

GETITEM = "operator.getitem"
META = ("module", "source", "pass")  # kept of a node's meta, beside its type
LIBRARIES = ("aten.", "minivllm.")  # whose ops a graph may call


def graph_data(graph: Graph) -> dict[str, Any]:
    """A graph as lists, mappings, texts and numbers.

    Raises:
        TypeError: it holds something that has no spelling here.
    """
    return {
        "phase": graph.phase,
        "weights": {name: _weight_data(spec) for name, spec in graph.weights.items()},
        "states": {
            name: [spec.kind, list(spec.shape), dtype_text(spec.dtype)]
            for name, spec in graph.states.items()
        },
        "nodes": [_node_data(graph, node) for node in graph.fx.nodes],
    }


def read_graph(data: Mapping[str, Any]) -> Graph:
    """The graph that `graph_data` was given: the same nodes in the same order.

    Raises:
        Exception: of any kind, where `data` is something else.
    """
    graph = Graph(
        fx.Graph(),
        data["phase"],
        symbols={},
        fakes=None,
        weights={name: _read_weight(*spec) for name, spec in data["weights"].items()},
        states={
            name: StateSpec(kind, tuple(shape), _dtype(dtype))
            for name, (kind, shape, dtype) in data["states"].items()
        },
    )
    nodes: dict[str, Node] = {}
    targets: dict[str, Callable[..., Any]] = {}
    for name, op, target, args, kwargs, meta in data["nodes"]:
        called = target
        if op == "call_function":
            if target not in targets:
                targets[target] = _callable(target)
            called = targets[target]
        else:
            _check_leaf(graph, op, target)
        node = graph.fx.create_node(
            op,
            called,
            tuple(_read_argument(a, nodes) for a in args),
            {key: _read_argument(a, nodes) for key, a in kwargs.items()},
            name=name,
        )
        if node.name != name:
            raise ValueError(f"{name} is the name of two nodes")
        node.meta = dict(meta)
        nodes[f"%{name}"] = node
    return graph


def _check_leaf(graph: Graph, op: str, target: str) -> None:
    """Names of leaves become code when a graph is bound: none but those that are known."""
    known: Collection[str] = ()
    if op == "placeholder":
        known = INPUTS.keys()
    elif op == "get_attr":
        known = graph.weights.keys() | graph.states.keys()
    elif op == "output":
        known = ("output",)
    if target not in known:
        raise ValueError(f"{op} {target!r} is not of this graph")


def _weight_data(spec: WeightSpec) -> list[Any]:
    parts = [[part.name, part.start, part.rows] for part in spec.parts]
    return [list(spec.shape), dtype_text(spec.dtype), parts, spec.shared]


def _read_weight(shape: list[int], dtype: str, parts: list[Any], shared: bool) -> WeightSpec:
    recipe = tuple(WeightPart(name, start, rows) for name, start, rows in parts)
    return WeightSpec(tuple(shape), _dtype(dtype), recipe, shared)


def _node_data(graph: Graph, node: Node) -> list[Any]:
    target = node.target if isinstance(node.target, str) else _target_name(node.target)
    args = [_argument_data(a) for a in node.args]
    kwargs = {key: _argument_data(a) for key, a in node.kwargs.items()}
    meta = {key: node.meta[key] for key in META if key in node.meta}
    if node.op != "output":
        meta = {"type": type_text(graph, node), **meta}
    return [node.name, node.op, target, args, kwargs, meta]


def _argument_data(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_text(value)}
    if isinstance(value, tuple):
        return {"tuple": [_argument_data(v) for v in value]}
    if isinstance(value, list):
        return [_argument_data(v) for v in value]
    raise TypeError(f"{value!r} ({type(value).__name__}) has no spelling")


def _read_argument(value: Any, nodes: Mapping[str, Node]) -> Any:
    if isinstance(value, str):
        return nodes[value]
    if isinstance(value, list):
        return [_read_argument(v, nodes) for v in value]
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind == "tuple":
            return tuple(_read_argument(v, nodes) for v in inner)
        if kind not in ("text", "dtype"):
            raise ValueError(f"{kind} is no kind of argument")
        return inner if kind == "text" else _dtype(inner)
    return value


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise TypeError(f"{target} is no op of a library")


def _callable(name: str) -> Callable[..., Any]:
    """The op of `aten.linear.default`."""
    if name == GETITEM:
        return operator.getitem
    if not name.startswith(LIBRARIES):
        raise ValueError(f"{name} is no op of {' or '.join(LIBRARIES)}")
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name} is no op of a library")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
