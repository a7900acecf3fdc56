"""One HTML page that shows a compilation: what each pass did, and what each layer became.

Owns the page, its overview and its tables of passes. Does not own the layers (report_layers.py),
the differences (report_changes.py), its look (`assets/report`), the listings it is made from
(listing.py) nor the files beside it (dump.py).

    html = write_report(Report(config=config, dtype="bfloat16", rows=rows, texts=texts, ...))

The page needs nothing else: style, script and the model's source are in it. Layers that are alike
at every stage are shown once. The times stand in one element, the only part that differs from run
to run, unless a step was measured (report_measured.py).
"""

from __future__ import annotations

import html
import importlib.resources
import json
from collections import Counter
from collections.abc import Sequence

from minivllm.compiler.cost import STEPS, planned_context
from minivllm.compiler.report_changes import changes
from minivllm.compiler.report_data import Report, StageRow
from minivllm.compiler.report_html import MODEL_FILE, SOURCE, cell, largest
from minivllm.compiler.report_layers import layer_tree
from minivllm.compiler.report_measured import measured_section

METRICS = {  # field of a stage -> its column
    "calls": "calls",
    "nodes": "nodes",
    "launches": "launches",
    "bytes": "MB",
    "flops": "GFLOP",
}


def write_report(report: Report) -> str:
    """The page as HTML."""
    assets = importlib.resources.files("minivllm") / "assets" / "report"
    style = (assets / "report.css").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    phases = "".join(_phase(report, phase) for phase in report.rows)
    links = "".join(
        f'<a href="#{phase}">{phase}</a><a href="#{phase}-layers">{phase} layers</a>'
        f'<a href="#{phase}-changes">{phase} changes</a>'
        for phase in report.rows
    )
    times = json.dumps(report.times).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # without an icon of its own a page makes some browsers ask a server for one
        '<link rel="icon" href="data:,">\n'
        f"<title>minivllm: a compilation, pass by pass</title>\n<style>\n{style}</style>\n"
        f'</head>\n<body>\n<nav aria-label="Sections"><a href="#top">overview</a>{links}'
        '<a href="#model">model source</a></nav>\n'
        f"<main>\n{_overview(report)}{phases}{_model_source()}</main>\n"
        f'<script type="application/json" id="times">{times}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _overview(report: Report) -> str:
    config = report.config
    kinds = Counter(kind.replace("_", " ") for kind in config.layer_types)
    layers = " and ".join(f"{count} of {kind}" for kind, count in kinds.items())
    cards = []
    for phase, rows in report.rows.items():
        items = ""
        for metric in ("calls", "launches", "bytes", "flops"):
            first, last = (
                cell(metric, getattr(row, metric), largest(rows, metric))
                for row in (rows[0], rows[-1])
            )
            items += f"<dt>{METRICS[metric]}</dt><dd>{first} → <b>{last}</b></dd>"
        step = report.measured.get(phase)
        if step is not None:
            items += (
                f'<dt><a href="#{phase}-measured">measured</a></dt><dd><b>'
                f"{step.step_us / 1000:.3f} ms</b>, floor {step.floor_us / 1000:.3f}</dd>"
            )
        cards.append(
            f'<section class="card"><h2><a href="#{phase}">{phase}</a></h2>'
            f"<p>{_step(phase)}</p><dl>{items}</dl></section>"
        )
    return (
        '<header id="top"><h1>A compilation, pass by pass</h1>\n'
        f"<p>{config.num_hidden_layers} layers ({layers}), hidden size "
        f"{config.hidden_size:,}, vocabulary {config.vocab_size:,}, {report.dtype}. The model is "
        "traced once, for one sequence; each phase then has a graph of its own. "
        "<span id='compiled'></span></p>\n"
        f'<div class="cards">{"".join(cards)}</div>\n'
        f"{_alike_text(report)}"
        "<details><summary>What the columns count</summary><p>Numbers are planned from the graph, "
        "not measured, but for µs. <b>Sites</b>: places that the pass rewrote. <b>Calls</b>: "
        "operations in the graph, views among them. <b>Nodes</b>: calls, inputs, weights, state "
        "and output. "
        "<b>Launches</b>: kernels of a step. <b>MB</b>: what calls must read and write at "
        "least once, of a state pool only the rows that are touched. <b>GFLOP</b>: of linears, "
        "convolutions, attention and the delta rule; a multiplication and an addition are two. "
        "<b>ms</b>: time that the pass itself took on the machine that compiled."
        "</p></details></header>\n"
    )


def _alike_text(report: Report) -> str:
    items = []
    for members in report.classes:
        shown = [layer for layer in members if layer in report.shown]
        others = [layer for layer in members if layer not in report.shown]
        names = ", ".join(f"<b>{layer}</b>" for layer in shown)
        if shown and others:
            items.append(f"<li>layer {names}, and like it {_ranges(others)}</li>")
        elif shown:
            items.append(f"<li>layer {names}{', alike' if len(shown) > 1 else ''}</li>")
        else:
            items.append(f"<li>not shown: {_ranges(others)}</li>")
    return (
        "<p>Layers whose graphs are the same at every stage of both phases, but for names, are "
        f"shown once, as the first of them:</p><ul class='alike'>{''.join(items)}</ul>\n"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`1, 4–6` for 1, 4, 5, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(str(n) for n in run) for run in runs
    )


def _phase(report: Report, phase: str) -> str:
    return (
        f'<section id="{phase}"><h2>{phase}</h2>\n<p>{_step(phase)}</p>\n'
        f"{_pass_table(phase, report.rows[phase])}"
        f"{measured_section(report, phase)}"
        f'<h3 id="{phase}-layers">{phase}: the layers after the last pass</h3>\n'
        f"{layer_tree(report, phase)}"
        f'<h3 id="{phase}-changes">{phase}: what each pass changed</h3>\n'
        f"{changes(report, phase)}</section>\n"
    )


def _step(phase: str) -> str:
    tokens = STEPS[phase]
    return (
        f"One sequence, {tokens} token{'s' * (tokens > 1)} of it in this step, "
        f"{planned_context(phase)} tokens of context."
    )


def _pass_table(phase: str, rows: Sequence[StageRow]) -> str:
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("pass", "sites", *METRICS.values(), "ms")
    )
    most = {metric: largest(rows, metric) or 1 for metric in METRICS}
    lines = []
    for index, row in enumerate(rows):
        before = rows[index - 1] if index else None
        cells = []
        for metric in METRICS:
            value = getattr(row, metric)
            delta = ""
            if before is not None:
                change = value - getattr(before, metric)
                sign = "down" if change < 0 else "up"
                text = f"{'−' if change < 0 else '+'}{cell(metric, abs(change), most[metric])}"
                delta = f'<small class="{sign}">{text}</small>' if change else "<small>·</small>"
            share = 100 * value / most[metric]
            cells.append(
                f'<td style="--w:{share:.1f}%">{cell(metric, value, most[metric])} {delta}</td>'
            )
        name = f"{index:02d} {row.name}"
        sites = "" if row.sites is None else str(row.sites)
        link = f'<a href="#{phase}-{row.name}">{name}</a>' if index else name
        lines.append(
            f'<tr><th scope="row">{link}</th><td class="n">{sites}</td>{"".join(cells)}'
            f'<td class="n" data-ms="{phase} {row.name}"></td></tr>'
        )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Passes of {phase}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>\n"
    )


def _model_source() -> str:
    lines = MODEL_FILE.read_text(encoding="utf-8").splitlines()
    rows = "".join(
        f'<div id="L{number}"><a href="#L{number}">{number}</a>{html.escape(line, quote=False)}'
        "</div>"
        for number, line in enumerate(lines, 1)
    )
    return (
        f'<section id="model"><h2>model source</h2>\n<p>{SOURCE}, the program that was traced. '
        f"Each call above names its line here.</p>\n"
        f'<div class="code listing" tabindex="0" role="region" aria-label="{SOURCE}">{rows}</div>'
        "</section>\n"
    )
