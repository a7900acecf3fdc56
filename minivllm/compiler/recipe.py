"""Memory for a graph's weights, laid out so that loading them merges them.

Owns the execution of weight recipes. Does not own reading (`model.weights`), which fills the
views that it is given.

    storage, targets = allocate(graph.weights, device)
    load_weights(folder, shapes, dtype, device, targets=targets)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.compiler.graph import WeightPart, WeightSpec


def allocate(
    specs: Mapping[str, WeightSpec], device: torch.device | str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Allocate every weight once.

    Args:
        specs: the weights of all graphs that will run.

    Returns:
        The weights by the names in the graphs, merged ones zeroed; and, by the names of the
        model's state_dict, the tensor or rows of a merged tensor to load each into.
    """
    storage: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {}
    for name, spec in specs.items():
        make = torch.zeros if spec.parts else torch.empty
        storage[name] = make(spec.shape, dtype=spec.dtype, device=device)
        for part in spec.parts or (WeightPart(name, 0, spec.shape[0]),):
            assert part.name not in targets, f"{part.name} would be held twice"
            targets[part.name] = storage[name][part.start : part.start + part.rows]
    return storage, targets


def assemble(specs: Mapping[str, WeightSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A graph's weights, on the CPU, from tensors by their names in the model's state_dict."""
    storage, targets = allocate(specs, "cpu")
    for name, target in targets.items():
        target.copy_(tensors[name])
    return storage
