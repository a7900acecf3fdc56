"""Compiles a model without weights or GPU and shows what each pass did.

Owns the table it prints. Does not own the passes, the dumps (`compiler.dump_dir`) or the command
line's grammar (`run`).

    python -m minivllm.inspect +model=miniqwen08b compiler.dump_dir=dump
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.cost import CostTable
from minivllm.compiler.graph import PHASES
from minivllm.config import ModelOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.run import engine_config, main
from minivllm.runtime.resolve import find_model, resolve_state_dtype

CONTEXT = 256  # tokens of KV cache that a sequence of the table attends to
SIZES = {"prefill": 512, "decode": 1}  # tokens of the one sequence of the table's step


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
    tables = {p: CostTable({"tokens": n}, max(CONTEXT, n)) for p, n in SIZES.items()}
    compiled = compile_model(
        architecture,
        dtype,
        config.compiler,
        state_dtype=resolve_state_dtype(config.runtime, architecture),
        observers=[lambda graph, stage: tables[graph.phase].observe(graph, stage)],
    )
    for phase in PHASES:
        tokens = SIZES[phase]
        context = max(CONTEXT, tokens)
        print(f"\n{phase}, {tokens} token{'s' * (tokens > 1)}, {context} of context, {dtype}:\n")
        print(_table(compiled, phase, tables[phase]))
    seconds = ", ".join(f"{part} {s:.1f} s" for part, s in compiled.seconds.items())
    print(f"\ncompiled: {seconds}")


def _architecture(options: ModelOptions) -> MiniQwenConfig:
    """From a local folder, else from the options themselves: weights are not needed."""
    return find_model(dataclasses.replace(options, load_format="dummy"))[1]


def _table(compiled: CompiledModel, phase: str, costs: CostTable) -> str:
    """A row a pass, in Markdown: sites, milliseconds, calls, launches, bytes after it."""
    reports = {r.name: r for r in compiled.reports if r.phase == phase}
    lines = [
        "| pass | sites | ms | calls | launches | MB a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for stage in costs.stages[phase]:
        report = reports.get(stage.name)
        done = "" if report is None else str(report.matches)
        time = "" if report is None else f"{report.seconds * 1000:.0f}"
        cost = f"{stage.calls} | {stage.cost.launches} | {stage.cost.bytes / 1e6:,.1f}"
        lines.append(f"| {stage.name} | {done} | {time} | {cost} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(action=inspect))
