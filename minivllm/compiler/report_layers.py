"""The report's tree of layers: each layer's modules and calls behind the last pass.

Owns the tree, and which layers are alike. Does not own the listings that it reads (listing.py).

    classes = alike(texts, config.num_hidden_layers)
    html = layer_tree(report, "decode")
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from minivllm.compiler.cost import Cost
from minivllm.compiler.listing import layer_of, sections
from minivllm.compiler.report_data import CallRow, Report
from minivllm.compiler.report_html import amount, line_html, noun
from minivllm.compiler.report_measured import Times


def alike(texts: Mapping[str, Sequence[str]], layers: int) -> list[list[int]]:
    """The layers in sets of those whose listings are the same at every stage of every phase.

    Nodes count as the same if they are used in the same way, and neighbours by their distance.
    """
    forms: list[list[str]] = [[] for _ in range(layers)]
    for stages in texts.values():
        for text in stages:
            bodies: dict[int, list[str]] = {}
            for module, lines in sections(text):
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


def layer_tree(report: Report, phase: str) -> str:
    first = _totals(report.calls[phase][0])
    last = _totals(report.calls[phase][-1])
    costs = {call.name: call.cost for call in report.calls[phase][-1]}
    times = Times(report, phase)
    groups: dict[str, list[tuple[str, list[str]]]] = {}
    for module, lines in sections(report.texts[phase][-1]):
        groups.setdefault(_group(module), []).append((module, lines))
    twins = {layer: members[0] for members in report.classes for layer in members}
    shown_of = {
        layer: next((m for m in members if m in report.shown), None)
        for members in report.classes
        for layer in members
    }
    items = []
    for group, parts in groups.items():
        layer = layer_of(group)
        name = group if layer is None else f"layer {layer}"
        if layer is not None:
            name += f' <span class="k">{report.config.layer_types[layer].replace("_", " ")}</span>'
        was, now = first.get(group), last[group]
        time = times.note(c.name for c in report.calls[phase][-1] if _group(c.module) == group)
        became = " · ".join(part for part in (_became(was, now), time) if part)
        numbers = f'<span class="num">{became}</span>'
        if layer is not None and layer not in report.shown:
            twin = shown_of[layer]
            if twin is None:
                like = f"not shown; layer {twins[layer]} is alike" if twins[layer] != layer else ""
            else:
                like = f'as <a href="#{phase}-layer-{twin}">layer {twin}</a>'
            items.append(f'<li class="same"><span>{name} <i>{like}</i></span>{numbers}</li>')
            continue
        anchor = "" if layer is None else f' id="{phase}-layer-{layer}"'
        inner = "".join(_module(module, group, lines, costs, times) for module, lines in parts)
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
        f"{calls} {noun('call', now[0])}",
        f"{launches} {noun('launch', now[1].launches)}",
        amount("bytes", now[1].bytes),
    ]
    if now[1].flops:
        parts.append(amount("flops", now[1].flops))
    return " · ".join(parts)


def _module(
    module: str, group: str, lines: Sequence[str], costs: Mapping[str, Cost], times: Times
) -> str:
    total = Cost()
    rows = []
    calls = [line[3 : line.index(" = ")] for line in lines]
    for line, call in zip(lines, calls, strict=True):
        cost = costs[call]
        total += cost
        note = ""
        if cost.launches:
            note = amount("bytes", cost.bytes)
            if cost.flops:
                note += f", {amount('flops', cost.flops)}"
            if cost.launches > 1:
                note = f"{cost.launches} launches, {note}"
        note = ", ".join(part for part in (note, times.note([call])) if part)
        tag = f' <small class="cost">{note}</small>' if note else ""
        rows.append(
            f'<div class="call{"" if cost.launches else " free"}">{line_html(line)}{tag}</div>'
        )
    name = module.removeprefix(group).removeprefix(".") or "(itself)"
    numbers = f"{len(lines)} {noun('call', len(lines))}"
    if total.launches:
        launches = f"{total.launches} {noun('launch', total.launches)}"
        numbers += f" · {launches} · {amount('bytes', total.bytes)}"
    if times.note(calls):
        numbers += f" · {times.note(calls)}"
    return (
        f'<details open><summary><span>{html.escape(name)}</span><span class="num">{numbers}</span>'
        f'</summary><div class="code">{"".join(rows)}</div></details>'
    )
