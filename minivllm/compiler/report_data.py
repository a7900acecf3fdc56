"""What the report of a compilation shows, as plain data.

Owns the fields that dump.py fills in. Does not own how they look (report.py and what it calls).

    html = write_report(Report(config=config, dtype="bfloat16", rows=rows, texts=texts, ...))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.compiler.cost import Cost
from minivllm.compiler.explain import MissGroup
from minivllm.compiler.measured import MeasuredStep
from minivllm.model.config import MiniQwenConfig


@dataclass(frozen=True)
class StageRow:
    """A row of the table of passes: the graph after a stage.

    Attributes:
        sites: that the pass rewrote; None for the source.
        nodes: all of the graph's; `calls` without inputs, weights, state and output.
        launches, bytes, flops: of the planned step.
    """

    name: str
    sites: int | None
    nodes: int
    calls: int
    launches: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class CallRow:
    """A call's name, its module path and what it costs in the planned step."""

    name: str
    module: str
    cost: Cost


@dataclass(frozen=True)
class Report:
    """What the page shows.

    Attributes:
        dtype: of the activations.
        rows, texts, calls, misses: phase to its stages' numbers, listings, calls and near misses.
        documents: a pass's name to what it is for.
        classes: sets of layers that are alike at every stage.
        shown: the layers that are shown in full.
        times: seconds of the parts of the compilation, milliseconds of the passes.
        measured: phase to the measured step of its last graph; empty: nothing was measured.
    """

    config: MiniQwenConfig
    dtype: str
    rows: Mapping[str, Sequence[StageRow]]
    texts: Mapping[str, Sequence[str]]
    calls: Mapping[str, Sequence[Sequence[CallRow]]]
    misses: Mapping[str, Sequence[Sequence[MissGroup]]]
    documents: Mapping[str, str]
    classes: Sequence[Sequence[int]]
    shown: Sequence[int]
    times: Mapping[str, Any]
    measured: Mapping[str, MeasuredStep] = field(default_factory=dict)
