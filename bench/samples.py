"""Samples of measurements, their medians and spreads, and the clocks that take them.

samples = Samples()
samples.add("eager", "decode_ms@1", 1.5)
samples.results, samples.spread
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch

Results = dict[str, dict[str, float | None]]


class Samples:
    """Measurements by row and column, of which medians and spreads are the results."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, list[float]]] = {}
        self._exact: dict[str, dict[str, float | None]] = {}

    def add(self, row: str, column: str, value: float) -> None:
        """One more measurement."""
        self._samples.setdefault(row, {}).setdefault(column, []).append(value)

    def set(self, row: str, column: str, value: float | None, *, exact: bool = False) -> None:
        """A number without repetitions; exact: it would be the same in every run."""
        self._exact.setdefault(row, {})[column] = value
        if not exact and value is not None:
            self._samples.setdefault(row, {})[column] = [value]

    def replace(self, row: str, column: str, values: Sequence[float]) -> None:
        """All measurements of a number at once."""
        self._samples.setdefault(row, {})[column] = list(values)

    def of(self, row: str, column: str) -> list[float]:
        """The measurements so far, in their order."""
        return self._samples[row][column]

    @property
    def results(self) -> Results:
        """The medians."""
        medians: Results = {row: dict(columns) for row, columns in self._exact.items()}
        for row, columns in self._samples.items():
            for column, samples in columns.items():
                medians.setdefault(row, {})[column] = statistics.median(samples)
        return medians

    @property
    def spread(self) -> Results:
        """Relative spreads: 0 of exact numbers, None of one sample."""
        spreads: Results = {
            row: dict.fromkeys(columns, 0.0) for row, columns in self._exact.items()
        }
        for row, columns in self._samples.items():
            for column, samples in columns.items():
                spreads.setdefault(row, {})[column] = spread_of(samples)
        return spreads


def spread_of(samples: Sequence[float]) -> float | None:
    """Distance of the quartiles relative to the median; below 4 samples of the extremes; None of
    one."""
    median = statistics.median(samples)
    if len(samples) < 2 or median == 0:
        return None
    if len(samples) < 4:
        return (max(samples) - min(samples)) / abs(median)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / abs(median)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics between which the median of what was sampled lies.

    By the sign test, so for any distribution; of fewer than 6 samples no interval reaches 95 %, and
    it is their extremes.
    """
    ordered, count = sorted(samples), len(samples)
    below = 0.0  # probability that fewer than `cut` samples lie on one side of the median
    cut = 0
    while cut < (count - 1) // 2:
        below += math.comb(count, cut) / 2**count
        if 2 * below > 1 - confidence:
            break
        cut += 1
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[count - 1 - cut]


def percentile(samples: Sequence[float], share: float) -> float:
    """Linear between the two nearest samples, as numpy's."""
    ordered = sorted(samples)
    at = (len(ordered) - 1) * share
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def synchronized(device: torch.device) -> float:
    """The time at which the device has done all that it was given, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def working_time(device: torch.device) -> float:
    """As `synchronized`; on a CPU with one thread that thread's own time, so that a step takes no
    longer on a busy machine, save for the caches and the memory it shares."""
    return time.thread_time() if is_thread_timed(device) else synchronized(device)


def is_thread_timed(device: torch.device) -> bool:
    """Whether `working_time` is a thread's own time."""
    return device.type == "cpu" and torch.get_num_threads() == 1
