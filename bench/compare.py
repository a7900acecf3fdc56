"""Compares two records of one benchmark: what became faster, by more than the noise.

    python bench/compile_vs_eager.py --compare before.json after.json

A change counts if it is larger than the noise: both runs' spreads (quartiles of repetitions,
relative to the median) as of independent errors, and at least 2 % for times, since two runs on one
machine differ so much for reasons that no repetition in one run shows. A time that was taken once
is given 5 %. Counts have no noise. Two more things tell a change of the code from one of the
machine: the row `hf` runs no code of ours, so what it changed by is noise of the times of the other
rows; and ratios of rows that took turns are compared too, with the widths of their intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import UserError

LEAST = 0.02  # change of a time that is worth a word
UNKNOWN = 0.05  # spread of a time that was taken once
WORDS = {"time": ("faster", "slower"), "amount": ("less", "more"), "quality": ("better", "worse")}
# what the end of a column's name says: what it is of, and whether more of it is good
# (what only follows from other columns, such as floor_share, gets no word)
CONTROL = "hf"
ENDINGS: dict[str, tuple[str, bool]] = {
    "_ms": ("time", False),
    "_s": ("time", False),
    "duration": ("time", False),
    "throughput": ("time", True),
    "speedup": ("time", True),
    "_bytes": ("amount", False),
    "launches": ("amount", False),
    "logit_error": ("quality", False),
    "token_agreement": ("quality", True),
    "hit_rate": ("quality", True),
}


@dataclass(frozen=True)
class Change:
    """One number in both runs.

    Attributes:
        before, after: medians.
        change: relative to the one before.
        noise: what a change must exceed, relative too.
        verdict: one of `WORDS`, "same", or "" for what is neither good nor bad.
    """

    row: str
    column: str
    before: float
    after: float
    change: float
    noise: float
    verdict: str


def verdict(
    column: str,
    before: float,
    after: float,
    spreads: tuple[float | None, float | None],
    drift: float = 0.0,
) -> tuple[float, float, str]:
    """Relative change, noise and word for one number in two runs.

    Args:
        spreads: relative, of both; None: it was taken once.
        drift: relative change of the same number where only the machine can have changed it.
    """
    kind, more_is_good = _meaning(column)
    change = 0.0 if before == after else math.inf if before == 0 else (after - before) / abs(before)
    unknown = UNKNOWN if kind in ("time", "amount") else 0.0
    noise = math.hypot(*(unknown if s is None else s for s in spreads))
    if kind == "time":
        noise = max(math.hypot(noise, drift), LEAST)
    if kind == "":
        return change, noise, ""
    if abs(change) <= noise:
        return change, noise, "same"
    good, bad = WORDS[kind]
    return change, noise, good if (change > 0) == more_is_good else bad


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every number that both records hold.

    Raises:
        UserError: they are of different benchmarks, models, machines or workloads.
    """
    differing = [
        f"{name}: {a} and {b}"
        for name, (a, b) in _pairs(before["settings"], after["settings"]).items()
        if a != b
    ]
    if differing:
        raise UserError("the two runs cannot be compared; they differ in " + "; ".join(differing))
    same_packages = before["environment"].get("versions") == after["environment"].get("versions")
    changes = []
    for row, columns in before["results"].items():
        for column, a in columns.items():
            b = after["results"].get(row, {}).get(column)
            if a is None or b is None:
                continue
            spreads = before["spread"][row][column], after["spread"][row][column]
            drift = _drift(before, after, column) if same_packages and row != CONTROL else 0.0
            changes.append(Change(row, column, a, b, *verdict(column, a, b, spreads, drift)))
    changes += _speedups(before, after)
    if not changes:
        rows = [", ".join(record["results"]) or "none" for record in (before, after)]
        raise UserError(f"the two runs share no row; they have {rows[0]} and {rows[1]}")
    return changes


def compare_files(paths: Sequence[Path]) -> None:
    """Print the comparison of two files: a table, what only one has, a line of JSON.

    Raises:
        UserError: a file is missing or no record, or the runs cannot be compared.
    """
    before, after = (_read(path) for path in paths)
    changes = compare(before, after)
    for name in ("git_sha", "versions", "python"):
        a, b = (record["environment"].get(name) for record in (before, after))
        if a != b:
            print(f"{name}: {a} before, {b} after")
    print("| row | column | before | after | change | noise | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for c in changes:
        numbers = f"{c.before:,.4g} | {c.after:,.4g} | {100 * c.change:+.1f} %"
        print(f"| {c.row} | {c.column} | {numbers} | {100 * c.noise:.1f} % | {c.verdict} |")
    for record, other, when in ((before, after, "before"), (after, before, "after")):
        alone = [row for row in record["results"] if row not in other["results"]]
        if alone:
            print(f"only {when}: {', '.join(alone)}")
    told = [asdict(c) for c in changes if c.verdict not in ("", "same")]
    same = sum(c.verdict == "same" for c in changes)
    summary = {"benchmark": before["benchmark"], "same": same, "changes": told}
    print(json.dumps(summary), flush=True)


def _drift(before: Mapping[str, Any], after: Mapping[str, Any], column: str) -> float:
    """What the control row changed by; 0 where there is none."""
    a, b = (record["results"].get(CONTROL, {}).get(column) for record in (before, after))
    return abs(b - a) / a if a and b else 0.0


def _speedups(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Of the pairs of rows that both records hold; an interval's width is a spread."""

    def by_name(record: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
        return {
            (f"{p['fast']} against {p['slow']}", f"{p['column']} speedup"): (
                p["speedup"],
                (p["high"] - p["low"]) / p["speedup"],
            )
            for p in record.get("pairs", [])
        }

    changes, others = [], by_name(after)
    for (row, column), (a, spread_a) in by_name(before).items():
        if (row, column) in others:
            b, spread_b = others[row, column]
            judged = verdict("speedup", a, b, (spread_a, spread_b))
            changes.append(Change(row, column, a, b, *judged))
    return changes


def _meaning(column: str) -> tuple[str, bool]:
    name = column.partition("@")[0]
    return next((m for ending, m in ENDINGS.items() if name.endswith(ending)), ("", False))


def _pairs(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Both values of every leaf, by its dotted name."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in [*a, *(n for n in b if n not in a)]:
        in_a, in_b = a.get(name), b.get(name)
        if isinstance(in_a, Mapping) and isinstance(in_b, Mapping):
            pairs |= _pairs(in_a, in_b, f"{prefix}{name}.")
        else:
            pairs[prefix + name] = in_a, in_b
    return pairs


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: no JSON: {error}") from None
    parts = ("environment", "benchmark", "settings", "results", "spread")
    missing = [name for name in parts if not isinstance(record, dict) or name not in record]
    if missing:
        raise UserError(
            f"{path}: no record of these benchmarks; it lacks {', '.join(missing)} "
            "(bench.out=FILE writes one)"
        )
    return record
