"""The backend of `torch.compile`: the fusions that need no state, for the graphs that dynamo finds.

Owns tracing what dynamo hands over down to pre-dispatch ATen. Does not own dynamo's guards and
graph breaks, nor the passes (module_pipeline.py).

    model = torch.compile(model, backend="minivllm")     # registered by pyproject.toml
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)

For inference. Where gradients are wanted, and where a graph has what no pass can handle (in-place
writes, control flow), the graph runs as dynamo found it, and a warning says why.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from minivllm.compiler.module_compile import (
    ModuleOptions,
    is_autocast_on,
    module_options,
    report_text,
    run_module_passes,
)
from minivllm.compiler.module_graph import UnsupportedModule, module_graph
from minivllm.compiler.module_program import ModuleProgram
from minivllm.compiler.runner import PassReport
from minivllm.errors import UserError

logger = logging.getLogger(__name__)

KEPT_REPORTS = 64
KEPT_PROGRAMS = 256  # of one graph: dynamo has one for all layers that are alike


class Backend:
    """What `torch.compile` calls with each graph.

    Attributes:
        reports: of the graphs that were compiled last: what each pass did.
        count: of the graphs that were compiled in this process.
    """

    def __init__(self) -> None:
        self.reports: deque[list[PassReport]] = deque(maxlen=KEPT_REPORTS)
        self.count = 0

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile one graph of dynamo's.

        Args:
            kwargs: what `torch.compile` was given beside the backend: `options`, a dict with the
                fields of `ModuleOptions`.

        Raises:
            UserError: an unknown option, or `mode`, which means nothing here.
        """
        options = module_options(kwargs.pop("options", None) or {})
        if kwargs.pop("mode", None) is not None or kwargs:
            raise UserError("backend minivllm takes options=, no mode= and nothing else")
        if torch.is_grad_enabled() and any(_requires_grad(x) for x in example_inputs):
            return _as_found(graph_module, "gradients are wanted; call under torch.no_grad()")
        if any(map(is_autocast_on, {_device_type(x) for x in example_inputs})):
            return _as_found(graph_module, "autocast is on; cast the module with .to(dtype)")
        try:
            return self._compile(graph_module, example_inputs, options)
        except UnsupportedModule as error:
            return _as_found(graph_module, str(error))

    @property
    def report(self) -> str:
        """A table for each of the graphs that were compiled last: what each pass did."""
        start = self.count - len(self.reports)
        texts = [f"graph {n}:\n\n{report_text(r)}" for n, r in enumerate(self.reports, start)]
        return "\n\n".join(texts) or "nothing is compiled yet"

    def _compile(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: ModuleOptions
    ) -> Callable[..., Any]:
        found = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        traced = _trace(graph_module, [n.meta["example_value"] for n in found])
        leaves = [n for n in traced.graph.nodes if n.op == "placeholder"]
        inputs: dict[Node, str] = {}
        weights: dict[Node, tuple[str, Tensor]] = {}
        constants: dict[str, Tensor] = {}
        for node, origin, value in zip(leaves, found, example_inputs, strict=True):
            name = _weight_name(origin)
            if name is None:
                inputs[node] = origin.name
            else:
                weights[node] = (name, value)
        for node in traced.graph.nodes:
            if node.op == "get_attr" and isinstance(getattr(traced, str(node.target)), Tensor):
                constants[str(node.target)] = getattr(traced, str(node.target))
                weights[node] = (str(node.target), constants[str(node.target)])
        graph = module_graph(traced.graph, inputs, weights)
        self.reports.append(run_module_passes(graph, options, self.count))
        self.count += 1
        names = [_weight_name(node) for node in found]
        weight_places = [i for i, name in enumerate(names) if name is not None]
        input_places = [i for i, name in enumerate(names) if name is None]
        program = ModuleProgram(
            graph,
            [name for name in names if name is not None],
            constants,
            options.implementations,
            kept=KEPT_PROGRAMS,
        )

        def run(*args: Any) -> tuple[Any, ...]:
            return program([args[i] for i in weight_places], [args[i] for i in input_places])

        return run


def _trace(graph_module: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """Dynamo's graph of torch calls as pre-dispatch ATen; assumptions go to dynamo's guards."""
    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    if mode is None:
        raise UnsupportedModule("no tensor goes in; there is nothing to compile")
    with mode, torch.no_grad(), fx_traceback.preserve_node_meta():
        run = fx.Interpreter(graph_module).run
        return make_fx(run, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)


def _weight_name(placeholder: Node) -> str | None:
    """The name in the state_dict of a parameter or buffer that dynamo lifted; None for others."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None:
        return None
    name = source.name() if callable(source.name) else source.name
    if not re.search(r"\._(parameters|buffers)\[", name):
        return None
    return ".".join(re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", name))


def _as_found(graph_module: fx.GraphModule, reason: str) -> Callable[..., Any]:
    logger.warning("backend minivllm leaves a graph as it is: %s", reason)
    return graph_module.forward


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _device_type(value: Any) -> str:
    return value.device.type if isinstance(value, Tensor) else "cpu"


minivllm = Backend()
