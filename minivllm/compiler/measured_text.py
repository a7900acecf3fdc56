"""Measured steps as text: what `inspect` prints of them, and the JSON beside a dump.

Owns the tables. Does not own the measuring (`runtime/measure.py`) nor the sums (measured.py).

    print(measured_tables("decode", step))
"""

from __future__ import annotations

import dataclasses
from typing import Any

from minivllm.compiler.measured import MeasuredStep, Row, part_of

SHOWN_NOTES = 10


def step_line(step: MeasuredStep) -> str:
    """The measured time of a step beside its floor, in a sentence or two."""
    how = "captured in a CUDA Graph" if step.captured else "launch by launch"
    return (
        f"{step.step_us / 1000:.3f} ms a step on {step.machine.name}, {how}; floor "
        f"{step.floor_us / 1000:.3f} ms, {100 * step.floor_us / step.step_us:.0f} % of it "
        f"({step.machine.bytes_per_second / 1e9:,.0f} GB/s and "
        f"{step.machine.flops_per_second / 1e12:,.3g} TFLOP/s, measured). "
        f"While its parts are timed it takes {step.total_us / 1000:.3f} ms, to which the µs add up."
    )


def measured_tables(phase: str, step: MeasuredStep) -> str:
    """The step's time by part of the model and by op, in Markdown."""
    lines = [f"{phase}, measured: {step_line(step)}"]
    if step.notes:
        lines.append("")
        lines += [f"not joined: {note}" for note in step.notes[:SHOWN_NOTES]]
        left = len(step.notes) - SHOWN_NOTES
        lines += [f"not joined: {left} more"] if left > 0 else []
    by_op = sorted(step.rows(lambda call: call.op), key=lambda row: -row.us)
    for name, rows in (
        ("part", step.rows(lambda call: part_of(call.module) or "(top)")),
        ("op", [row for row in by_op if row.kernels or row.cost.launches]),
    ):
        lines += [
            "",
            f"| {name} | calls | kernels | MB | GFLOP | floor µs | µs | floor/µs | share |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(_row_text(row, step.total_us) for row in rows),
            _row_text(_sum(rows), step.total_us),
        ]
    return "\n".join(lines)


def _sum(rows: list[Row]) -> Row:
    total = rows[0]
    for row in rows[1:]:
        total = Row(
            "",
            total.calls + row.calls,
            total.kernels + row.kernels,
            total.cost + row.cost,
            total.floor_us + row.floor_us,
            total.us + row.us,
        )
    return dataclasses.replace(total, name="all")


def _row_text(row: Row, total_us: float) -> str:
    reached = f"{100 * row.floor_us / row.us:.0f} %" if row.floor_us and row.us else ""
    return (
        f"| {row.name} | {row.calls or ''} | {row.kernels} | {row.cost.bytes / 1e6:,.2f} | "
        f"{row.cost.flops / 1e9:,.3f} | {row.floor_us:,.1f} | {row.us:,.1f} | {reached} | "
        f"{100 * row.us / total_us:.1f} % |"
    )


def measured_json(step: MeasuredStep) -> dict[str, Any]:
    """All that was measured, as plain data: every kernel with its call, module and op."""
    calls = {call.name: call for call in step.calls}
    kernels = []
    for timed in step.timed:
        call = calls.get(timed.owner)
        known = {"module": call.module, "op": call.op} if call else {}
        kernels.append({"call": timed.owner, **known, "kernel": timed.name, "us": timed.us})
    return {
        "machine": dataclasses.asdict(step.machine),
        "captured": step.captured,
        "step_us": step.step_us,
        "profiled_us": step.total_us,
        "floor_us": step.floor_us,
        "notes": list(step.notes),
        "kernels": kernels,
    }
