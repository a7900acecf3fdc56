"""Stock `torch.compile` over a bound graph: our kernels for the named ops, Inductor for the rest.

Owns making the chosen implementations opaque to Dynamo. They are Triton launches and Python that
reads sizes on the host: traced into, they would break the graph. So each becomes an op of a
library of its own, with the schema and the fake of the op that it implements; what lies between
them (norms, gates, SwiGLU, gathers and scatters of states) is Inductor's to fuse.

    separate_states(runner.graphs.values(), compiled.decode.states)
    executable = stock(runner.graphs["decode"], "reduce-overhead")

AOTAutograd takes no inputs that are changed and share their storage, as the states of one pool do.
So the graphs of such a row hold each state in a tensor of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from minivllm.compiler.bind import Executable
from minivllm.ops import OPS

NAMESPACE = "minivllm_bench"
_library = torch.library.Library(NAMESPACE, "DEF")
_opaque: dict[Callable[..., Any], Any] = {}


class StockExecutable(Executable):
    """A bound graph that `torch.compile` has taken."""

    def __call__(self, **inputs: Tensor) -> Tensor:
        """As `Executable`; under CUDA Graphs, earlier outputs are given up first."""
        torch.compiler.cudagraph_mark_step_begin()
        return super().__call__(**inputs)


def separate_states(executables: Iterable[Executable], states: Iterable[str]) -> None:
    """Give each state its own storage, in all of these graphs alike."""
    for name in states:
        flat = re.sub(r"\W", "_", name)  # as `bind` calls it
        holders = [e.module for e in executables if hasattr(e.module, flat)]
        own = getattr(holders[0], flat).clone()
        for module in holders:
            setattr(module, flat, own)


def stock(executable: Executable, mode: str) -> Executable:
    """Compile a bound graph with torch's own compiler, at its first call.

    Args:
        mode: of `torch.compile`; where a CUDA Graph cannot hold the graph's kernels, its default.
    """
    mode = mode if executable.capturable else "default"
    module = executable.module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    implemented = {i.call: op for op in OPS.values() for i in op.implementations}
    for node in graph.nodes:
        if node.target in implemented:
            node.target = _as_op(implemented[node.target], node.target)
    leaves = {
        str(n.target): getattr(module, str(n.target)) for n in graph.find_nodes(op="get_attr")
    }
    compiled = torch.compile(fx.GraphModule(leaves, graph, "stock_graph"), mode=mode)
    return StockExecutable(
        compiled,  # type: ignore[arg-type]
        executable.inputs,
        executable.implementations,
        executable.warnings,
        executable.capturable,
    )


def _as_op(op: Any, call: Callable[..., Any]) -> Any:
    """An implementation as an op that Dynamo and Inductor do not look into."""
    if call not in _opaque:
        name = f"{op.name}_{len(_opaque)}"
        schema = str(op.overload._schema)
        _library.define(name + schema[schema.index("(") :])
        _library.impl(name, call, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", op.overload, lib=_library)
        _opaque[call] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _opaque[call]
