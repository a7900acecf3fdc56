"""Running the passes over the graph of a user's module: options, dumps and the report.

Owns what `minivllm.compile` and the backend of `torch.compile` have in common behind tracing.

    reports = run_module_passes(graph, ModuleOptions(disable=("merge_linears",)))
    print(report_text(reports))
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from minivllm.compiler.explain import Explain
from minivllm.compiler.graph import Graph
from minivllm.compiler.listing import format_graph
from minivllm.compiler.module_pipeline import check_module_pass, select_module_passes
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.runner import PassReport, run_passes
from minivllm.compiler.text_diff import unified
from minivllm.errors import UserError
from minivllm.ops import OPS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleOptions:
    """What a user may ask of a module's compilation.

    Attributes:
        disable: names of passes to leave out.
        implementations: op name to the implementation that it must use.
        dump_dir: a folder for one text file a pass, their differences and summary.json; of
            several graphs each gets a folder of its own in it.
        explain: name of a pass: say what it matched and nearly matched.
        say: takes that text.
    """

    disable: Sequence[str] = ()
    implementations: Mapping[str, str] = field(default_factory=dict)
    dump_dir: str | Path | None = None
    explain: str | None = None
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            UserError: an unknown pass or op, or a string in the place of a list of names.
        """
        if isinstance(self.disable, str):
            raise UserError(f"disable={self.disable!r} is a text; give a list: [{self.disable!r}]")
        select_module_passes(self.disable)
        if self.explain is not None:
            check_module_pass("explain", self.explain)
        for name in self.implementations:
            if name not in OPS:
                raise UserError(f"implementations: no op {name!r}; choose from {', '.join(OPS)}")


def module_options(given: Mapping[str, Any]) -> ModuleOptions:
    """The options of `torch.compile(..., options=given)`.

    Raises:
        UserError: an unknown option, or one with a wrong value.
    """
    known = [f.name for f in dataclasses.fields(ModuleOptions)]
    for name in given:
        if name not in known:
            raise UserError(f"options: no option {name!r}; choose from {', '.join(known)}")
    return ModuleOptions(**given)


def run_module_passes(graph: Graph, options: ModuleOptions, number: int = 0) -> list[PassReport]:
    """Run the passes of modules on a graph, in place.

    Args:
        number: of the graph among those that the options are for; names its dump.

    Raises:
        UserError: the dump cannot be written.
        CompileError: a pass failed.
    """
    explain = None if options.explain is None else Explain(options.explain, options.say)
    dump = None
    if options.dump_dir is not None:
        dump = ModuleDump(Path(options.dump_dir) / f"graph_{number}")
    distinct = len(set(_output_nodes(graph)))
    reports = run_passes(
        graph,
        select_module_passes(options.disable),
        PassContext(None, disabled=frozenset(options.disable)),
        observers=[] if dump is None else [dump.observe],
        explain=explain,
    )
    _keep_outputs_apart(graph, distinct)
    if dump is not None:
        dump.finish(reports)
    return reports


def _output_nodes(graph: Graph) -> list[Node]:
    (outputs,) = graph.fx.output_node().args
    return [value for value in outputs if isinstance(value, Node)]  # type: ignore[union-attr]


def _keep_outputs_apart(graph: Graph, distinct: int) -> None:
    """Copy what is returned twice, if the module had computed it twice.

    Args:
        distinct: how many different tensors the module returned.
    """
    end = graph.fx.output_node()
    seen: set[Node] = set()
    values = []
    (outputs,) = end.args
    surplus = distinct - len(set(_output_nodes(graph)))
    for value in outputs:  # type: ignore[union-attr]
        if isinstance(value, Node) and value in seen and surplus > 0:
            end.meta |= {key: value.meta[key] for key in ("module", "source")}
            value = graph.call(torch.ops.aten.clone.default, value, like=end)
            surplus -= 1
        elif isinstance(value, Node):
            seen.add(value)
        values.append(value)
    end.args = (tuple(values),)


def report_text(reports: Sequence[PassReport]) -> str:
    """A row a pass, in Markdown.

    Sites are what it rewrote; near misses are places of which more than half fits, and `explain`
    tells what does not.
    """
    lines = [
        "| pass | sites | near misses | calls before | after | ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in reports:
        calls = f"{r.calls_before} | {r.calls_after}"
        row = (
            f"| {r.name} | {r.matches} | {near_miss_count(r)} | {calls} | {r.seconds * 1000:.0f} |"
        )
        lines.append(row)
    return "\n".join(lines)


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast would change what is computed there."""
    available = torch.amp.autocast_mode.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def near_miss_count(report: PassReport) -> int:
    """How many places fit by more than half: a product alone is not nearly a SwiGLU."""
    return sum(2 * miss.matched > miss.total for miss in report.misses)


class ModuleDump:
    """Writes the stages of one graph to a folder; the same graph gives the same bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: list[str] = []
        self._text = ""

    def observe(self, graph: Graph, stage: str) -> None:
        """An observer for `runner.run_passes`: the graph, and its change since the last stage."""
        text = format_graph(graph, stage)
        name = f"{len(self._names):02d}_{stage}"
        if not self._names:
            self._make()
        else:
            change = unified(self._text, text, f"{self._names[-1]}.txt", f"{name}.txt")
            self._write(f"{name}.diff", change)
        self._write(f"{name}.txt", text)
        self._names.append(name)
        self._text = text

    def finish(self, reports: Sequence[PassReport]) -> None:
        """Write what each pass did."""
        rows = [
            {
                "name": r.name,
                "sites": r.matches,
                "near_misses": near_miss_count(r),
                "calls_before": r.calls_before,
                "calls_after": r.calls_after,
            }
            for r in reports
        ]
        self._write("summary.json", json.dumps({"passes": rows}, indent=1) + "\n")

    def _make(self) -> None:
        """The folder, without what an earlier run left in it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for pattern in ("[0-9][0-9]_*.txt", "[0-9][0-9]_*.diff", "summary.json"):
                for old in self.folder.glob(pattern):
                    old.unlink()
        except OSError as error:
            raise self._error(error) from error

    def _write(self, name: str, text: str) -> None:
        try:
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"dump_dir={str(self.folder.parent)!r}: cannot write {error.filename or 'there'} "
            f"({error.strerror}); name a folder that can be written"
        )
