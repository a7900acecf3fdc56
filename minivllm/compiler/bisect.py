"""Bisection: the first pass that breaks the numbers, or that makes a decode step slower.

Owns the measuring after each pass and the verdict. Does not own the comparison (verify.py), the
order of the passes (pipeline.py) nor when it is asked for (compile.py).

    numerics = NumericsBisection(Verifier(config, source))
    run_passes(graph, passes, context, observers=(numerics.observe,))
    print(numerics.report())

    print(bisect_speed(source, options, context).report())

A step is timed as Python runs it, without a CUDA Graph: on a GPU that shows launches more than
kernels. On a CPU it is the time of one thread, so that a busy machine says the same. A pass is
called slower if its step takes more than 2 % longer than the one before it, by the median of pairs
that were run in turn, and again when they are repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import executable_prefixes, with_extra
from minivllm.compiler.recipe import assemble
from minivllm.compiler.runner import run_passes
from minivllm.compiler.verify import Comparison, Verifier
from minivllm.config import CompilerOptions
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights

SLOWER = 0.02  # a share of the step before
ROUNDS = 11  # pairs of measurements, whose median counts
WARM_UP = 3  # steps before them
ROUND_SECONDS = 0.01  # of steps in each measurement, at least one
CONTEXT = 256  # tokens of the one sequence that is timed


class NumericsBisection:
    """Compares every stage with the plain model and goes on where `verify` would stop."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.stages: list[tuple[str, str, Comparison]] = []  # phase, stage and result

    def observe(self, graph: Graph, stage: str) -> None:
        """An observer for `runner.run_passes`."""
        self.stages.append((graph.phase, stage, self.verifier.compare(graph)))

    def first(self, phase: str) -> str | None:
        """The first stage of a phase out of tolerance."""
        bad = (stage for p, stage, result in self.stages if p == phase and not result.ok)
        return next(bad, None)

    def report(self) -> str:
        """A table in Markdown and a line for each phase."""
        lines = []
        for phase, group in itertools.groupby(self.stages, key=lambda row: row[0]):
            lines += [
                f"{phase}, difference from the plain model's logits:",
                "",
                "| pass | error | allowed | ok |",
                "| --- | ---: | ---: | --- |",
            ]
            for _, stage, result in group:
                verdict = "yes" if result.ok else "no"
                numbers = f"{result.error:.2e} | {result.allowed:.2e}"
                lines.append(f"| {stage} | {numbers} | {verdict} |")
            first = self.first(phase)
            found = f"{first} is the first pass that leaves the tolerance"
            lines += ["", found if first else "no pass leaves the tolerance", ""]
        return "\n".join(lines).rstrip()


@dataclass(frozen=True)
class Timing:
    """A decode step after a prefix of the pipeline.

    Attributes:
        name: the prefix's last pass.
        seconds: of a step.
        ratio: of this step's time to that of the prefix before; None for the first.
    """

    name: str
    seconds: float
    ratio: float | None

    @property
    def slower(self) -> bool:
        """Whether the pass made the step slower."""
        return self.ratio is not None and self.ratio > 1 + SLOWER


@dataclass(frozen=True)
class SpeedBisection:
    """The timings of all executable prefixes, in order."""

    timings: Sequence[Timing]
    device: torch.device
    dtype: torch.dtype

    @property
    def first(self) -> str | None:
        """The first pass that makes the step slower."""
        return next((t.name for t in self.timings if t.slower), None)

    def report(self) -> str:
        """A table in Markdown and the verdict."""
        lines = [
            f"decode, 1 token, {CONTEXT} of context, {self.dtype} on {self.device}, dummy weights:",
            "",
            "| pass | ms a step | to the one before |",
            "| --- | ---: | ---: |",
        ]
        for timing in self.timings:
            change = "" if timing.ratio is None else f"{100 * (timing.ratio - 1):+.1f} %"
            lines.append(f"| {timing.name} | {timing.seconds * 1000:.3f} | {change} |")
        slower = f"slower by more than {100 * SLOWER:.0f} %"
        found = f"{self.first} is the first pass that makes the step {slower}"
        return "\n".join([*lines, "", found if self.first else f"no pass makes the step {slower}"])


def bisect_speed(
    source: Graph,
    options: CompilerOptions,
    context: PassContext,
    device: torch.device | None = None,
    rounds: int = ROUNDS,
    extra: Sequence[GraphPass] = (),
) -> SpeedBisection:
    """Time a decode step after each prefix of the pipeline that can be executed.

    Args:
        source: the graph as traced.
        options: mode, passes to leave out, implementations.
        context: as for the passes of the compilation.
        device: where to run; None: CUDA if there is one.
        rounds: pairs of measurements of each two steps.
        extra: a user's passes.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = source.weights["embed_tokens.weight"].dtype
    fixed = constants(context.config)
    shapes = {n: w.shape for n, w in source.weights.items() if n not in fixed}
    plain = dummy_weights(shapes, dtype, "cpu", seed=0) | fixed
    prefixes = executable_prefixes(
        options.mode, "decode", options.disable, options.stop_after, extra
    )
    timings: list[Timing] = []
    before: Callable[[], None] | None = None
    with _clock(device) as clock:
        for name, passes in prefixes:
            kept = {p.name for p in passes}
            # what a prefix leaves out is not missed by the passes behind it
            left_out = frozenset(p.name for p in with_extra(extra) if p.name not in kept)
            graph = source.clone("decode")
            run_passes(graph, passes, dataclasses.replace(context, disabled=left_out))
            step = _step(graph, plain, context, device, dtype, options)
            for _ in range(WARM_UP):
                step()
            timing = _compare(name, before, step, clock, rounds)
            if timing.slower:  # or it was a disturbance
                again = _compare(name, before, step, clock, rounds)
                timing = min(timing, again, key=lambda t: t.ratio or 0)
            timings.append(timing)
            before = step
    return SpeedBisection(timings, device, dtype)


@contextmanager
def _clock(device: torch.device) -> Iterator[Callable[[], float]]:
    """Seconds on a device; on a CPU those of one thread, and no op takes more meanwhile."""
    if device.type != "cpu":
        yield time.perf_counter
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield time.thread_time
    finally:
        torch.set_num_threads(threads)


def _compare(
    name: str,
    before: Callable[[], None] | None,
    step: Callable[[], None],
    clock: Callable[[], float],
    rounds: int,
) -> Timing:
    """A step's time, and its ratio to another's that runs in turn with it."""
    count = max(1, int(ROUND_SECONDS / max(_measure(step, 1, clock), 1e-6)))
    if before is None:
        return Timing(
            name, statistics.median(_measure(step, count, clock) for _ in range(rounds)), None
        )
    pairs = [(_measure(before, count, clock), _measure(step, count, clock)) for _ in range(rounds)]
    seconds = statistics.median(after for _, after in pairs)
    return Timing(name, seconds, statistics.median(after / earlier for earlier, after in pairs))


def _step(
    graph: Graph,
    plain: dict[str, Tensor],
    context: PassContext,
    device: torch.device,
    dtype: torch.dtype,
    options: CompilerOptions,
) -> Callable[[], None]:
    """A decode step of one sequence, bound; it returns when the device is done."""
    weights = {n: w.to(device) for n, w in assemble(graph.weights, plain).items()}
    blocks = -(-CONTEXT // context.block_size)
    entries = {"slot": 2, "block": blocks + 1}  # entry 0 is nobody's
    states = {
        name: torch.zeros((entries[s.kind], *s.shape), dtype=s.dtype, device=device)
        for name, s in graph.states.items()
    }
    executable: Executable = bind(graph, weights, states, device, dtype, options.implementations)
    table = torch.arange(1, blocks + 1, dtype=torch.int32)
    inputs = {
        "input_ids": torch.tensor([1]),
        "positions": torch.tensor([CONTEXT - 1]),
        "state_slots": torch.tensor([1]),
        "num_computed_tokens": torch.tensor([CONTEXT - 1], dtype=torch.int32),
        "block_table": table[None],
        "seq_lens": torch.tensor([CONTEXT], dtype=torch.int32),
        "slot_mapping": torch.tensor(
            [blocks * context.block_size + (CONTEXT - 1) % context.block_size]
        ),
    }
    inputs = {name: value.to(device) for name, value in inputs.items()}

    def step() -> None:
        with torch.no_grad():
            executable(**inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def _measure(step: Callable[[], None], count: int, clock: Callable[[], float]) -> float:
    """Seconds of a step, from `count` of them."""
    start = clock()
    for _ in range(count):
        step()
    return (clock() - start) / count
