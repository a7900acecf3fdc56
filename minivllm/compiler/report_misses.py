"""What a pass nearly matched, in the report: where it turned away, what it wanted and found.

Owns the HTML. Does not own how misses are found (near_miss.py) or put together (explain.py).

    html = misses_html(report.misses["decode"][3], "decode-fuse_residual_add-near")
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from minivllm.compiler.explain import MissGroup, count, progress
from minivllm.compiler.report_html import source_html

GROUPS = 8  # that are told


def misses_html(groups: Sequence[MissGroup], anchor: str) -> str:
    """The near misses of one pass on one graph; those that differ in their layer only, once.

    Args:
        anchor: the id of the part.
    """
    if not groups:
        return '<p class="files">No near miss: nothing else in the graph came close.</p>'
    total = sum(len(group.sites) for group in groups)
    kinds = f" of {count(len(groups), 'kind')}" if total > 1 else ""
    items = "".join(_group(group) for group in groups[:GROUPS])
    if len(groups) > GROUPS:
        items += f"<p>and {count(len(groups) - GROUPS, 'kind')} less advanced: compiler.explain</p>"
    return (
        f'<details class="near" id="{anchor}"><summary>{count(total, "near miss")}{kinds}</summary>'
        "<p>Places that came close and were left as they are, the most advanced first. A fault "
        f"only where a site is missing, which stops the compilation.</p>{items}</details>"
    )


def _group(group: MissGroup) -> str:
    miss = group.miss
    source = ""
    if miss.source:
        file, _, number = miss.source.rpartition(":")
        source = f", {source_html(file, number)}"
    rows = {
        "expected": html.escape(miss.expected, quote=False),
        "found": html.escape(miss.here, quote=False),
        "from": f"{html.escape(miss.module or '(top)')}{source}; made by {miss.made_by}",
        "reason": html.escape(miss.reason, quote=False),
    }
    texts = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows.items())
    places = html.escape("; ".join(group.places))
    return (
        f"<section><h4>{places}</h4><p>{html.escape(progress(miss), quote=False)}</p>"
        f'<dl class="code">{texts}</dl></section>'
    )
