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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.graph import Graph, WeightSpec

logger = logging.getLogger(__name__)


class ModuleProgram:
    """A graph of phase `MODULE`, ready to be called.

    Args:
        graph: behind the last pass.
        names: of the weights that each call hands in, in their order.
        constants: the weights that it does not hand in.
        forced: op name to implementation name.
    """

    def __init__(
        self,
        graph: Graph,
        names: Sequence[str],
        constants: Mapping[str, Tensor],
        forced: Mapping[str, str],
    ) -> None:
        self.graph = graph
        self.names = tuple(names)
        self.constants = constants
        self.forced = forced
        self.dtype = (*graph.dtypes, torch.float32)[0]
        self._pointers: list[int] | None = None
        self._executable: Executable | None = None

    def __call__(self, tensors: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run.

        Args:
            tensors: the module's weights, by `names`.
            inputs: a value for each input of the graph.
        """
        # kernels launch on the current device
        cuda = self.graph.device.type == "cuda"
        guard: Any = torch.cuda.device(self.graph.device) if cuda else contextlib.nullcontext()
        with torch.no_grad(), guard:
            return self.executable(tensors).module.forward(*inputs)

    def executable(self, tensors: Sequence[Tensor]) -> Executable:
        """The program, bound to these weights."""
        if self._executable is None or [t.data_ptr() for t in tensors] != self._pointers:
            self._executable = self._bind(dict(zip(self.names, tensors, strict=True)))
            self._pointers = [t.data_ptr() for t in tensors]  # merging has moved some
        return self._executable

    @property
    def summary(self) -> str:
        """What became of the weights, and which implementation each op has once it is bound."""
        merged = [spec for spec in self.graph.weights.values() if spec.parts]
        parts = sum(len(spec.parts) for spec in merged)
        size = sum(torch.Size(s.shape).numel() * s.dtype.itemsize for s in merged) / 1e6
        lines = [f"{parts} parameters are views of {len(merged)} merged ones, {size:,.1f} MB"]
        if self._executable is not None and self._executable.implementations:
            names = self._executable.implementations.items()
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
        if self._executable is None:
            for warning in executable.warnings:
                logger.warning("%s", warning)
        return executable


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
