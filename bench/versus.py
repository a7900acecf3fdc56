"""The measuring of `compile_vs_eager.py`: rows built, checked, timed in turns, ablated, started.

Owns the options and the samples. Does not own how a row runs (`contenders.py`) nor what is printed.

    bench = Bench(run); bench.build(); bench.check(); bench.time(bench.rows, bench.samples, 9)
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import BenchOptions, Run
from bench.contenders import (
    CUDA_ONLY,
    ROWS,
    Contender,
    GraphContender,
    Lengths,
    ablated,
    build,
    optional_passes,
)
from bench.memory import bandwidth, count_kernels, peak_bytes
from bench.model import Model
from bench.samples import Samples, median_interval, synchronized, working_time
from minivllm.config import option
from minivllm.errors import UserError

SCRIPT = Path(__file__).resolve().with_name("compile_vs_eager.py")
SAMPLE_SECONDS = 0.05  # of decode steps in one sample, where `bench.steps` allows
ABLATION_ROUNDS = 7
CPU_BATCHES, CUDA_BATCHES = (1, 8), (1, 8, 32, 128)
# what a start compiles is kept in these; a cold start finds them empty
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(frozen=True)
class Options(BenchOptions):
    """Options of this benchmark.

    Attributes:
        rows: of `ROWS`; empty: all that this device has, but on a CPU not torch_compile, which
            compiles for a minute there.
        batches: ascending; empty: 1 and 8 on a CPU, 1, 8, 32 and 128 on CUDA.
        prefill: tokens; None: 128 on a CPU, 512 on CUDA.
        context: tokens.
        steps: most decode steps of one sample.
        rounds: samples of each number.
        checked: forced tokens whose logits are compared.
        ablation: time the pipeline without each optional pass too.
        starts: rows that are started in processes of their own, cold and warm.
        plot: a PNG file; None: beside `bench.out`.
        first_token_of: build this row, print the age of the process at its first token, and end.
    """

    rows: tuple[str, ...] = option(())
    batches: tuple[int, ...] = option((), at_least=1)
    prefill: int | None = option(None, at_least=2)
    context: int = option(128, at_least=1)
    steps: int = option(32, at_least=2)
    rounds: int = option(9, at_least=1)
    checked: int = option(32, at_least=1)
    ablation: bool = option(True)
    starts: tuple[str, ...] = option(("eager", "compiled"))
    plot: str | None = option(None)
    first_token_of: str | None = option(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [self.first_token_of] if self.first_token_of else []
        for key, rows in (("rows", self.rows), ("starts", self.starts), ("first_token_of", named)):
            for row in rows:
                if row not in ROWS:
                    raise UserError(f"bench.{key}: no row {row!r}; choose from {', '.join(ROWS)}")
        if list(self.batches) != sorted(set(self.batches)):
            raise UserError(f"bench.batches={list(self.batches)}: must ascend, such as [1,8,32]")


class Bench:
    """One run: the rows that could be built, and what was measured of them."""

    def __init__(self, run: Run) -> None:
        self.run, self.options = run, run.options
        self.model = Model.load(run.config)
        self.device = self.model.device
        cuda = self.device.type == "cuda"
        self.lengths = Lengths(
            prefill=self.options.prefill or (512 if cuda else 128),
            context=self.options.context,
            steps=max(self.options.steps, self.options.checked),
            batches=self.options.batches or (CUDA_BATCHES if cuda else CPU_BATCHES),
        )
        self.samples = Samples()
        self.rows: dict[str, Contender] = {}
        self.notes: dict[str, str] = {}
        self.bandwidth: dict[int, float] = {}
        self._random = random.Random(self.options.seed)
        self.prompt = self.ids(self.lengths.prefill)
        self.continuation = self.ids(self.options.checked)
        self.contexts = [self.ids(self.options.context) for _ in range(max(self.lengths.batches))]

    def ids(self, count: int) -> list[int]:
        """Random tokens."""
        return [self._random.randrange(self.model.config.vocab_size) for _ in range(count)]

    @property
    def wanted(self) -> list[str]:
        """The rows that were asked for, in the order of `ROWS`."""
        cuda = self.device.type == "cuda"
        asked = self.options.rows or [r for r in ROWS if cuda or r != "torch_compile"]
        return [row for row in ROWS if row in asked and (cuda or row not in CUDA_ONLY)]

    def build(self) -> None:
        """Build every row and run each of its steps once; a row that cannot run leaves a note."""
        for name in self.options.rows:
            if name not in self.wanted:
                self.notes[name] = "needs CUDA; on a CPU it is the row without that ending"
        for name in self.wanted:
            say(f"building {name}")
            try:
                self.rows[name] = self._built(name)
            except Exception as error:
                if name in ("reference", "eager", "compiled", "compiled_no_graphs"):
                    raise  # ours must run; the others need not be able to here
                cause = " ".join(str(error).split())[:300]
                self.notes[name] = f"does not run here: {type(error).__name__}: {cause}"
                say(f"{name} {self.notes[name]}")
        if not self.rows:
            causes = "; ".join(f"{name}: {note}" for name, note in self.notes.items())
            raise UserError(f"bench.rows: none of them runs here ({causes})")

    def _built(self, name: str) -> Contender:
        before = 0.0 if name in ("hf", "reference") else self.model.trace_seconds
        with peak_bytes(self.device) as peak:
            start = synchronized(self.device)
            row = build(name, self.model, self.lengths)
            row.prefill(self.prompt)
            for batch in row.batches:
                row.start(self.contexts[:batch])
                row.decode(batch, 1)
            seconds = synchronized(self.device) - start + before
        self.samples.set(name, "build_s", seconds)
        held = None if peak.bytes is None else float(peak.bytes + row.shared_bytes)
        self.samples.set(name, "peak_bytes", held)
        return row

    def check(self) -> None:
        """Logits of every row against the plain model in float32."""
        expected = self.model.oracle(self.prompt, self.continuation)
        best = expected.argmax(-1)
        for name, row in self.rows.items():
            logits = row.forced(self.prompt, self.continuation)
            error = (logits - expected).abs().max() / expected.abs().max()
            self.samples.set(name, "logit_error", float(error), exact=True)
            agreeing = (logits.argmax(-1) == best).float().mean()
            self.samples.set(name, "token_agreement", float(agreeing), exact=True)

    @property
    def timed(self) -> list[str]:
        """The columns that are timed."""
        return ["prefill_ms", *(f"decode_ms@{b}" for b in self.lengths.batches)]

    def time(self, rows: dict[str, Contender], samples: Samples, rounds: int) -> None:
        """Prefill and every batch, in rounds in which the rows take turns."""

        def taken(rows: dict[str, Contender], column: str, sample: Callable[[Any], float]) -> None:
            say(f"timing {column}")
            order = deque(rows)
            for _ in range(rounds):
                for name in order:
                    samples.add(name, column, 1e3 * sample(rows[name]))
                order.rotate()

        for row in rows.values():
            row.prefill(self.prompt)

        def one_prefill(row: Contender) -> float:
            start = working_time(self.device)
            row.prefill(self.prompt)
            return working_time(self.device) - start

        taken(rows, "prefill_ms", one_prefill)
        for batch in self.lengths.batches:
            able = {name: row for name, row in rows.items() if batch in row.batches}
            steps = {}
            for name, row in able.items():
                row.start(self.contexts[:batch])
                seconds = row.decode(batch, 2)
                steps[name] = min(self.options.steps, max(2, round(SAMPLE_SECONDS / seconds)))

            def decode(row: Contender, batch: int = batch, steps: dict[str, int] = steps) -> float:
                return row.decode(batch, steps[row.name])

            taken(able, f"decode_ms@{batch}", decode)

    def derive(self) -> None:
        """The columns that follow from the times."""
        lowered = self.model.lower("eager")
        for batch in self.lengths.batches:
            context = self.lengths.context + self.lengths.steps // 2
            least = self.model.least_bytes(lowered, batch, context)
            self.bandwidth[batch] = bandwidth(self.device, least)
            for name, row in self.rows.items():
                if batch not in row.batches:
                    continue
                for ms in self.samples.of(name, f"decode_ms@{batch}"):
                    speed = 1e3 * least / ms
                    self.samples.add(name, f"output_throughput@{batch}", 1e3 * batch / ms)
                    self.samples.add(name, f"gb_per_second@{batch}", speed / 1e9)
                    self.samples.add(name, f"floor_share@{batch}", speed / self.bandwidth[batch])
        smallest = self.lengths.batches[0]
        for name, row in self.rows.items():
            if isinstance(row, GraphContender) and not name.startswith("torch_compile"):
                columns = {"prefill": "prefill_launches", "decode": f"decode_launches@{smallest}"}
                for phase, column in columns.items():
                    launches = row.planned(phase, smallest if phase == "decode" else 1).launches
                    self.samples.set(name, column, float(launches), exact=True)
            if self.device.type == "cuda" and smallest in row.batches:
                measured = self._measured_launches(row, smallest)
                self.samples.set(name, f"measured_launches@{smallest}", measured, exact=True)
        self._pay_back(smallest)

    def _measured_launches(self, row: Contender, batch: int) -> float | None:
        row.start(self.contexts[:batch])
        return count_kernels(lambda steps: row.decode(batch, steps))

    def _pay_back(self, batch: int) -> None:
        if "eager" not in self.rows or batch not in self.rows["eager"].batches:
            return
        results = self.samples.results
        eager = results["eager"]
        for name in self.rows:
            own, column = results[name], f"decode_ms@{batch}"
            if name in ("eager", "hf", "reference"):
                continue
            gain = (eager[column] - own[column]) / 1e3 / batch  # type: ignore[operator]
            cost = own["build_s"] - eager["build_s"]  # type: ignore[operator]
            tokens = None if gain <= 0 else max(0.0, cost / gain)  # None: it never does
            self.samples.set(name, f"tokens_to_pay_back@{batch}", tokens)

    def pairs(self) -> list[dict[str, Any]]:
        """Ratios of the times of two rows, round by round."""
        found = []
        for fast, slow in (("compiled", "eager"), ("compiled", "torch_compile"),
                           ("compiled", "hf"), ("eager", "hf")):  # fmt: skip
            if fast not in self.rows or slow not in self.rows:
                continue
            for column in self.timed:
                a, b = self.samples.of(fast, column), self.samples.of(slow, column)
                found.append({"column": column} | ratio(fast, a, slow, b))
        return found

    def ablation(self) -> list[dict[str, Any]]:
        """The full pipeline and the pipeline without one pass, in turns."""
        found = []
        for name in optional_passes():
            say(f"without {name}")
            row = ablated(name, self.model, self.lengths)
            taken = Samples()
            rounds = min(self.options.rounds, ABLATION_ROUNDS)
            self.time({"compiled": self.rows["compiled"], row.name: row}, taken, rounds)
            entry: dict[str, Any] = {"pass": name}
            for column in self.timed:
                without, full = taken.of(row.name, column), taken.of("compiled", column)
                for ms in without:
                    self.samples.add(row.name, column, ms)
                entry[column] = ratio(row.name, without, "compiled", full)
            smallest = self.lengths.batches[0]
            launches = float(row.planned("decode", smallest).launches)
            self.samples.set(row.name, f"decode_launches@{smallest}", launches, exact=True)
            found.append(entry)
            del row  # its pools, before the next one's
            gc.collect()
        return found

    def starts(self) -> None:
        """Process start to first token, in processes of their own: cold caches, then warm."""
        for name in self.options.starts:
            if name not in self.rows:
                continue
            say(f"starting {name}, cold and warm")
            with tempfile.TemporaryDirectory() as folder:
                caches = {variable: os.path.join(folder, variable) for variable in CACHES}
                for column in ("cold_start_s", "warm_start_s"):
                    seconds = self._start(name, caches)
                    if seconds is None:
                        break
                    self.samples.set(name, column, seconds)

    def _start(self, name: str, caches: dict[str, str]) -> float | None:
        """Seconds; None, and a note, if that process failed: what was measured is worth more."""
        arguments = [*self.run.arguments, f"bench.first_token_of={name}"]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            env=os.environ | caches,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            self.notes[f"start of {name}"] = f"exit code {done.returncode}: {last}"
            say(done.stderr)
            return None
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def ratio(fast: str, a: Sequence[float], slow: str, b: Sequence[float]) -> dict[str, Any]:
    """How many times as fast `fast` is as `slow`, from times taken in turns.

    Returns:
        `speedup`, the median over rounds; `low` and `high`, its 95 % interval; `rounds`.
    """
    speedups = [y / x for x, y in zip(a, b, strict=True)]
    low, high = median_interval(speedups)
    return {
        "fast": fast,
        "slow": slow,
        "speedup": statistics.median(speedups),
        "low": low,
        "high": high,
        "rounds": len(speedups),
    }


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
