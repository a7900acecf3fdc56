"""What an engine has done and is doing, as numbers.

Owns the counters and the summaries of times. Does not own what is counted.

    engine.metrics.snapshot()["time_to_first_token"]["p50"]
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from minivllm.runtime.generation import Generation
from minivllm.runtime.scheduler import Scheduler
from minivllm.runtime.step import Step

KEPT = 4096  # latest times that a summary is made of


class EngineMetrics:
    """Counts since the engine was built; times in seconds.

    Attributes:
        steps: run so far.
        prompt_tokens: that prefills computed, recomputed ones among them.
        generated_tokens: handed out.
        finished, aborted, failed: requests that ended so; failed: by NaN in
            their logits, or in a step that broke off.
        waited: seconds that the host waited for the device's tokens; what is left of a step's time
            is the host's own.
        preemptions: sequences that had to give their memory up and start again.
    """

    def __init__(self, scheduler: Scheduler, snapshot_bytes: int = 0) -> None:
        self._scheduler = scheduler
        self._snapshot_bytes = snapshot_bytes
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self.finished = self.aborted = self.failed = self.preemptions = 0
        self.waited = 0.0
        self._first_token: deque[float] = deque(maxlen=KEPT)
        self._between_tokens: deque[float] = deque(maxlen=KEPT)

    def step(self, step: Step) -> None:
        """Count a step that ran."""
        self.steps += 1
        self.prompt_tokens += sum(chunk.end - chunk.start for chunk in step.prefill)
        self.preemptions += len(step.preempted)

    def tokens(self, generations: Iterable[Generation], count: int) -> None:
        """Count a step's tokens and what they ended."""
        self.generated_tokens += count
        for generation in generations:
            first, between = generation.latest_times
            if between is None:
                self._first_token.append(first)
            else:
                self._between_tokens.append(between)
            if generation.finished:
                failed = any(c.finish_reason == "error" for c in generation.completions)
                self.failed += failed
                self.finished += not failed

    def snapshot(self) -> dict[str, Any]:
        """All numbers as plain values, for printing or JSON."""
        scheduler = self._scheduler
        held = scheduler.cache.snapshots.num_published
        blocks, slots = scheduler.blocks, scheduler.slots
        counts = ("steps", "prompt_tokens", "generated_tokens", "finished", "aborted", "failed",
                  "preemptions")  # fmt: skip
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "kv_blocks_used": blocks.num_used,
            "kv_blocks": blocks.num_blocks - 1,
            "slots_used": slots.num_slots - 1 - slots.num_free,
            "slots": slots.num_slots - 1,
            **{name: getattr(self, name) for name in counts},
            "waited": self.waited,
            "prefix_cache": asdict(scheduler.stats)
            | {"snapshots": held, "snapshot_bytes": held * self._snapshot_bytes},
            "time_to_first_token": _summary(self._first_token),
            "time_between_tokens": _summary(self._between_tokens),
        }


def _summary(times: Sequence[float] | deque[float]) -> dict[str, float]:
    """Count, mean, median, 99th percentile and largest of the latest times."""
    if not times:
        return {"count": 0}
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "mean": statistics.fmean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "max": ordered[-1],
    }
