"""How fast the engine serves: decode, time to first token, prefill, a mixed load, a prefix hit.

    python bench/serving.py --out bench/results/serving.json       # the 0.8B, random weights, a GPU
    python bench/serving.py --model tiny --scale 0.05 --max-model-len 2048    # on any machine

Every number is the engine's own, through `engine.step()` with greedy sampling, token ids as
prompts and no end of text before the asked length; prompts are random and never repeated, so that
nothing but the prefix workload finds anything cached. A step's tokens count when the host has
them. Workloads (scaled down by `--scale`):

- decode, a batch size each: prompts of 128 tokens, 256 tokens out; tokens per second once all
  requests have their first token.
- time to first token of a lone request: prompts of 512, 2,048 and 3,800 tokens; median of 7.
- prefill: 32 prompts of 2,048 tokens, 1 token out; prompt tokens per second.
- mixed: 256 requests of 100 to 1,024 tokens in and out, all there at once; output tokens a second.
- prefix: 3,072 tokens that were seen and 128 new ones; time to first token, cold and hit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.environment import environment, process_age
from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.presets import model_preset
from minivllm.runtime.generation import Generation
from minivllm.runtime.inputs import Prompt

BATCHES = (1, 8, 32, 128, 256)
PROMPTS = (512, 2048, 3800)
REPEATS = 7


class Load:
    """Requests for an engine, and the time that they take.

    Args:
        llm: that nobody else asks.
        scale: of all lengths and numbers of requests.
    """

    def __init__(self, llm: LLM, scale: float) -> None:
        self.engine = llm.engine
        self.scale = scale
        self.random = random.Random(0)

    def sized(self, number: int) -> int:
        return max(1, round(number * self.scale))

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.engine.vocab_limit) for _ in range(length)]

    def add(self, prompt: list[int], tokens: int) -> Generation:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return self.engine.add_request(Prompt(prompt), params)

    def run(self) -> float:
        """Step to the end of all requests; seconds."""
        start = time.perf_counter()
        while self.engine.has_unfinished:
            self.engine.step()
        return time.perf_counter() - start

    def decode(self, batch: int) -> dict[str, float]:
        """Tokens a second, milliseconds a step, and how many of these the host waits."""
        requests = [self.add(self.prompt(self.sized(128)), self.sized(256)) for _ in range(batch)]
        while any(r.first_token is None for r in requests):
            self.engine.step()
        before = sum(_generated(r) for r in requests)
        metrics = self.engine.metrics
        steps, waited = metrics.steps, metrics.waited
        seconds = self.run()
        tokens = sum(_generated(r) for r in requests) - before
        steps, waited = metrics.steps - steps, metrics.waited - waited
        return {
            "tokens_per_second": tokens / seconds,
            "ms_per_step": 1e3 * seconds / steps,
            "ms_host_waits": 1e3 * waited / steps,
        }

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds from the request to its first token."""
        request = self.add(prompt, 1)
        self.run()
        assert request.first_token is not None
        return 1e3 * (request.first_token - request.started)

    def first_tokens(self, length: int) -> float:
        """The median of several prompts of a length."""
        return statistics.median(
            self.first_token(self.prompt(self.sized(length))) for _ in range(REPEATS)
        )

    def prefill(self) -> float:
        """Prompt tokens a second."""
        lengths = [self.sized(2048)] * self.sized(32)
        for length in lengths:
            self.add(self.prompt(length), 1)
        return sum(lengths) / self.run()

    def mixed(self) -> dict[str, float]:
        """Output tokens a second of requests of many lengths."""
        low, high = self.sized(100), self.sized(1024)
        sizes = [
            (self.random.randint(low, high), self.random.randint(low, high))
            for _ in range(self.sized(256))
        ]
        for prompt, tokens in sizes:
            self.add(self.prompt(prompt), tokens)
        out = sum(tokens for _, tokens in sizes)
        seconds = self.run()
        return {"tokens_out": out, "seconds": seconds, "tokens_per_second": out / seconds}

    def prefix(self) -> dict[str, float]:
        """Milliseconds to the first token behind a prefix, cold and from the cache."""
        cold, hit = [], []
        for _ in range(REPEATS):
            shared = self.prompt(self.sized(3072))
            cold.append(self.first_token(shared + self.prompt(self.sized(128))))
            self.first_token(shared + self.prompt(self.sized(128)))  # leaves the shared part's end
            reused = self.engine.scheduler.stats.reused_tokens
            hit.append(self.first_token(shared + self.prompt(self.sized(128))))
            reused = self.engine.scheduler.stats.reused_tokens - reused
        return {
            "cold_ms": statistics.median(cold),
            "hit_ms": statistics.median(hit),
            "reused_tokens": reused,
        }


def _generated(request: Generation) -> int:
    return sum(len(c.request.token_ids) - c.request.num_prompt_tokens for c in request.completions)


def measure(llm: LLM, scale: float, batches: tuple[int, ...]) -> dict[str, Any]:
    """All workloads, each after a short run of its own kind."""
    load = Load(llm, scale)
    result: dict[str, Any] = {"decode": {}, "time_to_first_token_ms": {}}
    for batch in batches:
        load.decode(batch)
        result["decode"][batch] = load.decode(batch)
        print(f"decode, batch {batch}: {_shown(result['decode'][batch])}", flush=True)
    for length in PROMPTS:
        load.first_token(load.prompt(load.sized(length)))
        result["time_to_first_token_ms"][length] = load.first_tokens(length)
        shown = result["time_to_first_token_ms"][length]
        print(f"first token, prompt of {load.sized(length)}: {shown:.2f} ms", flush=True)
    load.prefill()
    result["prefill_tokens_per_second"] = load.prefill()
    print(f"prefill: {result['prefill_tokens_per_second']:,.0f} tok/s", flush=True)
    for name in ("prefix", "mixed"):
        result[name] = getattr(load, name)()
        print(f"{name}: {_shown(result[name])}", flush=True)
    result["metrics"] = llm.metrics
    return result


def _shown(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in numbers.items())


def main() -> None:
    """Build the engine, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="miniqwen08b", help="a file of conf/model")
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths and request numbers")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--state-dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--git-sha", help="of the code that runs, where git cannot say")
    options = parser.parse_args()
    model = dataclasses.replace(model_preset(options.model), skip_tokenizer_init=True)
    if model.architecture is not None:
        model = dataclasses.replace(model, load_format="dummy")
    runtime = RuntimeOptions(max_model_len=options.max_model_len, state_dtype=options.state_dtype)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    llm = LLM.from_config(EngineConfig(model, runtime=runtime))
    ready = process_age()
    first = Load(llm, options.scale).first_token([1, 2, 3])
    print(f"ready after {ready:.1f} s, first token after {first:.1f} ms more", flush=True)
    record = {
        "environment": environment(options.git_sha),
        "model": options.model,
        "scale": options.scale,
        "ready_seconds": ready,
        **measure(llm, options.scale, tuple(options.batches)),
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
