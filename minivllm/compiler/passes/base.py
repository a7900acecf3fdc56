"""What a pass is, and what it is told.

class DropNothing(GraphPass):
    name = "drop_nothing"

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return []
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.misses import Misses
from minivllm.model.config import MiniQwenConfig
from minivllm.ops.paged_attention import BLOCK_SIZE


@dataclass(frozen=True)
class PassContext:
    """What the graph alone does not say.

    Attributes:
        architecture: of the MiniQwen that is compiled; None for a user's own module.
        state_dtype: of the recurrent states.
        block_size: tokens in a KV block.
        disabled: names of passes that were left out; those that build on them may find less.
        misses: where a pass notes what it did not take; the runner gives each pass its own.
    """

    architecture: MiniQwenConfig | None
    state_dtype: torch.dtype = torch.float32
    block_size: int = BLOCK_SIZE
    disabled: frozenset[str] = frozenset()
    misses: Misses = field(default_factory=Misses)

    @property
    def config(self) -> MiniQwenConfig:
        """The architecture, which those have that run on a MiniQwen only."""
        assert self.architecture is not None, "a user's module has no MiniQwen config"
        return self.architecture


class GraphPass:
    """A named rewrite of one graph, in place.

    Attributes:
        name: as printed, dumped and named in `compiler.disable`.
        phases: the graphs it runs on.
        mandatory: the graph cannot be executed with state without it.
        mutates: it brings ops that change state; passes after it see them.
        after: passes on whose result it builds; without one of them it may find less.
        before: of a pass that is not in the pipeline: the pass in front of which it stands. The
            first that brings mutation, unless it says otherwise: behind all fusions.
    """

    name: str
    phases: tuple[str, ...] = PHASES
    mandatory: bool = False
    mutates: bool = False
    after: tuple[str, ...] = ()
    before: str = "lower_mixers"

    def expected(self, phase: str, context: PassContext) -> list[str] | None:
        """The sites that must match in a MiniQwen of this config; None if that is not known."""
        return None

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        """Rewrite the graph; returns the site of each match (a module path, or any name)."""
        raise AssertionError(f"{type(self).__name__} has no run")


def layer_of(node: Node) -> str:
    """The layer a node belongs to: `layers.3`."""
    found = re.match(r"layers\.\d+", node.meta["module"])
    assert found, f"{node} belongs to no layer"
    return found.group()


def shape_of(graph: Graph, node: Node) -> tuple[str, ...]:
    """A node's shape by name, to compare with: comparing two SymInts can tie one to a number."""
    return tuple(graph.named(size) for size in node.meta["val"].shape)
