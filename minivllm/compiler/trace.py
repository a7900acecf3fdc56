"""From the plain model to the source graph: one `torch.export` on meta tensors, never decomposed.

Owns the front end. Does not own any rewrite: the graph leaves as export wrote it, with weights
turned into named `get_attr` nodes.

    graph = trace(config, torch.bfloat16)
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from minivllm.compiler.graph import SYMBOLS, Graph, WeightSpec
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen


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

    Args:
        config: the architecture.
        dtype: of the parameters and activations.

    Returns:
        The source graph: inputs `input_ids` and `positions`, one output, logits `[tokens, vocab]`.
    """
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    extra = SYMBOLS[1:]
    # Distinct sizes keep export from taking two symbols for one.
    probe = torch.zeros([16 + i for i in range(len(extra))], device="meta")
    tokens = torch.export.Dim("tokens")
    exported = torch.export.export(
        _Traced(meta_model(config, dtype)),
        (ids, ids.clone(), probe),
        dynamic_shapes=(
            {0: tokens},
            {0: tokens},
            {i: torch.export.Dim(name) for i, name in enumerate(extra)},
        ),
    )
    return _from_exported(exported)


def _from_exported(exported: torch.export.ExportedProgram) -> Graph:
    signature = exported.graph_signature
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    weights: dict[str, WeightSpec] = {}
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    probe = placeholders.pop("symbols")
    symbols = dict(zip(SYMBOLS[1:], probe.meta["val"].shape, strict=True))
    for name in ("input_ids", "positions"):
        node = placeholders.pop(name)
        mapping[node] = graph.placeholder(name)
        mapping[node].meta = _meta(node)
        symbols["tokens"] = node.meta["val"].shape[0]
    for node in placeholders.values():
        name = lifted[node.name].removeprefix("model.")
        value = node.meta["val"]
        weights[name] = WeightSpec(tuple(value.shape), value.dtype)
        mapping[node] = graph.create_node("get_attr", name, name=name.replace(".", "_"))
        mapping[node].meta = _meta(node)
    for node in exported.graph.nodes:
        if node.op == "call_function":
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = _meta(node)
        elif node.op == "output":
            (values,) = node.args
            graph.output(mapping[values[0]])
    return Graph(graph, "source", symbols, probe.meta["val"].fake_mode, weights)


def _meta(node: fx.Node) -> dict[str, Any]:
    """The value, the module path (`layers.0.mixer`) and the source line of a traced node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
    frames = re.findall(
        r'File ".*?([^/"]+/[^/"]+)", line (\d+)', node.meta.get("stack_trace") or ""
    )
    source = f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return {"val": node.meta["val"], "module": module, "source": source}
