"""What became of the requests of a load, and the field's numbers of them.

    served = Served(generations); ...; served.numbers()["median_ttft_ms"]

`workloads.py` says what each number means.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.samples import percentile
from minivllm.runtime.generation import Generation


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens it wants, and when it comes, in seconds from the start."""

    prompt: list[int]
    tokens: int
    arrival: float = 0.0


@dataclass
class Served:
    """What became of a load.

    Attributes:
        generations: its requests.
        seconds: from the start to the last token.
        steps, waited: of the engine meanwhile, and the seconds in which the host waited.
        times: of each step's end, with the requests that had a token in it.
    """

    generations: list[Generation] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    waited: float = 0.0
    queried: int = 0
    reused: int = 0
    times: list[tuple[float, list[Generation]]] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        """The field's numbers of this load."""
        outputs = [generated(g) for g in self.generations]
        prompts = sum(len(g.prompt.token_ids) for g in self.generations)
        firsts = [g.first_token for g in self.generations]
        assert None not in firsts, "a request ended without a token"
        started = list(zip(self.generations, firsts, outputs, strict=True))
        seconds = {
            "ttft": [(first or 0.0) - g.started for g, first, _ in started],
            "tpot": [(g.last_token - (first or 0.0)) / (n - 1) for g, first, n in started if n > 1],
            "itl": self._between_tokens(),
            "e2el": [g.last_token - g.started for g in self.generations],
        }
        result = {
            "duration": self.seconds,
            "request_throughput": len(self.generations) / self.seconds,
            "output_throughput": sum(outputs) / self.seconds,
            "total_token_throughput": (prompts + sum(outputs)) / self.seconds,
            "prefix_hit_rate": self.reused / max(self.queried, 1),
        } | self.of_steps()
        for name, samples in seconds.items():
            if samples:
                result |= summary(name, samples)
        return result

    def of_steps(self) -> dict[str, float]:
        """Of one step, in milliseconds."""
        return {
            "step_ms": 1e3 * self.seconds / self.steps,
            "host_wait_ms": 1e3 * self.waited / self.steps,
        }

    def _between_tokens(self) -> list[float]:
        last: dict[Generation, float] = {}
        gaps = []
        for now, generations in self.times:
            for generation in generations:
                if generation in last:
                    gaps.append(now - last[generation])
                last[generation] = now
        return gaps


def summary(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, in milliseconds, by vLLM's keys."""
    return {
        f"mean_{name}_ms": 1e3 * statistics.fmean(seconds),
        f"median_{name}_ms": 1e3 * statistics.median(seconds),
        f"p99_{name}_ms": 1e3 * percentile(seconds, 0.99),
    }


def generated(generation: Generation) -> int:
    """Tokens that a request has got."""
    requests = [c.request for c in generation.completions]
    return sum(len(r.token_ids) - r.num_prompt_tokens for r in requests)
