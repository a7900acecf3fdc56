"""A compiled module that runs: its graph, bound to the weights that the module has now.

Owns the memory of merged weights. Does not own tracing, nor which program a call takes.

    program = ModuleProgram(graph, names, implementations)
    outputs = program(tensors, inputs)

Merged weights are never a second copy: their parts, the module's own parameters, become views of
the merged tensor's rows. So whoever writes into a parameter (`load_state_dict`, an optimizer)
writes into the merged weight. Whoever gives a parameter other memory (`module.to`,
`parameter.data = ...`) is noticed at the next call, and the parts are merged again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.graph import Graph, WeightSpec

logger = logging.getLogger(__name__)

Layout = tuple[tuple[int, torch.Size, tuple[int, ...]], ...]


class ModuleProgram:
    """A graph of phase `MODULE`, ready to be called.

    Args:
        graph: behind the last pass.
        names: of the weights that each call hands in, in their order.
        constants: the weights that it does not hand in.
        forced: op name to implementation name.
        kept: sets of weights that it stays bound to: dynamo has one graph for all layers.
    """

    def __init__(
        self,
        graph: Graph,
        names: Sequence[str],
        constants: Mapping[str, Tensor],
        forced: Mapping[str, str],
        kept: int = 1,
    ) -> None:
        self.graph = graph
        self.names = tuple(names)
        self.constants = constants
        self.forced = forced
        self.dtype = (*graph.dtypes, torch.float32)[0]
        self.kept = kept
        self._bound: dict[Layout, _Bound] = {}
        self._last: tuple[Layout, Executable] | None = None
        self._implementations: dict[str, str] | None = None

    def __call__(
        self, tensors: Sequence[Tensor], inputs: Sequence[Any], places: Layout | None = None
    ) -> tuple[Any, ...]:
        """Run.

        Args:
            tensors: the module's weights, by `names`.
            inputs: a value for each input of the graph.
            places: `layout(tensors)`, from whom has it; the same object again is found at once.
        """
        # kernels launch on the current device
        cuda = self.graph.device.type == "cuda"
        guard: Any = torch.cuda.device(self.graph.device) if cuda else contextlib.nullcontext()
        with torch.no_grad(), guard:
            return self.executable(tensors, places).module.forward(*inputs)

    def executable(self, tensors: Sequence[Tensor], places: Layout | None = None) -> Executable:
        """The program, bound to these weights."""
        if self._last is not None and places is self._last[0]:
            return self._last[1]
        bound = self._bound.get(layout(tensors) if places is None else places)
        if bound is None:
            self.release()
            for key in list(self._bound)[: max(len(self._bound) - self.kept + 1, 0)]:
                del self._bound[key]
            executable = self._bind(dict(zip(self.names, tensors, strict=True)))
            bound = _Bound(executable, [weakref.ref(t) for t in tensors])
            self._bound[layout(tensors)] = bound  # merging has moved some
        elif places is not None:
            self._last = places, bound.executable
        return bound.executable

    def release(self) -> None:
        """Drop what is bound to weights that have moved, and so held memory for nothing."""
        self._last = None
        self._bound = {key: b for key, b in self._bound.items() if b.is_current(key)}

    @property
    def summary(self) -> str:
        """What became of the weights, and which implementation each op has once it is bound."""
        merged = [spec for spec in self.graph.weights.values() if spec.parts]
        parts = sum(len(spec.parts) for spec in merged)
        size = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in merged) / 1e6
        lines = [f"{parts} parameters are views of {len(merged)} merged ones, {size:,.1f} MB"]
        if self._implementations:
            names = self._implementations.items()
            lines.append(", ".join(f"{op}: {implementation}" for op, implementation in names))
        return "\n".join(lines)

    def _bind(self, tensors: Mapping[str, Tensor]) -> Executable:
        weights: dict[str, Tensor] = {}
        for name, spec in self.graph.weights.items():
            if spec.parts:
                weights[name] = merge(name, spec, [tensors[part.name] for part in spec.parts])
            else:
                weights[name] = self.constants[name] if name in self.constants else tensors[name]
        executable = bind(self.graph, weights, {}, self.graph.device, self.dtype, self.forced)
        if self._implementations is None:
            for warning in executable.warnings:
                logger.warning("%s", warning)
        self._implementations = executable.implementations
        return executable


class _Bound:
    """An executable, and the module's own tensors that it was bound to."""

    def __init__(self, executable: Executable, tensors: list[weakref.ref[Tensor]]) -> None:
        self.executable = executable
        self.tensors = tensors

    def is_current(self, key: Layout) -> bool:
        """Whether these tensors are alive and where they were."""
        alive = [tensor for ref in self.tensors if (tensor := ref()) is not None]
        return len(alive) == len(self.tensors) and layout(alive) == key


def layout(tensors: Sequence[Tensor]) -> Layout:
    """Where tensors lie, and how: equal as long as nobody gives one of them other memory."""
    return tuple([(t.data_ptr(), t.shape, t.stride()) for t in tensors])


def merge(name: str, spec: WeightSpec, parts: Sequence[Tensor]) -> Tensor:
    """The merged weight of a recipe; its parts then are views of it.

    Args:
        name: for the log.
        parts: tensors of the shapes that the recipe's rows have; their data moves, unless it lies
            as the recipe wants it already.
    """
    found = _merged_already(spec, parts)
    if found is not None:
        return found
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.zeros(spec.shape, dtype=spec.dtype, device=parts[0].device)
        for part, tensor in zip(spec.parts, parts, strict=True):
            rows = whole[part.start : part.start + part.rows]
            rows.copy_(tensor)
            tensor.data = rows
    logger.debug("%s: %s now lie in one tensor", name, ", ".join(p.name for p in spec.parts))
    return whole


def _merged_already(spec: WeightSpec, parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows the parts are, if there is one."""
    storage = parts[0].untyped_storage()
    row = torch.Size(spec.shape[1:]).numel()
    base = parts[0].storage_offset() - spec.parts[0].start * row
    for part, tensor in zip(spec.parts, parts, strict=True):
        same = tensor.untyped_storage().data_ptr() == storage.data_ptr()
        offset = tensor.storage_offset()
        if not (same and offset == base + part.start * row and tensor.is_contiguous()):
            return None
    end = base + torch.Size(spec.shape).numel()
    if base < 0 or end * spec.dtype.itemsize > storage.nbytes():
        return None
    strides = torch.empty(spec.shape, device="meta").stride()
    return parts[0].detach().as_strided(spec.shape, strides, base)
