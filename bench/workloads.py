"""Loads on an engine, and the field's numbers of them.

Owns what requests come and what is measured; `latency.py` and `throughput.py` choose among them.
All go through `llm.queue_request` and `engine.step()`: greedy unless asked otherwise, prompts of
token ids that are random and never repeated (save in `prefix`), no end of text before the asked
length.

| workload | requests | |
|---|---|---|
| decode | a batch size each: prompts of 128 tokens, 256 out | once all have their first token |
| ttft | one alone: prompts of `bench.prompts` tokens, 1 out | |
| prefix | one alone: 3,072 tokens and 128 more, cold, then with the 3,072 seen before | |
| prefill | 32 prompts of 2,048 tokens at once, 1 out | |
| nano_vllm | nano-vllm's: 256 at once, 100 to 1,024 tokens in and out, seed 0 | |
| random | `bench.num_prompts` of `bench.input_len` in and `bench.output_len` out | |

Numbers, in vLLM's names: `mean_`, `median_` and `p99_` of `ttft_ms` (from a request's arrival to
its first token), `tpot_ms` (of one request, the time behind its first token over the tokens after
it), `itl_ms` (between two tokens of a request) and `e2el_ms` (to its last token);
`request_throughput`, `output_throughput` and `total_token_throughput` (prompts too) a second;
`duration` in seconds. Beside them `step_ms`, of a step; `host_wait_ms`, of that the time in which
the host waits for the device (the rest is its own work); `prompt_throughput`; `prefix_hit_rate`, of
the prompt tokens those that were not computed again. A token counts when the host has it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.common import BenchOptions
from bench.samples import Samples
from bench.served import Request, Served, generated, summary
from minivllm import LLM, SamplingParams
from minivllm.config import option
from minivllm.errors import UserError
from minivllm.runtime.generation import Generation

LATENCY = ("decode", "ttft", "prefix")
THROUGHPUT = ("prefill", "nano_vllm", "random")
BATCHES = (1, 8, 32, 128, 256)
PROMPTS = (512, 2048, 3800)
NANO_VLLM = (256, 100, 1024, 10000)  # requests, fewest and most tokens, ids below which


@dataclass(frozen=True)
class ServingOptions(BenchOptions):
    """Options of `latency.py` and `throughput.py`.

    Attributes:
        workloads: what runs; empty: the script's own.
        scale: of all lengths and numbers of requests.
        rounds: how often a load is run, after once to warm up.
        repeats: how often a lone request is.
        batches: of decode.
        prompts: lengths for ttft.
        num_prompts, input_len, output_len, range_ratio: of random; lengths are drawn from
            len * (1 - ratio) to len * (1 + ratio).
        request_rate: of random: arrivals a second, Poisson; None: all at once.
        temperature: of nano_vllm and random.
    """

    workloads: tuple[str, ...] = option(())
    scale: float = option(1.0, above=0)
    rounds: int = option(3, at_least=1)
    repeats: int = option(7, at_least=1)
    batches: tuple[int, ...] = option(BATCHES, at_least=1)
    prompts: tuple[int, ...] = option(PROMPTS, at_least=1)
    num_prompts: int = option(256, at_least=1)
    input_len: int = option(1024, at_least=1)
    output_len: int = option(128, at_least=1)
    range_ratio: float = option(0.0, at_least=0, at_most=1)
    request_rate: float | None = option(None, above=0)
    temperature: float = option(0.0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.workloads:
            if name not in LATENCY + THROUGHPUT:
                raise UserError(
                    f"bench.workloads: no workload {name!r}; choose from "
                    + ", ".join(LATENCY + THROUGHPUT)
                )


def nano_vllm_requests(vocabulary: int, scale: float = 1.0) -> list[Request]:
    """nano-vllm's workload, number for number: 133,966 tokens out at a scale of 1.

    Args:
        vocabulary: ids from there on do not exist; nano-vllm draws below 10,000.
    """
    number, low, high, ids = NANO_VLLM
    drawn = random.Random(0)
    prompts = [
        [drawn.randint(0, ids) % vocabulary for _ in range(drawn.randint(low, high))]
        for _ in range(number)
    ]
    outputs = [drawn.randint(low, high) for _ in range(number)]
    kept = max(1, round(number * scale))
    return [
        Request(prompt[: scaled(len(prompt), scale)], scaled(tokens, scale))
        for prompt, tokens in zip(prompts[:kept], outputs, strict=False)
    ]


def scaled(number: int, scale: float) -> int:
    """A length or number of requests at a scale; at least 1."""
    return max(1, round(number * scale))


class Load:
    """Runs workloads on an engine and collects their numbers.

    Args:
        llm: that nobody else asks.
    """

    def __init__(self, llm: LLM, options: ServingOptions, samples: Samples) -> None:
        self.llm, self.engine = llm, llm.engine
        self.options, self.samples = options, samples
        self.random = random.Random(options.seed)

    def run(self, name: str) -> None:
        """One workload, warmed up."""
        getattr(self, f"_{name}")()

    def serve(self, requests: Sequence[Request], temperature: float = 0.0) -> Served:
        """Run requests to their end, each from its arrival on."""
        served = Served()
        with self._counted(served):
            start = time.perf_counter()
            coming = sorted(requests, key=lambda r: r.arrival)
            at = 0
            while at < len(coming) or self.engine.has_unfinished:
                now = time.perf_counter() - start
                while at < len(coming) and coming[at].arrival <= now:
                    served.generations.append(self._add(coming[at], temperature))
                    at += 1
                if self.engine.has_unfinished:
                    self._step(served)
                else:
                    time.sleep(max(0.0, coming[at].arrival - now))
        return served

    @contextmanager
    def _counted(self, served: Served) -> Iterator[None]:
        """What the engine does in a block, for `Served`."""

        def now() -> tuple[float, int, float, int, int]:
            metrics, stats = self.engine.metrics, self.engine.scheduler.stats
            prefix = stats.queried_tokens, stats.reused_tokens
            return (time.perf_counter(), metrics.steps, metrics.waited, *prefix)

        before = now()
        yield
        differences = (after - b for after, b in zip(now(), before, strict=True))
        served.seconds, steps, served.waited, queried, reused = differences
        served.steps, served.queried, served.reused = int(steps), int(queried), int(reused)

    def _add(self, request: Request, temperature: float = 0.0) -> Generation:
        params = SamplingParams(temperature=temperature, max_tokens=request.tokens, ignore_eos=True)
        start = time.perf_counter()
        generation = self.llm.queue_request(request.prompt, params, None)
        generation.started = start  # before its prompt was checked
        return generation

    def _step(self, served: Served) -> None:
        generations = self.engine.step()
        served.times.append((time.perf_counter(), generations))

    def prompt(self, length: int) -> list[int]:
        """Random token ids."""
        return [self.random.randrange(self.engine.vocab_limit) for _ in range(length)]

    def _sized(self, number: int) -> int:
        return scaled(number, self.options.scale)

    def _record(self, row: str, numbers: dict[str, float]) -> None:
        for column, value in numbers.items():
            self.samples.add(row, column, value)

    def _first_tokens(self, row: str, seconds: Sequence[float]) -> None:
        """A summary whose median has the spread of all."""
        for name, value in summary("ttft", seconds).items():
            self.samples.set(row, name, value)
        self.samples.replace(row, "median_ttft_ms", [1e3 * s for s in seconds])

    def _decode(self) -> None:
        """Tokens a second once all requests of a batch have their first token."""
        for batch in self.options.batches:
            for turn in range(self.options.rounds + 1):
                length, tokens = self._sized(128), max(2, self._sized(256))
                requests = [self._add(Request(self.prompt(length), tokens)) for _ in range(batch)]
                while any(r.first_token is None for r in requests):
                    self.engine.step()
                before = sum(map(generated, requests))
                served = Served(requests)
                with self._counted(served):
                    while self.engine.has_unfinished:
                        self._step(served)
                if turn:
                    after = sum(map(generated, requests))
                    numbers = served.numbers()
                    kept = ("itl", "tpot", "step", "host_wait", "prefix_hit_rate")
                    self._record(
                        f"decode@{batch}",
                        {c: v for c, v in numbers.items() if any(k in c for k in kept)}
                        | {"output_throughput": (after - before) / served.seconds},
                    )

    def _ttft(self) -> None:
        """Time to the first token of a lone request."""
        for length in self.options.prompts:
            times = []
            for turn in range(self.options.repeats + 1):
                prompt = self.prompt(self._sized(length))
                served = self.serve([Request(prompt, 1)])
                if turn:
                    times.append(self._first(served))
            self._first_tokens(f"ttft@{length}", times)

    def _prefix(self) -> None:
        """A prefix that was not seen, and one that was: times to the first token."""
        long, short = self._sized(3072), self._sized(128)
        cold: list[float] = []
        hit: list[float] = []
        for turn in range(self.options.repeats + 1):
            shared = self.prompt(long)
            first = self.serve([Request(shared + self.prompt(short), 1)])
            self.serve([Request(shared + self.prompt(short), 1)])  # leaves the shared part's end
            second = self.serve([Request(shared + self.prompt(short), 1)])
            if turn:
                for row, served, times in (("cold", first, cold), ("hit", second, hit)):
                    times.append(self._first(served))
                    rate = served.reused / max(served.queried, 1)
                    self.samples.add(f"prefix_{row}", "prefix_hit_rate", rate)
        self._first_tokens("prefix_cold", cold)
        self._first_tokens("prefix_hit", hit)

    def _prefill(self) -> None:
        """Prompts alone: prompt tokens a second."""
        for turn in range(self.options.rounds + 1):
            length = self._sized(2048)
            served = self.serve([Request(self.prompt(length), 1) for _ in range(self._sized(32))])
            if turn:
                tokens = length * len(served.generations)
                self._record(
                    "prefill", served.numbers() | {"prompt_throughput": tokens / served.seconds}
                )

    def _nano_vllm(self) -> None:
        """The same lengths in every round, with other ids, so that nothing is found cached."""
        for turn in range(self.options.rounds + 1):
            requests = nano_vllm_requests(self.engine.vocab_limit, self.options.scale)
            if turn:  # the warm-up is nano-vllm's to the id
                requests = [Request(self.prompt(len(r.prompt)), r.tokens) for r in requests]
            served = self.serve(requests, self.options.temperature)
            if turn:
                self._record("nano_vllm", served.numbers())

    def _random(self) -> None:
        """Lengths around a mean, all at once or as they come."""
        o = self.options
        for turn in range(o.rounds + 1):
            requests, arrival = [], 0.0
            for _ in range(self._sized(o.num_prompts)):
                if o.request_rate is not None:
                    arrival += self.random.expovariate(o.request_rate)
                prompt = self.prompt(self._length(o.input_len))
                requests.append(Request(prompt, self._length(o.output_len), arrival))
            served = self.serve(requests, o.temperature)
            if turn:
                self._record("random", served.numbers())

    def _length(self, mean: int) -> int:
        spread = self.options.range_ratio * mean
        low, high = self._sized(round(mean - spread)), self._sized(round(mean + spread))
        return self.random.randint(low, high)

    @staticmethod
    def _first(served: Served) -> float:
        (generation,) = served.generations
        assert generation.first_token is not None
        return generation.first_token - generation.started
