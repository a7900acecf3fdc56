"""Compiles a model without weights or GPU and shows what each pass did.

Owns the tables it prints: the passes of each phase, and which implementation each op would have on
a GPU. Does not own the passes, the dumps (`compiler.dump_dir`) or the command line's grammar
(`run`). It needs no kernel package: what is chosen on a GPU is said as if all were installed.

    python -m minivllm.inspect +model=miniqwen08b compiler.dump_dir=dump
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.cost import STEPS, CostTable, planned_context
from minivllm.compiler.graph import PHASES
from minivllm.config import ModelOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS
from minivllm.ops.op import is_importable
from minivllm.run import engine_config, main
from minivllm.runtime.resolve import find_model, resolve_device, resolve_state_dtype

CUDA = torch.device("cuda")


def inspect(settings: dict[str, Any]) -> None:
    """Compile the model of a composed config and print a table for each phase.

    `model.dtype=auto` is the checkpoint's dtype here, as on a GPU.

    Raises:
        UserError: something wrong in the config or the model's files.
    """
    config = engine_config(settings)
    architecture = _architecture(config.model)
    name = config.model.dtype
    dtype = getattr(torch, (architecture.dtype or "bfloat16") if name == "auto" else name)
    table = CostTable()
    device = None
    if config.compiler.bisect == "speed":  # nothing else runs here
        device = resolve_device(config.runtime.device)
    compiled = compile_model(
        architecture,
        dtype,
        config.compiler,
        state_dtype=resolve_state_dtype(config.runtime, architecture),
        observers=[table.observe],
        say=_say,
        device=device,
    )
    for phase in PHASES:
        tokens, context = STEPS[phase], planned_context(phase)
        print(f"\n{phase}, {tokens} token{'s' * (tokens > 1)}, {context} of context, {dtype}:\n")
        print(_table(compiled, phase, table))
    print(f"\non cuda, {dtype}, with every package installed:\n")
    print(_implementations(compiled, dtype, config.compiler.implementations))
    seconds = ", ".join(f"{part} {s:.1f} s" for part, s in compiled.seconds.items())
    print(f"\ncompiled: {seconds}")
    if config.compiler.dump_dir is not None:
        print(f"dumped: {config.compiler.dump_dir}/index.html and a folder for each phase")
    print(f"process: {_process_seconds():.1f} s, peak memory {_peak_memory() / 1e6:,.0f} MB")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _architecture(options: ModelOptions) -> MiniQwenConfig:
    """From a local folder, else from the options themselves: weights are not needed."""
    return find_model(dataclasses.replace(options, load_format="dummy"))[1]


def _table(compiled: CompiledModel, phase: str, costs: CostTable) -> str:
    """A row a pass, in Markdown: sites, milliseconds, calls, launches, bytes, FLOPs after it."""
    reports = {r.name: r for r in compiled.reports if r.phase == phase}
    lines = [
        "| pass | sites | ms | calls | launches | MB a step | GFLOP a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for stage in costs.stages[phase]:
        report = reports.get(stage.name)
        done = "" if report is None else str(report.matches)
        ms = "" if report is None else f"{report.seconds * 1000:.0f}"
        cost = f"{stage.calls} | {stage.cost.launches} | {stage.cost.bytes / 1e6:,.1f}"
        lines.append(f"| {stage.name} | {done} | {ms} | {cost} | {stage.cost.flops / 1e9:,.2f} |")
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
