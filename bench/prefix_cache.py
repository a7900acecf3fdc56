"""What the prefix cache saves: times to the first token, hit rates, bytes a cached token takes.

    python bench/prefix_cache.py --out bench/results/prefix_cache.json
    python bench/prefix_cache.py --model tiny --device cpu                 # seconds

Requests run one after the other, so that a time to the first token is that of its prefill, save
where the table says "at once". Prompts are random token ids, weights may be random: neither
changes what is computed. Four workloads, each over a cache that holds nothing at its start:

- cold: prompts that nothing is known of; and the same with the cache turned off for them.
- warm: the last of these prompts again.
- chat: turns, each of which adds a message to all that was said before.
- shared: one long prefix, each time with another ending; then as many at once, and at once without
  the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.environment import environment
from minivllm import LLM, SamplingParams
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.presets import model_preset
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.outputs import RequestOutput


@dataclass(frozen=True)
class Workload:
    """Sizes in tokens.

    Attributes:
        prefix: of the shared prompt.
        suffix: behind it, or of a message.
        output: of every answer.
        turns: of the chat.
        requests: of the cold and shared workloads.
    """

    prefix: int = 3072
    suffix: int = 128
    output: int = 16
    turns: int = 10
    requests: int = 8

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prefix + self.turns * (self.suffix + self.output)


TINY = Workload(prefix=640, suffix=64, output=8, turns=10, requests=4)


@dataclass(frozen=True)
class Request:
    """One measured request.

    Attributes:
        prompt: its tokens.
        cached: of these, taken from the cache.
        ttft_ms: from its arrival to its first token.
    """

    prompt: int
    cached: int
    ttft_ms: float

    @classmethod
    def of(cls, output: RequestOutput) -> Request:
        return cls(
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            output.metrics.time_to_first_token * 1e3,
        )


class Bench:
    """An engine and its workload."""

    def __init__(self, llm: LLM, workload: Workload, seed: int = 0) -> None:
        self.llm = llm
        self.workload = workload
        self.params = SamplingParams(temperature=0.0, max_tokens=workload.output, ignore_eos=True)
        self._generator = torch.Generator().manual_seed(seed)
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner), "the reference mode has no cache"
        self.block_bytes = runner.blocks.storage.shape[1]
        self.snapshot_bytes = runner.snapshots.storage.shape[1]

    def ids(self, length: int) -> list[int]:
        """Random tokens that no earlier call gave."""
        vocabulary = self.llm.engine.vocab_limit
        return torch.randint(vocabulary, (length,), generator=self._generator).tolist()

    def ask(self, ids: Sequence[int], cache: bool = True) -> RequestOutput:
        (output,) = self.llm.generate(
            {"prompt_token_ids": list(ids), "prefix_cache": cache}, self.params
        )
        return output

    def at_once(self, prompts: Sequence[Sequence[int]], cache: bool) -> dict[str, Any]:
        """Seconds and prefilled tokens of prompts that arrive together."""
        before, start = self.llm.metrics, time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p), "prefix_cache": cache} for p in prompts],
            self.params,
            use_tqdm=False,
        )
        seconds = time.perf_counter() - start
        computed = self.llm.metrics["prompt_tokens"] - before["prompt_tokens"]
        return {
            "requests": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "computed_tokens": computed,
            "cached_tokens": sum(o.num_cached_tokens for o in outputs),
            "seconds": seconds,
        }

    @contextmanager
    def fresh(self) -> Iterator[dict[str, Any]]:
        """A workload over an empty cache; its record gets the statistics of its end."""
        self.llm.reset_prefix_cache()
        before = self.llm.metrics["prefix_cache"]
        record: dict[str, Any] = {}
        yield record
        after = self.llm.metrics["prefix_cache"]
        stats = {name: after[name] - before[name] for name in after}
        record["stats"] = stats
        queried = max(stats["queried_tokens"], 1)
        record["hit_rate"] = stats["reused_tokens"] / queried
        record["kv_match_rate"] = stats["kv_matched_tokens"] / queried
        record["bytes"] = self.bytes_held()

    def bytes_held(self) -> dict[str, Any]:
        """What the cache holds now, in bytes, also for each token whose K/V is there."""
        scheduler = self.llm.engine.scheduler
        tokens = scheduler.blocks.num_cached * BLOCK_SIZE
        kv = scheduler.blocks.num_cached * self.block_bytes
        snapshots = scheduler.cache.snapshots.num_published
        return {
            "cached_tokens": tokens,
            "snapshots": snapshots,
            "kv_bytes": kv,
            "snapshot_bytes": snapshots * self.snapshot_bytes,
            "kv_bytes_per_token": kv / max(tokens, 1),
            "snapshot_bytes_per_token": snapshots * self.snapshot_bytes / max(tokens, 1),
        }

    def cold_and_warm(self) -> tuple[dict[str, Any], dict[str, Any]]:
        w = self.workload
        prompts = [self.ids(w.prefix + w.suffix) for _ in range(w.requests)]
        uncached = [asdict(Request.of(self.ask(p, cache=False))) for p in prompts]
        with self.fresh() as cold:
            cold["uncached"] = uncached
            cold["requests"] = [asdict(Request.of(self.ask(p))) for p in prompts]
        with self.fresh() as warm:
            self.ask(prompts[-1])
            warm["requests"] = [
                asdict(Request.of(self.ask(prompts[-1]))) for _ in range(w.requests)
            ]
        return cold, warm

    def chat(self) -> dict[str, Any]:
        w = self.workload
        with self.fresh() as record:
            said, turns, uncached = self.ids(w.prefix), [], []
            for _ in range(w.turns):
                said = said + self.ids(w.suffix)
                uncached.append(asdict(Request.of(self.ask(said, cache=False))))
                output = self.ask(said)
                turns.append(asdict(Request.of(output)))
                said = said + output.outputs[0].token_ids
            record["requests"], record["uncached"] = turns, uncached
        return record

    def shared(self) -> dict[str, Any]:
        w = self.workload
        prefix = self.ids(w.prefix)
        with self.fresh() as record:
            record["requests"] = [
                asdict(Request.of(self.ask(prefix + self.ids(w.suffix)))) for _ in range(w.requests)
            ]
            record["at_once"] = self.at_once(
                [prefix + self.ids(w.suffix) for _ in range(w.requests)], cache=True
            )
            record["at_once_uncached"] = self.at_once(
                [prefix + self.ids(w.suffix) for _ in range(w.requests)], cache=False
            )
        return record

    def run(self) -> dict[str, Any]:
        """Every workload's record, by name."""
        self.ask(self.ids(self.workload.prefix + self.workload.suffix), cache=False)  # first run
        cold, warm = self.cold_and_warm()
        return {"cold": cold, "warm": warm, "chat": self.chat(), "shared": self.shared()}


def table(records: dict[str, Any]) -> str:
    """The records in short."""

    def line(name: str, requests: Sequence[dict[str, Any]]) -> str:
        times = [r["ttft_ms"] for r in requests]
        prompt = statistics.median(r["prompt"] for r in requests)
        cached = statistics.median(r["cached"] for r in requests)
        return (
            f"{name:22} {len(requests):>3} {prompt:>8.0f} {cached:>8.0f} "
            f"{statistics.median(times):>9.2f} {min(times):>9.2f} {max(times):>9.2f}"
        )

    cold, warm, chat, shared = (records[n] for n in ("cold", "warm", "chat", "shared"))
    lines = [
        f"{'':22} {'n':>3} {'prompt':>8} {'cached':>8} {'TTFT ms':>9} {'least':>9} {'most':>9}",
        line("cold, cache off", cold["uncached"]),
        line("cold", cold["requests"]),
        line("warm", warm["requests"]),
    ]
    for number, (turn, plain) in enumerate(
        zip(chat["requests"], chat["uncached"], strict=True), start=1
    ):
        lines.append(line(f"chat {number}", [turn]) + f"   off: {plain['ttft_ms']:.2f}")
    first, second, *rest = shared["requests"]
    lines += [line("shared, first", [first]), line("shared, second", [second])]
    lines += [line("shared, later", rest)] if rest else []
    for name, key in (("at once", "at_once"), ("at once, cache off", "at_once_uncached")):
        r = shared[key]
        lines.append(
            f"{name:22} {r['requests']:>3} {r['prompt_tokens']:>8} {r['cached_tokens']:>8} "
            f"{r['seconds'] * 1e3:>9.2f} ms for all, {r['computed_tokens']} tokens computed"
        )
    for name, record in records.items():
        held = record["bytes"]
        lines += [
            f"{name}: hit rate {record['hit_rate']:.3f}, K/V alone {record['kv_match_rate']:.3f}; "
            f"{held['cached_tokens']} tokens and {held['snapshots']} snapshots cached;",
            f"    a cached token takes {held['kv_bytes_per_token']:.0f} B of K/V and "
            f"{held['snapshot_bytes_per_token']:.0f} B of snapshots",
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="miniqwen08b", help="a file of conf/model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    for field in ("prefix", "suffix", "output", "turns", "requests"):
        parser.add_argument(f"--{field}", type=int, help="of the workload; see its defaults")
    parser.add_argument("--snapshot-interval", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--git-sha", help="of the code that runs, where git cannot say")
    options = parser.parse_args(arguments)
    defaults = asdict(TINY if options.model == "tiny" else Workload())
    asked = {name: getattr(options, name) for name in defaults}
    workload = Workload(**{n: defaults[n] if v is None else v for n, v in asked.items()})
    if workload.requests < 2:
        raise SystemExit("--requests: at least 2, of which the second finds what the first left")
    llm = LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        load_format="dummy" if model_preset(options.model).architecture else "auto",
        skip_tokenizer_init=True,
        max_model_len=workload.longest,
        max_num_seqs=max(workload.requests, 8),
        snapshot_interval=options.snapshot_interval,
    )
    bench = Bench(llm, workload)
    records = bench.run()
    record = {
        "environment": environment(options.git_sha),
        "model": options.model,
        "device": str(llm.device),
        "dtype": str(llm.dtype),
        "implementations": llm.implementations,
        "workload": asdict(workload),
        "snapshot_interval": options.snapshot_interval,
        "block_bytes": bench.block_bytes,
        "snapshot_bytes": bench.snapshot_bytes,
        "pools": asdict(llm.engine.plan.sizes),
        **records,
    }
    llm.close()
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
