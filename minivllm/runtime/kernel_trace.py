"""What torch's profiler saw, read from its Chrome trace: kernels of a GPU, ops of a CPU.

Owns the format of the trace. Does not own when something is traced (`profile`, `measure`).

    kernels = device_kernels(traced(run, device))

The trace has an event for each op, kernel and copy: `cat` tells which, `ts` and `dur` are its start
and duration in microseconds, and `tid` is its thread.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from minivllm.compiler.measured import Kernel

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def traced(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """The trace of a run on a GPU, kernels alone: the less is recorded, the less it disturbs."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace."""
    # names of kernels may hold bytes of any kind
    trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    assert isinstance(trace, dict)
    return trace


def device_kernels(trace: dict[str, Any]) -> list[Kernel]:
    """Kernels, copies and fills of the device, in the order of their starts."""
    found = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in ON_DEVICE
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def host_spans(trace: dict[str, Any], prefix: str) -> list[Kernel]:
    """The spans of `record_function` on the host whose names begin so, in order."""
    found = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(prefix)
    ]
    return sorted(found, key=lambda span: span.start)


def op_self_times(trace: dict[str, Any]) -> list[tuple[str, float]]:
    """Ops of the host and their microseconds without the ops that they call, in any order."""
    threads: dict[Any, list[Kernel]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op":
            op = Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]))
            threads.setdefault(event["tid"], []).append(op)
    return [found for ops in threads.values() for found in _self_times(ops)]


def _self_times(ops: Iterable[Kernel]) -> list[tuple[str, float]]:
    """Of one thread, whose ops follow each other or lie within each other."""
    order = sorted(ops, key=lambda op: (op.start, -op.duration))
    times = [op.duration for op in order]
    around: list[int] = []  # the ops that still run
    for index, op in enumerate(order):
        while around and order[around[-1]].end <= op.start:
            around.pop()
        if around:
            times[around[-1]] -= op.duration
        around.append(index)
    return [(op.name, max(us, 0.0)) for op, us in zip(order, times, strict=True)]
