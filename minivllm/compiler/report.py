"""One HTML page that shows a compilation: what each pass did, and what each layer became.

Owns the page's content. Does not own its look (`assets/report`), the listings it is made from
(listing.py) nor the files beside it (dump.py).

    html = write_report(Report(config, "bfloat16", rows, texts, calls, classes, shown, times))

The page needs nothing else: style, script and the model's source are in it. Layers that are alike
at every stage are shown once. The times stand in one element, the only part that differs from run
to run.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minivllm.model.miniqwen as model_source
from minivllm.compiler.cost import STEPS, Cost, planned_context
from minivllm.compiler.listing import is_shown, layer_of
from minivllm.compiler.pipeline import PIPELINE
from minivllm.compiler.text_diff import Diff
from minivllm.model.config import MiniQwenConfig

MODEL_FILE = Path(model_source.__file__)
SOURCE = "/".join(MODEL_FILE.parts[-2:])  # as source lines name it
CONTEXT_LINES = 2  # unchanged lines around a change
METRICS = {  # field of a stage -> its column
    "calls": "calls",
    "nodes": "nodes",
    "launches": "launches",
    "bytes": "MB",
    "flops": "GFLOP",
}


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
        rows, texts, calls: phase to its stages' numbers, listings and calls.
        classes: sets of layers that are alike at every stage.
        shown: the layers that are shown in full.
        times: seconds of the parts of the compilation, milliseconds of the passes.
    """

    config: MiniQwenConfig
    dtype: str
    rows: Mapping[str, Sequence[StageRow]]
    texts: Mapping[str, Sequence[str]]
    calls: Mapping[str, Sequence[Sequence[CallRow]]]
    classes: Sequence[Sequence[int]]
    shown: Sequence[int]
    times: Mapping[str, Any]


def alike(texts: Mapping[str, Sequence[str]], layers: int) -> list[list[int]]:
    """The layers in sets of those whose listings are the same at every stage of every phase.

    Nodes count as the same if they are used in the same way, and neighbours by their distance.
    """
    forms: list[list[str]] = [[] for _ in range(layers)]
    for stages in texts.values():
        for text in stages:
            bodies: dict[int, list[str]] = {}
            for module, lines in _sections(text):
                layer = layer_of(module)
                if layer is not None:
                    bodies.setdefault(layer, []).extend([module, *lines])
            for layer, body in bodies.items():
                forms[layer].append(_without_names("\n".join(body), layer))
    classes: dict[str, list[int]] = {}
    for layer, form in enumerate(forms):
        classes.setdefault("\n\n".join(form), []).append(layer)
    return list(classes.values())


def _without_names(text: str, layer: int) -> str:
    numbers: dict[str, str] = {}
    text = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - layer:+d}", text)
    return re.sub(r"%\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text)


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """A listing's modules, in order, with their lines; inputs, states and the end are left out."""
    sections: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("  "):
            sections[-1][1].append(line)
        elif line.endswith(":") and " " not in line:
            sections.append((line[:-1].replace("(top)", ""), []))
    return sections


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
                _cell(metric, getattr(row, metric), _most(rows, metric))
                for row in (rows[0], rows[-1])
            )
            items += f"<dt>{METRICS[metric]}</dt><dd>{first} → <b>{last}</b></dd>"
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
        "not measured. <b>Sites</b>: places that the pass rewrote. <b>Calls</b>: operations in the "
        "graph, views among them. <b>Nodes</b>: calls, inputs, weights, state and output. "
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
        f'<h3 id="{phase}-layers">{phase}: the layers after the last pass</h3>\n'
        f"{_tree(report, phase)}"
        f'<h3 id="{phase}-changes">{phase}: what each pass changed</h3>\n'
        f"{_changes(report, phase)}</section>\n"
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
    most = {metric: _most(rows, metric) or 1 for metric in METRICS}
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
                text = f"{'−' if change < 0 else '+'}{_cell(metric, abs(change), most[metric])}"
                delta = f'<small class="{sign}">{text}</small>' if change else "<small>·</small>"
            share = 100 * value / most[metric]
            cells.append(
                f'<td style="--w:{share:.1f}%">{_cell(metric, value, most[metric])} {delta}</td>'
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


def _tree(report: Report, phase: str) -> str:
    first = _totals(report.calls[phase][0])
    last = _totals(report.calls[phase][-1])
    costs = {call.name: call.cost for call in report.calls[phase][-1]}
    groups: dict[str, list[tuple[str, list[str]]]] = {}
    for module, lines in _sections(report.texts[phase][-1]):
        groups.setdefault(_group(module), []).append((module, lines))
    twins = {layer: members[0] for members in report.classes for layer in members}
    shown_of = {
        layer: next((m for m in members if m in report.shown), None)
        for members in report.classes
        for layer in members
    }
    items = []
    for group, sections in groups.items():
        layer = layer_of(group)
        name = group if layer is None else f"layer {layer}"
        if layer is not None:
            name += f' <span class="k">{report.config.layer_types[layer].replace("_", " ")}</span>'
        was, now = first.get(group), last[group]
        numbers = f'<span class="num">{_became(was, now)}</span>'
        if layer is not None and layer not in report.shown:
            twin = shown_of[layer]
            if twin is None:
                like = f"not shown; layer {twins[layer]} is alike" if twins[layer] != layer else ""
            else:
                like = f'as <a href="#{phase}-layer-{twin}">layer {twin}</a>'
            items.append(f'<li class="same"><span>{name} <i>{like}</i></span>{numbers}</li>')
            continue
        anchor = "" if layer is None else f' id="{phase}-layer-{layer}"'
        inner = "".join(_module(module, group, lines, costs) for module, lines in sections)
        items.append(
            f"<li{anchor}><details><summary><span>{name or '(top)'}</span>{numbers}</summary>"
            f"{inner}</details></li>"
        )
    tools = (
        f'<p class="tools"><button type="button" data-open="{phase}-tree">open all</button> '
        f'<button type="button" data-close="{phase}-tree">close all</button> '
        "calls and launches: of the source → now</p>"
    )
    return f'{tools}<ul class="tree" id="{phase}-tree">{"".join(items)}</ul>\n'


def _group(module: str) -> str:
    layer = layer_of(module)
    return module.split(".")[0] if layer is None else f"layers.{layer}"


def _totals(calls: Sequence[CallRow]) -> dict[str, tuple[int, Cost]]:
    totals: dict[str, tuple[int, Cost]] = {}
    for call in calls:
        count, cost = totals.get(_group(call.module), (0, Cost()))
        totals[_group(call.module)] = (count + 1, cost + call.cost)
    return totals


def _became(was: tuple[int, Cost] | None, now: tuple[int, Cost]) -> str:
    def both(old: int | None, new: int) -> str:
        return f"{new:,}" if old is None or old == new else f"{old:,} → {new:,}"

    calls = both(was and was[0], now[0])
    launches = both(was and was[1].launches, now[1].launches)
    parts = [
        f"{calls} {_noun('call', now[0])}",
        f"{launches} {_noun('launch', now[1].launches)}",
        _number("bytes", now[1].bytes),
    ]
    if now[1].flops:
        parts.append(_number("flops", now[1].flops))
    return " · ".join(parts)


def _module(module: str, group: str, lines: Sequence[str], costs: Mapping[str, Cost]) -> str:
    total = Cost()
    rows = []
    for line in lines:
        cost = costs[line[3 : line.index(" = ")]]
        total += cost
        note = ""
        if cost.launches:
            note = _number("bytes", cost.bytes)
            if cost.flops:
                note += f", {_number('flops', cost.flops)}"
            if cost.launches > 1:
                note = f"{cost.launches} launches, {note}"
        tag = f' <small class="cost">{note}</small>' if note else ""
        rows.append(f'<div class="call{"" if cost.launches else " free"}">{_line(line)}{tag}</div>')
    name = module.removeprefix(group).removeprefix(".") or "(itself)"
    numbers = f"{len(lines)} {_noun('call', len(lines))}"
    if total.launches:
        launches = f"{total.launches} {_noun('launch', total.launches)}"
        numbers += f" · {launches} · {_number('bytes', total.bytes)}"
    return (
        f'<details open><summary><span>{html.escape(name)}</span><span class="num">{numbers}</span>'
        f'</summary><div class="code">{"".join(rows)}</div></details>'
    )


def _changes(report: Report, phase: str) -> str:
    rows, texts = report.rows[phase], report.texts[phase]
    documents = {p.name: sys.modules[type(p).__module__].__doc__ or "" for p in PIPELINE}
    shown = [_shown_lines(text, report.shown) for text in texts]
    items = []
    for index in range(1, len(rows)):
        row, before = rows[index], rows[index - 1]
        name = f"{index:02d}_{row.name}"
        calls = f"{row.sites} sites · calls {before.calls:,} → {row.calls:,}"
        launches = f"launches {before.launches:,} → {row.launches:,}"
        about = documents.get(row.name, "").strip()
        items.append(
            f'<details class="change" id="{phase}-{row.name}"><summary><span>{index:02d} '
            f'{row.name}</span><span class="num">{calls} · {launches}</span></summary>'
            f'<pre class="about">{html.escape(about)}</pre>'
            f'<p class="files">whole stage: <a href="{phase}/{name}.txt">{phase}/{name}.txt</a>, '
            f'<a href="{phase}/{name}.diff">{name}.diff</a>; before it: '
            f'<a href="{phase}/{index - 1:02d}_{before.name}.txt">'
            f"{index - 1:02d}_{before.name}.txt</a></p>"
            f"{_side_by_side(shown[index - 1], shown[index], before.name, row.name)}</details>"
        )
    tools = (
        f'<div id="{phase}-all"><p class="tools">'
        f'<button type="button" data-open="{phase}-all">open all</button> '
        f'<button type="button" data-close="{phase}-all">close all</button> '
        "lines that a pass left alone run across both columns</p>"
    )
    return f"{tools}{''.join(items)}</div>\n"


def _shown_lines(text: str, layers: Sequence[int]) -> list[tuple[str, str]]:
    """`(module, line)` of the modules that are shown; the end of the graph last."""
    lines = [
        (module, line)
        for module, section in _sections(text)
        if is_shown(module, layers)
        for line in section
    ]
    return [*lines, ("", text.rstrip().splitlines()[-1])]


def _side_by_side(
    before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]], was: str, now: str
) -> str:
    matcher = Diff([line for _, line in before], [line for _, line in after])
    rows = [f'<div class="r head"><div>{was}</div><div>{now}</div></div>']
    module: str | None = None

    def heading(of: str) -> None:
        nonlocal module
        if of != module:
            rows.append(f'<div class="m">{html.escape(of or "(top)")}</div>')
            module = of

    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT_LINES)):
        if number:
            rows.append('<div class="gap" aria-hidden="true">⋯</div>')
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                for of, line in after[j1:j2]:
                    heading(of)
                    rows.append(f'<div class="e">{_line(line)}</div>')
                continue
            for of, old, new in _by_module(before[i1:i2], after[j1:j2]):
                heading(of)
                rows += _beside(old, new)
    if len(rows) == 1:
        return "<p>Nothing changed in the layers shown.</p>"
    return f'<div class="diff code">{"".join(rows)}</div>'


def _by_module(
    before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]]
) -> list[tuple[str, list[str], list[str]]]:
    """A module's removed and added lines, module by module."""
    modules = dict.fromkeys(module for module, _ in [*before, *after])
    return [
        (
            module,
            [line for of, line in before if of == module],
            [line for of, line in after if of == module],
        )
        for module in modules
    ]


def _beside(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Rows of two cells: line by line where the calls are the same ones, else all in one."""
    names = [[line.partition(" = ")[0] for line in side] for side in (old, new)]
    if names[0] == names[1]:
        return [
            f'<div class="r"><div class="d"><div>{_line(a, b)}</div></div>'
            f'<div class="a"><div>{_line(b, a)}</div></div></div>'
            for a, b in zip(old, new, strict=True)
        ]
    by_name = [dict(zip(names[k], side, strict=True)) for k, side in enumerate((old, new))]
    sides = []
    for kind, mine, lines, theirs in (
        ("d", names[0], old, by_name[1]),
        ("a", names[1], new, by_name[0]),
    ):
        cells = "".join(
            f"<div>{_line(line, theirs.get(name))}</div>"
            for name, line in zip(mine, lines, strict=True)
        )
        sides.append(f'<div class="{kind}">{cells}</div>' if cells else "<div></div>")
    return [f'<div class="r">{"".join(sides)}</div>']


_CALL = re.compile(r"  (%\w+) = ([\w.]+)(\(.*\)): (.*?)(?:    # (\S+):(\d+))?$")
_TOKEN = re.compile(r"%\w+|[\w.+-]+")


def _line(line: str, other: str | None = None) -> str:
    """A line of a listing as HTML, linked to the model's source.

    Args:
        other: the same call on the other side, whose arguments are marked where they differ.
    """
    found = _CALL.match(line)
    if found is None:
        return html.escape(line.strip(), quote=False)
    name, op, arguments, kind, file, number = found.groups()
    op = f"<b>{op.removeprefix('minivllm.')}</b>" if op.startswith("minivllm.") else op
    where = ""
    if file == SOURCE:
        where = f' <a href="#L{number}">{MODEL_FILE.name}:{number}</a>'
    elif file:
        where = f" <i>{html.escape(file)}:{number}</i>"
    arguments = html.escape(arguments, quote=False)
    if other is not None:
        known = set(_TOKEN.findall(other))
        arguments = _TOKEN.sub(
            lambda m: m[0] if m[0] in known else f"<mark>{m[0]}</mark>", arguments
        )
    return f"{name} = {op}{arguments}<s>: {html.escape(kind, quote=False)}</s>{where}"


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


def _cell(metric: str, value: int, most: int) -> str:
    """A number of the table, in its column's unit, to about five digits of the column's largest."""
    unit = {"bytes": 1e6, "flops": 1e9}.get(metric)
    if unit is None:
        return f"{value:,}"
    digits = min(max(4 - math.floor(math.log10(max(most, 1) / unit)), 1), 5)
    return f"{value / unit:,.{digits}f}"


def _most(rows: Sequence[StageRow], metric: str) -> int:
    return max(getattr(row, metric) for row in rows)


def _noun(noun: str, count: int) -> str:
    plural = "es" if noun.endswith("h") else "s"
    return noun if count == 1 else noun + plural


def _number(metric: str, value: int) -> str:
    """Bytes or FLOPs with a unit of their size."""
    unit = "B" if metric == "bytes" else "FLOP"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:,.{_digits(value / size)}f} {prefix}{unit}"
    return f"{value} {unit}"


def _digits(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0
