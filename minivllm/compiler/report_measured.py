"""The report's measured times: a time line of the step by layer, and its time by op.

Owns their HTML, and the note that a call, a module or a layer gets in the tree. Does not own the
numbers (measured.py) nor the tree (report_layers.py).

    html = measured_section(report, "decode")
    note = Times(report, "decode").note(["linear_3"])
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from minivllm.compiler.listing import layer_of
from minivllm.compiler.measured import Row, part_of
from minivllm.compiler.measured_text import step_line
from minivllm.compiler.report_data import Report
from minivllm.compiler.report_html import amount


class Times:
    """The measured times of a phase's calls, by their names; of nothing if it was not measured."""

    def __init__(self, report: Report, phase: str) -> None:
        self._step = report.measured.get(phase)
        self._us = self._step.us_of() if self._step else {}
        self._floors = (
            {call.name: self._step.machine.floor_us(call.cost) for call in self._step.calls}
            if self._step
            else {}
        )

    def note(self, calls: Iterable[str]) -> str:
        """`12.3 µs (floor 8.1)` of some calls together; empty for what takes no time."""
        names = list(calls)
        us = sum(self._us.get(name, 0.0) for name in names)
        floor = sum(self._floors.get(name, 0.0) for name in names)
        if not us:
            return ""
        return f"{us:,.1f} µs" + (f" (floor {floor:,.1f})" if floor else "")


def measured_section(report: Report, phase: str) -> str:
    """The measured step of a phase; empty if it was not measured."""
    step = report.measured.get(phase)
    if step is None:
        return ""
    notes = ""
    if step.notes:
        items = "".join(f"<li>{html.escape(note, quote=False)}</li>" for note in step.notes)
        notes = (
            f"<details><summary>{len(step.notes)} that could not be joined to a call</summary>"
            f"<ul>{items}</ul></details>\n"
        )
    return (
        f'<h3 id="{phase}-measured">{phase}: the measured step</h3>\n'
        f"<p>{html.escape(step_line(step), quote=False)} A kernel's time is from the end of those "
        "before it to its own end. The floor is that of the bytes or of the FLOPs, whichever takes "
        "longer; a model that fits into the caches can be faster.</p>\n"
        f"{notes}{_time_line(report, phase)}{_op_table(report, phase)}"
    )


def _time_line(report: Report, phase: str) -> str:
    """A row a layer; in it each kernel stands where it ran in the step."""
    step = report.measured[phase]
    calls = {call.name: call for call in step.calls}
    total = step.total_us or 1.0
    bars: dict[str, list[str]] = {}
    at = 0.0
    for timed in step.timed:
        call = calls.get(timed.owner)
        part = part_of(call.module) if call else timed.owner
        what = call.op.removeprefix("minivllm.") if call else timed.owner
        title = f"{what}: {timed.us:,.1f} µs at {at:,.1f}"
        if call:
            title += f", floor {step.machine.floor_us(call.cost):,.1f}; {call.module}"
        if timed.name != what:
            title += f"; {timed.name[:80]}"
        bars.setdefault(part, []).append(
            f'<b style="left:{100 * at / total:.3f}%;width:{100 * timed.us / total:.3f}%" '
            f'title="{html.escape(title)}"></b>'
        )
        at += timed.us
    rows = []
    for row in step.rows(lambda call: part_of(call.module)):
        layer = layer_of(row.name)
        name, kind = html.escape(row.name or "(top)"), ""
        if layer is not None:
            kind = report.config.layer_types[layer].replace("_", " ")
            name = f"layer {layer}"
            if layer in report.shown:
                name = f'<a href="#{phase}-layer-{layer}">{name}</a>'
        rows.append(
            f'<div class="lane {kind.partition(" ")[0]}"><span>{name} <i>{kind}</i></span>'
            f'<div class="bar">{"".join(bars.get(row.name, []))}</div>'
            f'<span class="num">{_numbers(row)}</span></div>'
        )
    return (
        f'<div class="lanes" role="group" aria-label="Time line of {phase}, by layer">'
        f"{''.join(rows)}</div>\n"
    )


def _numbers(row: Row) -> str:
    if not row.floor_us:
        return f"{row.us:,.1f} µs"
    reached = f", {100 * row.floor_us / row.us:.0f} %" if row.us else ""
    return f"{row.us:,.1f} µs <small>floor {row.floor_us:,.1f}{reached}</small>"


def _op_table(report: Report, phase: str) -> str:
    step = report.measured[phase]
    total = step.total_us or 1.0
    names = ("op", "calls", "kernels", "moved", "FLOPs", "floor µs", "µs", "floor/µs", "share")
    lines = []
    for row in sorted(step.rows(lambda call: call.op), key=lambda row: -row.us):
        if not row.kernels and not row.cost.launches:
            continue
        share = f"{100 * row.us / total:.1f}%"
        reached = f"{100 * row.floor_us / row.us:.0f} %" if row.us and row.floor_us else ""
        cells = [
            str(row.calls or ""),
            str(row.kernels),
            amount("bytes", row.cost.bytes) if row.cost.bytes else "",
            amount("flops", row.cost.flops) if row.cost.flops else "",
            f"{row.floor_us:,.1f}" if row.floor_us else "",
            f"{row.us:,.1f}",
            reached,
        ]
        name = html.escape(row.name.removeprefix("minivllm."))
        lines.append(
            f'<tr><th scope="row">{name}</th>'
            + "".join(f'<td class="n">{cell}</td>' for cell in cells)
            + f'<td style="--w:{share}">{share}</td></tr>'
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Measured ops of {phase}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>\n"
    )
