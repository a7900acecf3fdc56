"""What each pass changed: the report's side-by-side differences.

Owns their layout. Does not own the comparison of two listings (text_diff.py).

    html = changes(report, "decode")
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from minivllm.compiler.listing import is_shown, sections
from minivllm.compiler.report_data import Report
from minivllm.compiler.report_html import line_html
from minivllm.compiler.report_misses import misses_html
from minivllm.compiler.text_diff import Diff

CONTEXT_LINES = 2  # unchanged lines around a change


def changes(report: Report, phase: str) -> str:
    rows, texts = report.rows[phase], report.texts[phase]
    shown = [_shown_lines(text, report.shown) for text in texts]
    items = []
    for index in range(1, len(rows)):
        row, before = rows[index], rows[index - 1]
        name = f"{index:02d}_{row.name}"
        calls = f"{row.sites} sites · calls {before.calls:,} → {row.calls:,}"
        launches = f"launches {before.launches:,} → {row.launches:,}"
        about = report.documents[row.name]
        items.append(
            f'<details class="change" id="{phase}-{row.name}"><summary><span>{index:02d} '
            f'{row.name}</span><span class="num">{calls} · {launches}</span></summary>'
            f'<pre class="about">{html.escape(about)}</pre>'
            f'<p class="files">whole stage: <a href="{phase}/{name}.txt">{phase}/{name}.txt</a>, '
            f'<a href="{phase}/{name}.diff">{name}.diff</a>; before it: '
            f'<a href="{phase}/{index - 1:02d}_{before.name}.txt">'
            f"{index - 1:02d}_{before.name}.txt</a></p>"
            f"{misses_html(report.misses[phase][index], f'{phase}-{row.name}-near')}"
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
        for module, section in sections(text)
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
                    rows.append(f'<div class="e">{line_html(line)}</div>')
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
            f'<div class="r"><div class="d"><div>{line_html(a, b)}</div></div>'
            f'<div class="a"><div>{line_html(b, a)}</div></div></div>'
            for a, b in zip(old, new, strict=True)
        ]
    by_name = [dict(zip(names[k], side, strict=True)) for k, side in enumerate((old, new))]
    sides = []
    for kind, mine, lines, theirs in (
        ("d", names[0], old, by_name[1]),
        ("a", names[1], new, by_name[0]),
    ):
        cells = "".join(
            f"<div>{line_html(line, theirs.get(name))}</div>"
            for name, line in zip(mine, lines, strict=True)
        )
        sides.append(f'<div class="{kind}">{cells}</div>' if cells else "<div></div>")
    return [f'<div class="r">{"".join(sides)}</div>']
