"""From a traced module of a user to the compiler's graph.

Owns what both front doors share: leaves become inputs and named weights, regions that only switch
gradients off are inlined, and what no pass can handle is refused. Does not own the tracing
(module_trace.py, backend.py).

    graph = module_graph(exported.graph, inputs, weights)

The source holds pre-dispatch ATen, never decomposed: the same that patterns are traced to.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from minivllm.compiler.contract import is_mutation
from minivllm.compiler.graph import MODULE, Graph, InputSpec, WeightSpec
from minivllm.compiler.trace import module_path, source_line
from minivllm.errors import UserError

aten = torch.ops.aten

# regions that hold a submodule: how many arguments stand in front of it
REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
GRADIENT_SWITCH = torch._C._set_grad_enabled
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # torch.export's word for it
LEAF = {"module": "", "source": "", "pass": "trace"}
AUTOCAST_ENDS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


class UnsupportedModule(UserError):
    """A module that the passes cannot handle; the message says what stands where."""


def module_graph(
    source: fx.Graph,
    inputs: Mapping[Node, str],
    weights: Mapping[Node, tuple[str, Tensor]],
    prefix: str = "",
) -> Graph:
    """The graph of a user's module, to run passes on.

    Args:
        source: pre-dispatch ATen, whose nodes carry fake values.
        inputs: the placeholders that change from call to call, and their names.
        weights: the other placeholders and tensor attributes: their names and real tensors. Those
            of one tensor become one node.
        prefix: in front of module paths, to be left out.

    Returns:
        A graph of phase `MODULE` whose outputs are those of `source`, in order.

    Raises:
        UnsupportedModule: it changes a tensor in place, holds control flow or an autocast region,
            spreads over devices, or returns sizes.
    """
    values = [n.meta["val"] for n in source.nodes if n.op == "placeholder"]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        raise UnsupportedModule("no tensor goes in; there is nothing to compile")
    graph = Graph(fx.Graph(), MODULE, _symbols(inputs), mode, device=_device([*inputs, *weights]))
    mapping: dict[Node, Any] = {}
    specs: dict[str, InputSpec] = {}
    for node, name in inputs.items():
        mapping[node] = graph.fx.placeholder(name)
        mapping[node].meta = {"val": node.meta["val"], **LEAF}
        specs[name] = _input_spec(node.meta["val"], graph)
    graph.inputs = specs
    shared = overlapping([tensor for _, tensor in weights.values()])
    known: dict[int, Node] = {}
    for node, (name, tensor) in weights.items():
        if id(tensor) not in known:
            known[id(tensor)] = _weight(graph, name, tensor, node, id(tensor) in shared)
        mapping[node] = known[id(tensor)]
    result = _Copier(graph, prefix).copy(source, mapping)
    sizes = [a for a in result if isinstance(a, Node) and not isinstance(a.meta["val"], Tensor)]
    if sizes:
        raise UnsupportedModule(f"it returns {sizes[0].meta['val']}, which is no tensor")
    graph.fx.output(tuple(result))
    return graph


def _symbols(inputs: Mapping[Node, str]) -> dict[str, torch.SymInt]:
    """The sizes that change from call to call, named after the first input that has them."""
    symbols: dict[str, torch.SymInt] = {}
    seen = set()
    for node, name in inputs.items():
        value = node.meta["val"]
        sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, Tensor) else ()
        for dim, size in enumerate(sizes):
            if isinstance(size, torch.SymInt) and size.node.expr not in seen:
                seen.add(size.node.expr)
                symbols[f"{name}.{dim}"] = size
    return symbols


def _device(leaves: Sequence[Node]) -> torch.device:
    """Where everything lies; single numbers may lie on the CPU."""
    found = {n.meta["val"].device for n in leaves if isinstance(n.meta["val"], Tensor) and n.users}
    large = {
        n.meta["val"].device
        for n in leaves
        if isinstance(n.meta["val"], Tensor) and n.users and n.meta["val"].ndim > 0
    }
    devices = sorted(map(str, large or found)) or ["cpu"]
    if len(devices) > 1:
        raise UnsupportedModule(f"its tensors lie on {', '.join(devices)}; move them to one device")
    return torch.device(devices[0])


def _input_spec(value: Any, graph: Graph) -> InputSpec:
    if not isinstance(value, Tensor):
        return InputSpec((), torch.int64, "a size")
    dims = tuple(s if isinstance(s, int) else graph.named(s) for s in value.shape)
    return InputSpec(dims, value.dtype, "an argument")


def _weight(graph: Graph, name: str, tensor: Tensor, node: Node, shared: bool) -> Node:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UnsupportedModule(f"{name} is a {type(tensor).__name__}, no plain tensor")
    copied = graph.fx.create_node("get_attr", name, name=re.sub(r"\W", "_", name))
    copied.meta = {"val": node.meta["val"], **LEAF}
    graph.weights[name] = WeightSpec(tuple(tensor.shape), tensor.dtype, shared=shared)
    return copied


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of those tensors that have bytes in common with another one of them."""
    unique = {id(t): t for t in tensors if t.device.type != "meta" and t.numel()}
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, key) for key, t in unique.items())
    found: set[int] = set()
    end, last = 0, 0
    for start, stop, key in spans:
        if start < end:
            found |= {key, last}
        if stop > end:
            end, last = stop, key
    return found


class _Copier:
    """Copies calls into a graph, those of inner regions as well."""

    def __init__(self, graph: Graph, prefix: str) -> None:
        self.graph = graph
        self.prefix = prefix

    def copy(self, source: fx.Graph, mapping: dict[Node, Any]) -> list[Any]:
        """Copy all calls of a graph whose leaves `mapping` has; returns its outputs."""
        for node in source.nodes:
            if node.op == "call_function":
                mapping[node] = self._call(node, mapping)
        (outputs,) = source.output_node().args
        values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return list(fx.node.map_arg(tuple(values), lambda n: mapping[n]))

    def _call(self, node: Node, mapping: dict[Node, Any]) -> Any:
        target = node.target
        if target is GRADIENT_SWITCH:
            return None  # nothing here has gradients
        if target is aten.detach_.default:
            return mapping[node.args[0]]  # type: ignore[index]
        if target in AUTOCAST_ENDS:
            if target is AUTOCAST_ENDS[0] and node.args[2]:
                raise UnsupportedModule(f"it enters autocast at {_place(node)}; cast by .to(dtype)")
            return None
        if isinstance(target, HigherOrderOperator):
            return self._region(node, mapping)
        if target is operator.getitem and isinstance(node.args[0], Node):
            whole = mapping[node.args[0]]
            if not isinstance(whole, Node):  # the results of a region
                return whole[node.args[1]]
        if target is aten.item.default and _is_known(node.meta["val"]):
            # a number that dynamo hands in as a tensor, such as an epsilon: patterns want a literal
            return float(node.meta["val"])
        if target is aten.as_strided.default:
            raise UnsupportedModule(
                f"it calls as_strided at {_place(node)}, whose result hangs on strides that change"
            )
        if is_mutation(node):
            raise UnsupportedModule(
                f"it changes a tensor in place: {target} at {_place(node)}; "
                "write what returns a new tensor"
            )
        copied = self.graph.fx.node_copy(node, lambda n: mapping[n])
        module, source = self.path(node), source_line(node)
        copied.meta = {"val": node.meta["val"], "module": module, "source": source, "pass": "trace"}
        return copied

    def path(self, node: Node) -> str:
        """The module path, without what dynamo puts in front of it: `L['self'].layers.0`."""
        path = re.sub(r"^L\[[^]]*\](\[\d+\])?\.?", "", module_path(node))
        if path == NO_MODULE:
            return ""
        return f"{path}.".removeprefix(self.prefix).removesuffix(".")

    def _region(self, node: Node, mapping: dict[Node, Any]) -> Any:
        name = node.target.name()  # type: ignore[union-attr]
        position = REGIONS.get(name)
        if position is None:
            raise UnsupportedModule(f"it calls {name} at {_place(node)}, which no pass sees into")
        if name == "wrap_with_autocast" and node.args[2]:
            raise UnsupportedModule(f"it enters autocast at {_place(node)}; cast by .to(dtype)")
        body, *arguments = node.args[position:]
        assert isinstance(body, Node) and node.graph.owning_module is not None
        region: Any = node.graph.owning_module.get_submodule(str(body.target))
        inner: fx.Graph = region.graph
        leaves = [n for n in inner.nodes if n.op == "placeholder"]
        given = fx.node.map_arg(tuple(arguments), lambda n: mapping[n])
        return self.copy(inner, dict(zip(leaves, given, strict=True)))


def _is_known(value: Any) -> bool:
    """Whether a float's value is known while tracing, so that it can be assumed."""
    return isinstance(value, float) or (isinstance(value, torch.SymFloat) and value.node.has_hint())


def _place(node: Node) -> str:
    return source_line(node) or module_path(node) or str(node)
