"""From the plain model to the source graph: one `torch.export` on meta tensors, never decomposed.

Owns the front end. Does not own any rewrite: the graph leaves as export wrote it, with weights
turned into named `get_attr` nodes.

    graph = trace(config, torch.bfloat16)
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from minivllm.compiler.graph import SYMBOLS, Graph, WeightSpec
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen

TORCH = str(Path(torch.__file__).parent)


class _Traced(nn.Module):
    """The model beside an unused input whose dims make the symbols that passes will need."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, positions: Tensor, symbols: Tensor) -> Tensor:
        return self.model(input_ids, positions)


def meta_model(config: MiniQwenConfig, dtype: torch.dtype) -> MiniQwen:
    """The model without data: parameters on meta in `dtype`, `inv_freq` in float32 always."""
    with torch.device("meta"):
        model = MiniQwen(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    return model


def trace(config: MiniQwenConfig, dtype: torch.dtype) -> Graph:
    """Trace the plain model for a sequence of any length.

    Layers of one type differ in nothing but the names of their weights, so one of each type is
    traced and the others are copied from it.

    Args:
        config: the architecture.
        dtype: of the parameters and activations.

    Returns:
        The source graph: inputs `input_ids` and `positions`, one output, logits `[tokens, vocab]`.
    """
    kinds = tuple(dict.fromkeys(config.layer_types))
    template = dataclasses.replace(config, num_hidden_layers=len(kinds), layer_types=kinds)
    order = [kinds.index(kind) for kind in config.layer_types]
    return _from_exported(_export(template, dtype), order)


def _export(config: MiniQwenConfig, dtype: torch.dtype) -> torch.export.ExportedProgram:
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    extra = SYMBOLS[1:]
    # Distinct sizes keep export from taking two symbols for one.
    probe = torch.zeros([16 + i for i in range(len(extra))], device="meta")
    tokens = torch.export.Dim("tokens")
    return torch.export.export(
        _Traced(meta_model(config, dtype)),
        (ids, ids.clone(), probe),
        dynamic_shapes=(
            {0: tokens},
            {0: tokens},
            {i: torch.export.Dim(name) for i, name in enumerate(extra)},
        ),
    )


def _from_exported(exported: torch.export.ExportedProgram, order: Sequence[int]) -> Graph:
    """Our graph from export's.

    Args:
        order: for each layer of the result, the exported layer that it copies.
    """
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    probe = placeholders.pop("symbols")
    symbols = dict(zip(SYMBOLS[1:], probe.meta["val"].shape, strict=True))
    symbols["tokens"] = placeholders["input_ids"].meta["val"].shape[0]
    graph = Graph(fx.Graph(), "source", symbols, probe.meta["val"].fake_mode)
    mapping = {}
    for name in ("input_ids", "positions"):
        node = placeholders.pop(name)
        mapping[node] = graph.fx.placeholder(name)
        mapping[node].meta = _meta(node)
    signature = exported.graph_signature
    lifted = signature.inputs_to_parameters | signature.inputs_to_buffers
    leaves = {n: lifted[n.name].removeprefix("model.") for n in placeholders.values()}
    calls = [n for n in exported.graph.nodes if n.op == "call_function"]
    (result,) = exported.graph.output_node().args[0]
    unroll = _Unroll(graph, mapping, leaves, calls, order)
    graph.fx.output(unroll.run(result))
    return graph


class _Unroll:
    """Copies what stands before, in and behind the layers; each layer as often as `order` says.

    Args:
        mapping: exported nodes that have their counterpart already: the inputs.
        leaves: exported nodes of parameters and buffers, and their names.
        calls: all other exported nodes.
    """

    def __init__(
        self,
        graph: Graph,
        mapping: dict[fx.Node, fx.Node],
        leaves: dict[fx.Node, str],
        calls: list[fx.Node],
        order: Sequence[int],
    ) -> None:
        self.graph = graph
        self.mapping = mapping
        self.leaves = leaves
        self.order = order
        self.calls: dict[int | None, list[fx.Node]] = defaultdict(list)
        for node in calls:
            self.calls[_layer(_meta(node)["module"])].append(node)

    def run(self, result: fx.Node) -> fx.Node:
        """Copy everything; returns the counterpart of the exported result."""
        for node, name in self.leaves.items():
            if _layer(name) is None:
                self._leaf(node, name)
        copies = [self._layer_leaves(index, source) for index, source in enumerate(self.order)]
        layer_outputs = {k: self._output(k) for k in set(self.order)}
        outside = self.calls[None]
        first = next(i for i, n in enumerate(outside) if layer_outputs[max(self.order)] in n.args)
        for node in outside[:first]:
            self._call(node, _meta(node)["module"])
        embedded = next(n for n in outside if _meta(n)["module"] == "embed_tokens")
        hidden = self.mapping[embedded]
        for index, source in enumerate(self.order):
            self.mapping |= copies[index]
            self.mapping[embedded if source == 0 else layer_outputs[source - 1]] = hidden
            for node in self.calls[source]:
                module = _meta(node)["module"]
                self._call(node, _renamed(module, index))
            hidden = self.mapping[layer_outputs[source]]
        self.mapping[layer_outputs[max(self.order)]] = hidden
        for node in outside[first:]:
            self._call(node, _meta(node)["module"])
        return self.mapping[result]

    def _output(self, layer: int) -> fx.Node:
        """The one node of an exported layer that is read outside it."""
        inside = set(self.calls[layer])
        (output,) = (n for n in inside if any(u not in inside for u in n.users))
        return output

    def _layer_leaves(self, index: int, source: int) -> dict[fx.Node, fx.Node]:
        names = {n: name for n, name in self.leaves.items() if _layer(name) == source}
        return {n: self._leaf(n, _renamed(name, index)) for n, name in names.items()}

    def _leaf(self, node: fx.Node, name: str) -> fx.Node:
        value = node.meta["val"]
        self.graph.weights[name] = WeightSpec(tuple(value.shape), value.dtype)
        copied = self.graph.fx.create_node("get_attr", name, name=name.replace(".", "_"))
        copied.meta = _meta(node)
        self.mapping[node] = copied
        return copied

    def _call(self, node: fx.Node, module: str) -> None:
        copied = self.graph.fx.node_copy(node, lambda n: self.mapping[n])
        copied.meta = {**_meta(node), "module": module}
        self.mapping[node] = copied


def _layer(path: str) -> int | None:
    """The index in `layers.3.mixer`; None outside the layers."""
    found = re.match(r"layers\.(\d+)(\.|$)", path)
    return int(found.group(1)) if found else None


def _renamed(path: str, index: int) -> str:
    return re.sub(r"^layers\.\d+", f"layers.{index}", path)


def _meta(node: fx.Node) -> dict[str, Any]:
    """The value, the module path (`layers.0.mixer`) and the source line of a traced node."""
    module = module_path(node).removeprefix("model").removeprefix(".")
    return {"val": node.meta["val"], "module": module, "source": source_line(node)}


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that a traced node was called in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def source_line(node: fx.Node) -> str:
    """The innermost line outside of torch: of a linear, the one that calls it."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    return f"{'/'.join(own[-1][0].split('/')[-2:])}:{own[-1][1]}" if own else ""
