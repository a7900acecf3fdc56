"""Lines of listings, and numbers, as the report writes them.

Owns their HTML and their units. Does not own what is shown of them (report_layers.py,
report_changes.py), nor how a listing spells a node (text.py).

    line_html("  %y = aten.add.Tensor(%x, 1): float32[tokens, 8]    # model/miniqwen.py:12")
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path

import minivllm.model.miniqwen as model_source
from minivllm.compiler.report_data import StageRow

MODEL_FILE = Path(model_source.__file__)
SOURCE = "/".join(MODEL_FILE.parts[-2:])  # as source lines name it
_CALL = re.compile(r"  (%\w+) = ([\w.]+)(\(.*\)): (.*?)(?:    # (\S+):(\d+))?$")
_TOKEN = re.compile(r"%\w+|[\w.+-]+")


def line_html(line: str, other: str | None = None) -> str:
    """A line of a listing as HTML, linked to the model's source.

    Args:
        other: the same call on the other side, whose arguments are marked where they differ.
    """
    found = _CALL.match(line)
    if found is None:
        return html.escape(line.strip(), quote=False)
    name, op, arguments, kind, file, number = found.groups()
    op = f"<b>{op.removeprefix('minivllm.')}</b>" if op.startswith("minivllm.") else op
    where = f" {source_html(file, number)}" if file else ""
    arguments = html.escape(arguments, quote=False)
    if other is not None:
        known = set(_TOKEN.findall(other))
        arguments = _TOKEN.sub(
            lambda m: m[0] if m[0] in known else f"<mark>{m[0]}</mark>", arguments
        )
    return f"{name} = {op}{arguments}<s>: {html.escape(kind, quote=False)}</s>{where}"


def source_html(file: str, number: str) -> str:
    """A source line: a link into the page if it is the model's, else its name."""
    if file == SOURCE:
        return f'<a href="#L{number}">{MODEL_FILE.name}:{number}</a>'
    return f"<i>{html.escape(file)}:{number}</i>"


def cell(metric: str, value: int, most: int) -> str:
    """A number of the table, in its column's unit, to about five digits of the column's largest."""
    unit = {"bytes": 1e6, "flops": 1e9}.get(metric)
    if unit is None:
        return f"{value:,}"
    digits = min(max(4 - math.floor(math.log10(max(most, 1) / unit)), 1), 5)
    return f"{value / unit:,.{digits}f}"


def largest(rows: Sequence[StageRow], metric: str) -> int:
    return max(getattr(row, metric) for row in rows)


def noun(noun: str, count: int) -> str:
    plural = "es" if noun.endswith("h") else "s"
    return noun if count == 1 else noun + plural


def amount(metric: str, value: int) -> str:
    """Bytes or FLOPs with a unit of their size."""
    unit = "B" if metric == "bytes" else "FLOP"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:,.{_digits(value / size)}f} {prefix}{unit}"
    return f"{value} {unit}"


def _digits(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0
