"""Traces of a user's module: `torch.export`, never decomposed, and what was assumed of a call.

Owns tracing for `minivllm.compile`, and whether a trace covers other sizes. Does not own what is
done with the graph (module_compile.py).

    trace = trace_module(module, weights, (), {"input_ids": ids}, ModuleOptions(), dynamic=True)
    if trace.covers([(2, 100)]): ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from minivllm.compiler.module_compile import ModuleOptions, run_module_passes
from minivllm.compiler.module_graph import UnsupportedModule, module_graph
from minivllm.compiler.module_program import ModuleProgram
from minivllm.compiler.runner import PassReport
from minivllm.errors import UserError

INNER = "module."  # in front of the names of what is traced
LONGEST_REASON = 300  # characters of torch's own message


@dataclass(frozen=True)
class Trace:
    """A traced and compiled form of a module.

    Attributes:
        program: takes the tensors among a call's arguments.
        sizes: their fake values' sizes, symbols among them.
        ranges: symbol to the least and the largest value that was assumed.
        guards: what else was assumed of the sizes.
        output: the structure of the results.
        reports: one a pass.
    """

    program: ModuleProgram
    sizes: tuple[tuple[Any, ...], ...]
    ranges: Mapping[Any, tuple[Any, Any]]
    guards: Sequence[Any]
    output: pytree.TreeSpec
    reports: list[PassReport]

    def covers(self, sizes: Sequence[Sequence[int]]) -> bool:
        """Whether tensors of these sizes fit what was assumed."""
        values: dict[Any, int] = {}
        computed: list[tuple[Any, int]] = []
        for expected, given in zip(self.sizes, sizes, strict=True):
            for wanted, size in zip(expected, given, strict=True):
                if isinstance(wanted, int):
                    if wanted != size:
                        return False
                elif wanted.node.expr.is_symbol:
                    if values.setdefault(wanted.node.expr, size) != size:
                        return False
                else:
                    computed.append((wanted.node.expr, size))
        for symbol, (least, most) in self.ranges.items():
            if symbol in values and not least <= values[symbol] <= most:
                return False
        return all(e.subs(values) == size for e, size in computed) and all(
            bool(guard.subs(values)) for guard in self.guards if guard.free_symbols <= set(values)
        )


def trace_module(
    module: nn.Module,
    named: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: ModuleOptions,
    *,
    dynamic: bool,
    number: int = 0,
) -> Trace:
    """Trace a module for calls like this one, and run the passes.

    Args:
        named: its parameters and buffers, those under several names under each.
        dynamic: whether sizes of 2 and more may change.
        number: of the trace; names its dump.

    Raises:
        UserError: it cannot be traced, or no pass can handle what it does.
    """
    exported = _export(module, args, kwargs, dynamic)
    signature = exported.graph_signature
    lifted_state = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    state = {node: name.removeprefix(INNER) for node, name in lifted_state.items()}
    lifted = signature.inputs_to_lifted_tensor_constants
    inputs: dict[Node, str] = {}
    weights: dict[Node, tuple[str, Tensor]] = {}
    constants: dict[str, Tensor] = {}
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in state:
            weights[node] = (state[node.name], named[state[node.name]])
        elif node.name in lifted:
            name = lifted[node.name]
            constants[name] = exported.constants[name]
            weights[node] = (name, constants[name])
        elif isinstance(node.meta.get("val"), Tensor):  # plain values are in the graph already
            inputs[node] = node.name.removeprefix("kwargs_")
    try:
        graph = module_graph(exported.graph, inputs, weights, prefix=INNER)
    except UnsupportedModule as error:
        raise UserError(f"{type(module).__name__} cannot be compiled: {error}") from error
    reports = run_module_passes(graph, options, number)
    env = graph.fake_mode.shape_env
    return Trace(
        program=ModuleProgram(graph, list(named), constants, options.implementations),
        sizes=tuple(tuple(node.meta["val"].shape) for node in inputs),
        ranges={s: (r.lower, r.upper) for s, r in exported.range_constraints.items()},
        guards=[guard.expr for guard in env.guards] if env else [],
        output=exported.call_spec.out_spec,
        reports=reports,
    )


class _Call(nn.Module):
    """A call of a module, whose arguments are two values: export then knows no keyword that
    stands in the signature of no `forward`, as those that end in `**kwargs`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = False

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.module(*args, **kwargs)


def _export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool
) -> torch.export.ExportedProgram:
    shapes = torch.export.ShapesCollection()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            # sizes of 0 and 1 broadcast or vanish: each is a trace of its own
            changing = [dim for dim, size in enumerate(leaf.shape) if size > 1]
            shapes[leaf] = dict.fromkeys(changing, torch.export.Dim.AUTO)
    dynamic_shapes: Any = shapes if dynamic else None  # torch declares a narrower type
    try:
        with torch.no_grad():
            return torch.export.export(
                _Call(module), (args, kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:LONGEST_REASON]
        remedy = "; of a transformers model call with use_cache=False" if "Cache" in reason else ""
        raise UserError(
            f"{type(module).__name__} cannot be traced by torch.export "
            f"({type(error).__name__}: {reason}){remedy}"
        ) from error
