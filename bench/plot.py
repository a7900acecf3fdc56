"""The picture of a run of `compile_vs_eager.py`.

matplotlib is optional: `pip install -e '.[bench]'`.

    print(plot(results, ["prefill_ms", "decode_ms@1"], ablation, "tiny on a CPU", Path("run.png")))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, float | None]]
WIDE = 20  # times the least, above which a bar needs a logarithmic scale to be seen


def plot(
    results: Results,
    columns: Sequence[str],
    ablation: Sequence[Mapping[str, Any]],
    title: str,
    out: Path,
) -> str:
    """Draw the times of each row, and what leaving out a pass costs with its 95 % interval.

    Args:
        columns: those that were timed, in milliseconds.
        ablation: an entry a pass, as in the record; may be empty.

    Returns:
        A line that says what became of it; a plot that cannot be written is no reason to lose
        the numbers.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot at {out}: matplotlib is not installed (pip install -e '.[bench]')"
    height = 4 + 4 * bool(ablation)
    figure = Figure(figsize=(4.5 * len(columns), height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1 + bool(ablation), len(columns), squeeze=False)
    for column, axes in zip(columns, grid[0], strict=True):
        _times(axes, results, column)
    if ablation:
        for column, axes in zip(columns, grid[1], strict=True):
            _changes(axes, ablation, column)
    figure.suptitle(title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        return f"no plot at {out}: {error}"
    return f"drawn: {out}"


def _times(axes: Any, results: Results, column: str) -> None:
    times = {
        row: ms
        for row, columns in results.items()
        if (ms := columns.get(column)) is not None and not row.startswith("without ")
    }
    colors = ["#1f77b4" if row == "compiled" else "#999999" for row in times]
    bars = axes.barh(list(times), list(times.values()), color=colors)
    axes.bar_label(bars, fmt="%.3g", padding=2)
    spread = max(times.values()) / min(times.values()) if times else 1
    axes.set(title=column, xlabel="ms", xscale="log" if spread > WIDE else "linear")
    axes.margins(x=0.2)
    axes.invert_yaxis()


def _changes(axes: Any, ablation: Sequence[Mapping[str, Any]], column: str) -> None:
    entries = [entry[column] for entry in ablation]
    change = [100 * (1 / e["speedup"] - 1) for e in entries]
    low = [c - 100 * (1 / e["high"] - 1) for c, e in zip(change, entries, strict=True)]
    high = [100 * (1 / e["low"] - 1) - c for c, e in zip(change, entries, strict=True)]
    names = [entry["pass"] for entry in ablation]
    axes.barh(names, change, xerr=(low, high), color="#d62728", ecolor="#444444", capsize=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(title=f"{column} without a pass", xlabel="% longer")
    axes.invert_yaxis()
