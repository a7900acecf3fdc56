"""The files of a compilation: a listing a stage, what each pass changed, a summary and a report.

Owns the folder. Does not own the listing (listing.py), the costs (cost.py) or the page (report.py).

    dump = Dump(Path("dump"), config)
    reports = run_passes(graph, passes, context, observers=(dump.observe,))
    dump.finish(reports, seconds)

`<phase>/NN_<stage>.txt` is the graph after a stage, `NN_<stage>.diff` the change since the stage
before (`patch` turns one into the other), `summary.json` the numbers of the table that `inspect`
prints. All are the same bytes for the same commit. Times are not: they stand in `timings.json` and
in one element of `index.html`, which is otherwise the same as well. If a step was measured, its
times are in `measured.json` and all over the page.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minivllm.compiler.cost import STEPS, CostTable, Stage, call_costs, planned_context
from minivllm.compiler.explain import MissGroup, grouped_misses
from minivllm.compiler.graph import Graph
from minivllm.compiler.listing import format_graph
from minivllm.compiler.measured import MeasuredStep
from minivllm.compiler.measured_text import measured_json
from minivllm.compiler.report import write_report
from minivllm.compiler.report_data import CallRow, Report, StageRow
from minivllm.compiler.report_layers import alike
from minivllm.compiler.runner import PassReport
from minivllm.compiler.text import dtype_text
from minivllm.compiler.text_diff import unified
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig


class Dump:
    """Writes a compilation to a folder: each stage as it is reached, the rest at the end.

    Args:
        layers: bound the listings, and the report, to these layers; empty: all of them, and in
            the report the first of each set of layers that are alike.

    Raises:
        UserError: a layer that the model does not have.
    """

    def __init__(self, folder: Path, config: MiniQwenConfig, layers: Collection[int] = ()) -> None:
        for layer in layers:
            if layer >= config.num_hidden_layers:
                raise UserError(
                    f"compiler.dump_layers: no layer {layer}; the model's layers are "
                    f"0 to {config.num_hidden_layers - 1}"
                )
        self.folder = folder
        self.config = config
        self.layers = tuple(sorted(set(layers)))
        self.costs = CostTable()
        self.texts: dict[str, list[str]] = {}  # of each phase's stages, all layers
        self.calls: dict[str, list[list[CallRow]]] = {}
        self.misses: dict[str, list[list[MissGroup]]] = {}
        self.dtype = ""
        self._names: dict[str, list[str]] = {}

    def observe(self, graph: Graph, stage: str) -> None:
        """An observer for `runner.run_passes`: writes the stage and its difference."""
        phase = graph.phase
        folder = self.folder / phase
        with self._writing():
            if phase not in self.texts:
                self._clear(folder)
                folder.mkdir(parents=True, exist_ok=True)
            names = self._names.setdefault(phase, [])
            names.append(f"{len(names):02d}_{stage}")
            text = format_graph(graph, stage, self.layers)
            path = folder / f"{names[-1]}.txt"
            path.write_text(text, encoding="utf-8")
            if len(names) > 1:
                before = (folder / f"{names[-2]}.txt").read_text(encoding="utf-8")
                change = unified(before, text, f"{names[-2]}.txt", path.name)
                path.with_suffix(".diff").write_text(change, encoding="utf-8")
        costs = call_costs(graph)
        self.costs.add(graph, stage, costs)
        whole = format_graph(graph, stage) if self.layers else text
        self.texts.setdefault(phase, []).append(whole)
        self.calls.setdefault(phase, []).append(
            [CallRow(node.name, node.meta["module"], cost) for node, cost in costs.items()]
        )
        self.misses.setdefault(phase, []).append(grouped_misses(graph))
        self.dtype = dtype_text(graph.dtype)

    def finish(
        self,
        reports: Sequence[PassReport],
        seconds: Mapping[str, float],
        measured: Mapping[str, MeasuredStep] | None = None,
    ) -> None:
        """Write the summary, the times and the report.

        Args:
            reports: of all phases, as `runner.run_passes` returns them.
            seconds: of the parts of the compilation.
            measured: phase to the measured step of its last graph; None: nothing was measured.
        """
        rows = {
            phase: _rows(self.costs.stages[phase], [r for r in reports if r.phase == phase])
            for phase in self.texts
        }
        classes = alike(self.texts, self.config.num_hidden_layers)
        summary = {
            "model": dataclasses.asdict(self.config),
            "dtype": self.dtype,
            "dump_layers": self.layers,
            "layers_alike": classes,
            "phases": {
                phase: {
                    "tokens": STEPS[phase],
                    "context": planned_context(phase),
                    "stages": [dataclasses.asdict(row) for row in rows[phase]],
                }
                for phase in rows
            },
        }
        times = {
            "seconds": dict(seconds),
            "pass_ms": {
                phase: {r.name: round(r.seconds * 1000, 3) for r in reports if r.phase == phase}
                for phase in rows
            },
        }
        report = Report(
            config=self.config,
            dtype=self.dtype,
            rows=rows,
            texts=self.texts,
            calls=self.calls,
            misses=self.misses,
            documents={report.name: report.document for report in reports},
            classes=classes,
            shown=self.layers or tuple(members[0] for members in classes),
            times=times,
            measured=measured or {},
        )
        with self._writing():
            _write_json(self.folder / "summary.json", summary)
            _write_json(self.folder / "timings.json", times)
            if measured:
                steps = {phase: measured_json(step) for phase, step in measured.items()}
                _write_json(self.folder / "measured.json", steps)
            (self.folder / "index.html").write_text(write_report(report), encoding="utf-8")

    def _clear(self, folder: Path) -> None:
        """Remove what an earlier run left, which may have had other stages."""
        for pattern in ("[0-9][0-9]_*.txt", "[0-9][0-9]_*.diff"):
            for old in folder.glob(pattern):
                old.unlink()
        for name in ("summary.json", "timings.json", "measured.json", "index.html"):
            (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"compiler.dump_dir={str(self.folder)!r}: cannot write "
                f"{error.filename or 'there'} ({error.strerror}); "
                "name a folder that can be written"
            ) from error


def _rows(stages: Sequence[Stage], reports: Sequence[PassReport]) -> list[StageRow]:
    by_name = {report.name: report for report in reports}
    rows = []
    for stage in stages:
        report = by_name.get(stage.name)
        rows.append(
            StageRow(
                name=stage.name,
                sites=report.matches if report else None,
                nodes=stage.nodes,
                calls=stage.calls,
                launches=stage.cost.launches,
                bytes=stage.cost.bytes,
                flops=stage.cost.flops,
            )
        )
    return rows


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
