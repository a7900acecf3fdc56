"""`minivllm.compile`: the fusions that need no state, for a user's own module.

Owns which trace a call takes, and what a call may hand in. Does not own tracing (module_trace.py),
the passes (module_pipeline.py) nor the weights' memory (module_program.py).

    compiled = minivllm.compile(model, {"input_ids": ids, "use_cache": False})
    print(compiled.report)
    logits = compiled(input_ids=ids, use_cache=False).logits

For inference. A call is traced anew if its arguments have another structure, other plain values,
ranks, dtypes, devices or orders of their dims in memory, or sizes that the traces so far do not
cover: sizes of 2 and more may change, a size of 0 or 1 has a trace of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from minivllm.compiler.graph import Graph
from minivllm.compiler.module_compile import ModuleOptions, is_autocast_on, report_text
from minivllm.compiler.module_program import Layout, layout
from minivllm.compiler.module_trace import Trace, trace_module
from minivllm.compiler.runner import PassReport
from minivllm.errors import UserError

logger = logging.getLogger(__name__)

MANY_TRACES = 8  # more than that are probably not meant
REMEMBERED_SIZES = 4096  # sizes of calls whose trace is known without looking
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def compile(
    module: nn.Module,
    example_inputs: Any = None,
    *,
    dynamic: bool = True,
    disable: Sequence[str] = (),
    implementations: Mapping[str, str] | None = None,
    dump_dir: str | Path | None = None,
    explain: str | None = None,
    say: Callable[[str], None] = print,
) -> CompiledModule:
    """Fuse what a module computes, for inference.

    Args:
        module: in `eval()` mode. Its parameters stay its own; those of merged linears become
            views of one tensor (see `module_program`).
        example_inputs: of a call: a tuple of positional arguments, a mapping of keyword arguments,
            or one tensor. The module is traced with them at once, without computing anything;
            None: at the first call.
        dynamic: whether sizes of 2 and more may change without a new trace.
        disable: names of passes to leave out, such as "merge_linears".
        implementations: op name to the implementation that it must use.
        dump_dir: a folder for one text file a pass.
        explain: name of a pass: say what it matched and nearly matched.
        say: takes that text.

    Returns:
        What is called in the place of the module, with the same arguments and results.

    Raises:
        UserError: no module, a module in training mode, one that cannot be traced or that changes
            tensors in place, or an unknown name.
    """
    if not isinstance(module, nn.Module):
        raise UserError(f"compile takes an nn.Module, not {type(module).__name__} {module!r}")
    options = ModuleOptions(disable, implementations or {}, dump_dir, explain, say)
    compiled = CompiledModule(module, options, dynamic)
    if example_inputs is not None:
        if isinstance(example_inputs, Mapping):
            compiled.prepare(**example_inputs)
        elif isinstance(example_inputs, Tensor):
            compiled.prepare(example_inputs)
        elif isinstance(example_inputs, (tuple, list)):
            compiled.prepare(*example_inputs)
        else:
            raise UserError(
                f"example_inputs is a {type(example_inputs).__name__}; give a tuple of positional "
                "arguments, a mapping of keyword arguments, or one tensor"
            )
    return compiled


class CompiledModule:
    """A module's stand-in. It is no `nn.Module`: `module` is the one that owns the parameters.

    Attributes:
        module: the module as it was given.
        traces: in the order in which calls asked for them.
    """

    def __init__(self, module: nn.Module, options: ModuleOptions, dynamic: bool) -> None:
        self.module = module
        self.options = options
        self.dynamic = dynamic
        self.traces: list[Trace] = []
        self._by_kind: dict[Any, list[Trace]] = {}
        self._by_size: dict[Any, Trace] = {}
        self._index()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            UserError: the module is in training mode, under autocast, or cannot be traced; an
                argument wants gradients, or is of a kind that cannot be traced.
        """
        trace, tensors, weights = self._trace_of(args, kwargs)
        outputs = trace.program(weights, tensors, self._places)
        return pytree.tree_unflatten(list(outputs), trace.output)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Trace, compile and merge weights for such a call, without computing it."""
        trace, _, weights = self._trace_of(args, kwargs)
        trace.program.executable(weights)

    @property
    def reports(self) -> list[PassReport]:
        """What each pass did in the newest trace."""
        return self.traces[-1].reports if self.traces else []

    @property
    def graph(self) -> Graph:
        """The newest trace's graph behind the last pass.

        Raises:
            UserError: nothing is traced yet.
        """
        if not self.traces:
            raise UserError("nothing is traced yet: give example_inputs, or call it once")
        return self.traces[-1].program.graph

    @property
    def report(self) -> str:
        """A table for each trace: what each pass did."""
        if not self.traces:
            return "nothing is traced yet: give example_inputs, or call it once"
        texts = []
        for number, trace in enumerate(self.traces):
            graph = trace.program.graph
            inputs = ", ".join(
                f"{name} [{', '.join(map(str, spec.dims))}]" for name, spec in graph.inputs.items()
            )
            table = report_text(trace.reports)
            texts.append(f"trace {number}: {inputs}\n\n{table}\n\n{trace.program.summary}")
        return "\n\n".join(texts)

    def _trace_of(self, args: Any, kwargs: Any) -> tuple[Trace, list[Tensor], list[Tensor]]:
        """The trace for a call, its tensor arguments, and the module's weights."""
        leaves, structure = pytree.tree_flatten((args, dict(sorted(kwargs.items()))))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._check(leaves, tensors)
        weights = self._weights()
        kind = (structure, tuple(map(_kind, leaves)), self._weight_kind)
        sizes = tuple(tuple(t.shape) for t in tensors)
        trace = self._by_size.get((kind, sizes))
        if trace is None:
            known = self._by_kind.setdefault(kind, [])
            trace = next((t for t in known if t.covers(sizes)), None)
            if trace is None:
                trace = self._trace(args, dict(sorted(kwargs.items())), weights)
                known.append(trace)
            if len(self._by_size) >= REMEMBERED_SIZES:
                self._by_size.clear()
            self._by_size[kind, sizes] = trace
        return trace, tensors, weights

    def _check(self, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        name = type(self.module).__name__
        if self.module.training:
            raise UserError(f"{name} is in training mode; compile is for inference: call eval()")
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                raise UserError(
                    f"an argument of {name} is a {type(leaf).__name__}; give tensors, plain values "
                    "and lists, tuples or dicts of them (of a transformers model use_cache=False)"
                )
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise UserError(
                f"an argument of {name} requires gradients, and compiled modules have none: "
                "call under torch.no_grad(), or call the module itself"
            )
        for device in {t.device.type for t in tensors}:
            if is_autocast_on(device):
                raise UserError(
                    f"autocast is on for {device}; compiled modules compute in their own dtypes: "
                    "leave it, and cast the module with .to(dtype)"
                )

    def _index(self) -> None:
        """Note where the module keeps its parameters and buffers, and which modules it has."""
        self._children: list[tuple[dict[str, Any], str, nn.Module]] = []
        owners: list[tuple[dict[str, Any], str]] = []
        names: list[str] = []
        for path, owner in self.module.named_modules(remove_duplicate=False):
            self._children += [
                (owner._modules, name, child)
                for name, child in owner._modules.items()
                if child is not None
            ]
            for table in (owner._parameters, owner._buffers):
                present = [name for name, tensor in table.items() if tensor is not None]
                owners += [(table, name) for name in present]
                names += [f"{path}.{name}" if path else name for name in present]
        self._owners = owners
        self._names = tuple(names)
        self._places: Layout = ()
        self._weight_kind: int | None = None
        self._weight_kinds: dict[Any, int] = {}  # numbered, since each call asks for its own

    def _weights(self) -> list[Tensor]:
        """The weights as they are now; if any has moved, their dtypes and devices are noted."""
        if any(table.get(name) is not child for table, name, child in self._children):
            self._forget()
        if any(child.training for _, _, child in self._children):
            name = type(self.module).__name__
            raise UserError(f"a part of {name} is in training mode; call eval() on the whole")
        try:
            weights = [table[name] for table, name in self._owners]
            places = layout(weights)
        except (KeyError, AttributeError):  # one is gone, or None
            self._forget()
            weights = [table[name] for table, name in self._owners]
            places = layout(weights)
        if places != self._places or self._weight_kind is None:
            self._places = places
            for trace in self.traces:
                trace.program.release()
            first: dict[int, int] = {}  # which are tied, since those are one node of the graph
            tied = [first.setdefault(id(weight), i) for i, weight in enumerate(weights)]
            types = [(w.dtype, w.device, w.shape, w.stride()) for w in weights]
            kind = tuple(zip(tied, types, strict=True))
            self._weight_kind = self._weight_kinds.setdefault(kind, len(self._weight_kinds))
        return weights

    def _forget(self) -> None:
        """A submodule or parameter is another one now: no trace holds any more."""
        self.traces.clear()
        self._by_kind.clear()
        self._by_size.clear()
        self._index()

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tensor]) -> Trace:
        name = type(self.module).__name__
        named = dict(zip(self._names, weights, strict=True))
        number = len(self.traces)
        trace = trace_module(
            self.module, named, args, kwargs, self.options, dynamic=self.dynamic, number=number
        )
        self.traces.append(trace)
        if len(self.traces) == MANY_TRACES + 1:
            logger.warning(
                "%s has been traced %d times; its calls differ in plain values, ranks, dtypes, "
                "orders of dims in memory, or in sizes of 0 and 1 (CompiledModule.report)",
                name,
                len(self.traces),
            )
        return trace


def _order(tensor: Tensor) -> tuple[Any, ...]:
    """Its dims from the widest step in memory to the narrowest, and whether that is 1; empty for
    rows in one piece, each behind the one before."""
    if tensor.is_contiguous():
        return ()
    steps = tensor.stride()
    dims = sorted(range(len(steps)), key=lambda dim: -steps[dim])
    in_pieces = steps[dims[-1]] != 1
    return (*dims, in_pieces) if in_pieces or dims != list(range(len(dims))) else ()


def _kind(leaf: Any) -> Any:
    """What of an argument a trace depends on, but for a tensor's sizes."""
    if isinstance(leaf, Tensor):
        return leaf.ndim, leaf.dtype, leaf.device, _order(leaf)
    return type(leaf), leaf
