"""The planned steps of a compilation, run: how long each call of the last graphs takes.

Owns the runs and the device's speed. Does not own the joining of kernels to calls
(`compiler/measured.py`) nor the tables.

    steps = measure(compiled, folder, architecture, options, device, dtype)
    steps["decode"].step_us

On a GPU a step is captured as the engine does it, and replayed. The same step is then run call by
call with a marker, a kernel that nothing else launches, between any two calls: that tells which
kernels a call launches, whatever its launches look like from the host. On a CPU calls are timed as
they run.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from minivllm.compiler.bind import Executable
from minivllm.compiler.compile import CompiledModel
from minivllm.compiler.cost import STEPS, call_costs, planned_context
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.measured import (
    BEFORE,
    BEHIND,
    Call,
    Kernel,
    Machine,
    MeasuredStep,
    Timed,
    join,
    middle_means,
    split,
)
from minivllm.compiler.recipe import allocate
from minivllm.compiler.text import target_text
from minivllm.config import EngineConfig
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights, load_weights, parameter_shapes
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.device_speed import device_seconds, host_seconds, measured_machine
from minivllm.runtime.kernel_trace import device_kernels, traced
from minivllm.runtime.model_runner import ModelRunner, PoolSizes
from minivllm.runtime.prefill_inputs import TOKEN_SLOTS, Row, prefill_inputs
from minivllm.runtime.prefill_runner import prefill_buckets
from minivllm.runtime.resolve import resolve_num_threads, use_no_cublas_workspace

REPLAYS = 20  # of a step, at most: with the profiler, and without it
SECONDS = 1.0  # that they take, unless a few take longer
FEWEST = 3
SLOT = 1
MARKER = "spin_kernel"  # what torch.cuda._sleep launches


def measure(
    compiled: CompiledModel,
    folder: Path | None,
    architecture: MiniQwenConfig,
    options: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, MeasuredStep]:
    """Measure the planned step of each phase.

    Args:
        folder: the checkpoint's; None for dummy weights without one.
        options: how weights are loaded, whether steps are captured, forced implementations.

    Raises:
        UserError: weights that cannot be loaded, or an implementation that cannot run here.
    """
    weights = _load(compiled, folder, architecture, options, device, dtype)
    blocks = -(-max(planned_context(phase) for phase in PHASES) // BLOCK_SIZE)
    runner = ModelRunner(
        compiled,
        weights,
        device,
        dtype,
        PoolSizes(num_slots=SLOT + 1, num_blocks=blocks + 1),
        implementations=options.compiler.implementations,
    )
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(resolve_num_threads(options.runtime, architecture))
    else:
        use_no_cublas_workspace()
        if dtype == torch.float32:
            torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(), runner.on_device():
            machine = measured_machine(device, dtype)
            if device.type == "cuda" and options.runtime.cuda_graph:
                _capture(runner, options)
            steps: tuple[_Step, ...] = (_Prefill(runner), _Decode(runner))
            return {
                step.phase: _measured(step, compiled.graphs[step.phase], machine, device)
                for step in steps
            }
    finally:
        torch.set_num_threads(threads)


def _load(
    compiled: CompiledModel,
    folder: Path | None,
    architecture: MiniQwenConfig,
    options: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    buffers = {name: value.to(device) for name, value in constants(architecture).items()}
    specs = compiled.prefill.weights | compiled.decode.weights
    held = {name: spec for name, spec in specs.items() if name not in buffers}
    storage, targets = allocate(held, device)
    shapes = parameter_shapes(architecture)
    if options.model.load_format == "dummy":
        dummy_weights(shapes, dtype, device, options.model.seed, targets)
    else:
        assert folder is not None, "checked by ModelOptions"
        load_weights(folder, shapes, dtype, device, targets=targets)
    return storage | buffers


def _capture(runner: ModelRunner, options: EngineConfig) -> None:
    """As the engine does it: in compiled mode, and what implementations allow."""
    if options.compiler.mode != "compiled":
        return
    tokens = STEPS["prefill"]
    runner.capture([b for b in prefill_buckets(tokens, 1) if b.tokens == tokens])


class _Step(ABC):
    """The planned step of a phase: call by call, and as it is measured."""

    phase: str
    executable: Executable
    captured: bool

    @abstractmethod
    def run(self, executable: Executable) -> None:
        """The step with another form of its graph, and without a CUDA Graph."""

    @abstractmethod
    def replay(self) -> None:
        """The step as the engine runs it."""


class _Prefill(_Step):
    phase = "prefill"

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner.prefiller
        self.executable = self.runner.prefill
        self.captured = self.runner.captures is not None
        count = STEPS["prefill"]
        self.rows = [Row([0] * count, 0, count, SLOT, range(1, count // BLOCK_SIZE + 1))]
        self.bucket = self.runner.bucket(self.rows)
        inputs = prefill_inputs(self.rows, self.bucket).views()
        self.inputs = {name: x.to(self.runner.device) for name, x in inputs.items()}
        self.greedy = torch.empty_like(self.inputs[TOKEN_SLOTS])
        self.runner.run(self.rows)  # whose inputs a captured one keeps

    def run(self, executable: Executable) -> None:
        self.runner.step(self.inputs, self.greedy, executable)

    def replay(self) -> None:
        if self.runner.captures is None:
            self.run(self.executable)
        else:
            self.runner.captures.replay(self.bucket)


class _Decode(_Step):
    phase = "decode"

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner.decoder
        self.executable = self.runner.decode
        self.captured = self.runner.captures is not None
        self.runner.run(*self._rows)  # whose inputs a captured one keeps

    def run(self, executable: Executable) -> None:
        held = self.runner.decode, self.runner.captures
        self.runner.decode, self.runner.captures = executable, None
        try:
            self.runner.run(*self._rows)
        finally:
            self.runner.decode, self.runner.captures = held

    def replay(self) -> None:
        if self.runner.captures is None:
            self.run(self.executable)
        else:
            self.runner.captures.replay(1)

    @property
    def _rows(self) -> tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]]:
        context = planned_context("decode")
        return [context - 1], [SLOT], [list(range(1, -(-context // BLOCK_SIZE) + 1))]


class _CallByCall(Executable):
    """A graph that is run node by node; `around` makes each call and sees when."""

    def __init__(self, executable: Executable, around: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__(
            executable.module,
            executable.inputs,
            executable.implementations,
            executable.warnings,
            executable.capturable,
        )
        self.around = around

    def __call__(self, **inputs: Tensor) -> Tensor:
        output = _Interpreter(self.module, self.around).run(*(inputs[n] for n in self.inputs))
        assert isinstance(output, Tensor)
        return output


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, around: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__(module)
        self._around = around

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._around(lambda: target(*args, **kwargs))


def _measured(step: _Step, graph: Graph, machine: Machine, device: torch.device) -> MeasuredStep:
    calls = tuple(
        Call(node.name, node.meta["module"], target_text(node.target), cost)
        for node, cost in call_costs(graph).items()
    )
    names = [call.name for call in calls]

    def once() -> None:
        step.replay()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    once()  # what is built or set up at the first time
    count = max(FEWEST, min(REPLAYS, int(SECONDS / host_seconds(once))))
    notes: tuple[str, ...] = ()
    if device.type == "cuda":
        step_us = 1e6 * device_seconds(step.replay, count, device)
        launched = _launched(step, names, device)
        timed, notes = join(launched, _replays(step, count, device))
    else:
        step_us = 1e6 * statistics.median(host_seconds(step.replay) for _ in range(count))
        timed = _ops(step, calls, count)
    return MeasuredStep(machine, step.captured, calls, timed, step_us, notes)


def _launched(step: _Step, names: Sequence[str], device: torch.device) -> list[tuple[str, str]]:
    """Owner and name of each kernel of a step that is run call by call."""

    def marked(call: Callable[[], Any]) -> Any:
        _mark()
        result = call()
        _mark()
        return result

    executable = _CallByCall(step.executable, marked)
    step.run(executable)
    parts = _parts(lambda: step.run(executable), device)
    assert len(parts) == 2 * len(names) + 1, f"{len(parts)} parts of {len(names)} calls"
    assert not any(parts[2:-1:2]), "kernels between two calls"
    if step.captured:  # what sends the inputs is not in the graph
        parts[0] = [kernel for kernel in parts[0] if "HtoD" not in kernel.name]
    owners = [(BEFORE, parts[0]), *zip(names, parts[1::2], strict=True), (BEHIND, parts[-1])]
    return [(owner, kernel.name) for owner, kernels in owners for kernel in kernels]


def _replays(step: _Step, count: int, device: torch.device) -> list[list[Kernel]]:
    def run() -> None:
        for _ in range(count):
            _mark()
            step.replay()
        _mark()

    traced(run, device)  # the first time, the profiler itself is being set up
    return _parts(run, device)[1:-1]


def _parts(run: Callable[[], None], device: torch.device) -> list[list[Kernel]]:
    """The kernels of a run between its markers."""
    kernels = device_kernels(traced(run, device))
    if not any(MARKER in kernel.name for kernel in kernels):
        raise UserError(
            "compiler.measure=true: torch's profiler sees no kernel; another profiler may hold "
            "CUPTI, or this machine does not permit it"
        )
    return split(kernels, lambda name: MARKER in name)


def _mark() -> None:
    torch.cuda._sleep(1)


def _ops(step: _Step, calls: Sequence[Call], count: int) -> tuple[Timed, ...]:
    """The calls of a step as the host runs them, and what it does before and behind them."""
    times: list[tuple[float, float]] = []

    def clocked(call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times.append((start, time.perf_counter()))
        return result

    executable = _CallByCall(step.executable, clocked)
    runs = []
    for _ in range(count):
        times.clear()
        start = time.perf_counter()
        step.run(executable)
        end = time.perf_counter()
        ops = [stop - begin for begin, stop in times]
        runs.append([times[0][0] - start, *ops, end - times[-1][1]])
    means = [1e6 * seconds for seconds in middle_means(runs)]
    owners = [(BEFORE, BEFORE), *((call.name, call.op) for call in calls), (BEHIND, BEHIND)]
    return tuple(Timed(owner, name, us) for (owner, name), us in zip(owners, means, strict=True))
