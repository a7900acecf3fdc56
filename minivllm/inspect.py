"""Compiles a model without weights or GPU and shows what each pass did.

Owns the tables it prints: the passes of each phase, and which implementation each op would have on
a GPU. Does not own the passes, the dumps (`compiler.dump_dir`), what is measured of a step
(`compiler.measure`) or the command line's grammar (`run`). It needs no kernel package: what is
chosen on a GPU is said as if all were installed.

    python -m minivllm.inspect +model=miniqwen08b compiler.dump_dir=dump
    python -m minivllm.inspect +model=miniqwen08b model.load_format=dummy compiler.measure=true
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.cost import STEPS, Cost, CostTable, call_costs, planned_context
from minivllm.compiler.dump import Dump
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.measured import Machine, MeasuredStep
from minivllm.compiler.measured_text import measured_tables
from minivllm.compiler.pipeline import PIPELINE
from minivllm.compiler.runner import Observer
from minivllm.config import ModelOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS
from minivllm.ops.op import is_importable
from minivllm.run import engine_config, main
from minivllm.runtime.measure import measure
from minivllm.runtime.resolve import (
    find_model,
    resolve_device,
    resolve_dtype,
    resolve_state_dtype,
)

CUDA = torch.device("cuda")


def inspect(settings: dict[str, Any]) -> None:
    """Compile the model of a composed config and print a table for each phase.

    `model.dtype=auto` is the checkpoint's dtype here, as on a GPU; where `compiler.measure` runs
    the model, it is that of a run on the same device.

    Raises:
        UserError: something wrong in the config or the model's files.
    """
    config = engine_config(settings)
    options, measured = config.compiler, config.compiler.measure
    device = None
    if measured or options.bisect == "speed":  # nothing else runs here
        device = resolve_device(config.runtime.device)
    folder, architecture = find_model(config.model) if measured else _architecture(config.model)
    on = device if measured and device else CUDA
    dtype = resolve_dtype(config.model.dtype, architecture, on)
    table = CostTable()
    observers: list[Observer] = [table.observe]
    floors = Floors()
    dump: Dump | None = None
    if measured:
        observers.append(floors.observe)
        if options.dump_dir is not None:  # it is written when the step has been measured
            dump = Dump(Path(options.dump_dir), architecture, options.dump_layers)
            observers.append(dump.observe)
            options = dataclasses.replace(options, dump_dir=None, dump_layers=())
    compiled = compile_model(
        architecture,
        dtype,
        options,
        state_dtype=resolve_state_dtype(config.runtime, architecture),
        observers=observers,
        say=_say,
        device=device,
    )
    steps: dict[str, MeasuredStep] = {}
    if measured and device is not None:
        _check_complete(compiled)
        steps = measure(compiled, folder, architecture, config, device, dtype)
    if dump is not None:
        dump.finish(compiled.reports, compiled.seconds, steps)
    for phase in PHASES:
        tokens, context = STEPS[phase], planned_context(phase)
        print(f"\n{phase}, {tokens} token{'s' * (tokens > 1)}, {context} of context, {dtype}:\n")
        step = steps.get(phase)
        print(_table(compiled, phase, table, step, floors))
        if step is not None:
            print(f"\n{measured_tables(phase, step)}")
    print(f"\non cuda, {dtype}, with every package installed:\n")
    print(_implementations(compiled, dtype, config.compiler.implementations))
    seconds = ", ".join(f"{part} {s:.1f} s" for part, s in compiled.seconds.items())
    print(f"\ncompiled: {seconds}")
    if config.compiler.dump_dir is not None:
        print(f"dumped: {config.compiler.dump_dir}/index.html and a folder for each phase")
    print(f"process: {_process_seconds():.1f} s, peak memory {_peak_memory() / 1e6:,.0f} MB")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _architecture(options: ModelOptions) -> tuple[Path | None, MiniQwenConfig]:
    """From a local folder, else from the options themselves: weights are not needed."""
    return find_model(dataclasses.replace(options, load_format="dummy"))


def _check_complete(compiled: CompiledModel) -> None:
    """That the graphs can run: `compiler.measure` needs every mandatory pass."""
    ran = {report.name for report in compiled.reports}
    missing = [p.name for p in PIPELINE if p.mandatory and p.name not in ran]
    if missing:
        raise UserError(
            f"compiler.measure=true runs the graphs, and without {', '.join(missing)} they cannot "
            "run; leave out compiler.stop_after, or name a later pass"
        )


class Floors:
    """Collects the costs of each stage's calls, for the least time that they take."""

    def __init__(self) -> None:
        self.costs: dict[tuple[str, str], list[Cost]] = {}

    def observe(self, graph: Graph, stage: str) -> None:
        """An observer for `runner.run_passes`."""
        self.costs[graph.phase, stage] = list(call_costs(graph).values())

    def ms(self, phase: str, stage: str, machine: Machine) -> float:
        """Milliseconds: the sum of the calls' floors."""
        return sum(machine.floor_us(cost) for cost in self.costs[phase, stage]) / 1000


def _table(
    compiled: CompiledModel,
    phase: str,
    costs: CostTable,
    step: MeasuredStep | None,
    floors: Floors,
) -> str:
    """A row a pass, in Markdown: sites, milliseconds, calls, launches, bytes, FLOPs after it; with
    a measured step the floor of each stage, and the time of the last one."""
    reports = {r.name: r for r in compiled.reports if r.phase == phase}
    more = step is not None
    lines = [
        "| pass | sites | ms | calls | launches | MB a step | GFLOP a step |"
        + " floor ms | measured ms |" * more,
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |" + " ---: | ---: |" * more,
    ]
    last = costs.stages[phase][-1]
    for stage in costs.stages[phase]:
        report = reports.get(stage.name)
        done = "" if report is None else str(report.matches)
        ms = "" if report is None else f"{report.seconds * 1000:.0f}"
        cost = f"{stage.calls} | {stage.cost.launches} | {stage.cost.bytes / 1e6:,.1f}"
        line = f"| {stage.name} | {done} | {ms} | {cost} | {stage.cost.flops / 1e9:,.2f} |"
        if step is not None:
            took = f"{step.step_us / 1000:.3f}" if stage is last else ""
            line += f" {floors.ms(phase, stage.name, step.machine):.3f} | {took} |"
        lines.append(line)
    return "\n".join(lines)


def _implementations(compiled: CompiledModel, dtype: torch.dtype, forced: Mapping[str, str]) -> str:
    """A row an op of the last graphs, in Markdown: its phases, its implementation and package."""
    lines = ["| op | calls | implementation | package |", "| --- | --- | --- | --- |"]
    for op in OPS.values():
        counts = {p: len(compiled.graphs[p].nodes(op.overload)) for p in PHASES}
        if not any(counts.values()):
            continue
        chosen = op.best(CUDA, dtype, forced.get(op.name))
        needs = ""
        if chosen.package is not None:
            missing = not is_importable(chosen.package)
            needs = chosen.package + " (needs package: not installed here)" * missing
        calls = ", ".join(f"{phase} {count}" for phase, count in counts.items() if count)
        lines.append(f"| {op.name} | {calls} | {chosen.name} | {needs} |")
    return "\n".join(lines)


def _process_seconds() -> float:
    """Since the process was started, its imports among them."""
    try:
        with open("/proc/self/stat", encoding="ascii") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux: the time of its processors, at least
        return time.process_time()


def _peak_memory() -> int:
    """The most bytes that the process has held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main(action=inspect))
