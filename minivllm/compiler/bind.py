"""Binding: a finished graph gets its implementations, weights and state pools and can be called.

Owns the choice of implementations for a device (made once, here) and the executable. Does not
own the tensors: the runtime loads weights and allocates pools.

    step = bind(graph, weights, states, device, dtype)
    logits = step(input_ids=..., positions=..., state_slots=..., ...)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from minivllm.compiler.graph import Graph
from minivllm.errors import UserError
from minivllm.ops import OPS, Implementation, Op


class Executable:
    """A bound graph: the GraphModule that the runtime runs.

    Attributes:
        module: the GraphModule; its `code` is the program as Python.
        inputs: names of the inputs it takes.
        implementations: op name to the name of the implementation chosen for it.
        warnings: a line for each op whose preferred package is missing.
        capturable: whether a CUDA Graph can hold it.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: tuple[str, ...],
        implementations: dict[str, str],
        warnings: list[str],
        capturable: bool,
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.implementations = implementations
        self.warnings = warnings
        self.capturable = capturable

    def __call__(self, **inputs: Tensor) -> Tensor:
        """Run a step.

        Args:
            inputs: tensors of the vocabulary, on the bound device; those that the graph does
                not read are ignored, so that one set of inputs serves every graph of a phase.

        Returns:
            Logits, `[rows, vocab]` in prefill and `[tokens, vocab]` in decode.
        """
        return self.module(*(inputs[name] for name in self.inputs))


def bind(
    graph: Graph,
    weights: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    forced: Mapping[str, str] | None = None,
    call_of: Callable[[Op, Implementation], Callable[..., Any]] = lambda _, chosen: chosen.call,
) -> Executable:
    """Make a graph executable.

    Args:
        graph: after its last pass; not changed.
        weights: a tensor for each of `graph.weights`, on `device`.
        states: a pool for each of `graph.states`, on `device`.
        device, dtype: what implementations are chosen for.
        forced: op name to implementation name, from `compiler.implementations`.
        call_of: what is called for an op of which this implementation was chosen.

    Raises:
        UserError: `forced` names an unknown op, or an implementation that cannot run here.
    """
    forced = forced or {}
    for name in forced:
        if name not in OPS:
            raise UserError(
                f"compiler.implementations: no op {name!r}; choose from {', '.join(OPS)}"
            )
    bound = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    bound.output(bound.graph_copy(graph.fx, mapping))
    by_overload = {op.overload: op for op in OPS.values()}
    chosen: dict[str, Implementation] = {}
    warnings: list[str] = []
    attributes: dict[str, Any] = {}
    flat_names = attribute_names([*graph.weights, *graph.states])
    for node in bound.nodes:
        if node.op == "get_attr":
            name = str(node.target)
            flat = flat_names[name]
            attributes[flat] = weights[name] if name in graph.weights else states[name]
            node.target = flat
        elif node.target in by_overload:
            op = by_overload[node.target]
            if op.name not in chosen:
                chosen[op.name], warning = op.choose(device, dtype, forced.get(op.name))
                warnings += [warning] if warning else []
            node.target = call_of(op, chosen[op.name])
    module = fx.GraphModule(attributes, bound, class_name=f"{graph.phase}_graph")
    names = {op: implementation.name for op, implementation in chosen.items()}
    capturable = all(implementation.capturable for implementation in chosen.values())
    return Executable(module, graph.input_names, names, warnings, capturable)


def attribute_names(names: Iterable[str]) -> dict[str, str]:
    """The attribute of a bound module that holds each weight and state.

    Flat names: a dotted one would be looked up module by module on every step.
    """
    flat: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        plain = unique = re.sub(r"\W", "_", name)
        number = 1
        while unique in taken:  # `a.b_c` and `a_b.c`
            unique, number = f"{plain}_{number}", number + 1
        taken.add(unique)
        flat[name] = unique
    return flat
