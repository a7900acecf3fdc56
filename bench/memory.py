"""Memory and launches, measured: the most that was held, the bandwidth of reading, kernels.

with peak_bytes(device) as peak:
    run()
peak.bytes, bandwidth(device, 2**30), count_kernels(lambda steps: decode(batch, steps))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.samples import working_time

LEAST_BUFFER = 2**22  # bytes; a smaller one is read faster than it can be timed
BEST_OF = 12


@dataclass
class Peak:
    """The most bytes that were held beyond what was there before; None: the system does not say."""

    bytes: int | None = None


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Measure a block: on CUDA torch's allocations, on a CPU the resident memory (Linux)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = _status("VmRSS")
    except OSError:
        yield peak
        return
    yield peak
    peak.bytes = max(0, _status("VmHWM") - before)


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that `size` bytes are read with, or copied if that is more: the best of a few.

    A buffer that fits into a cache is read from there, as a model of that size is.
    """
    buffer = torch.zeros(max(size, LEAST_BUFFER) // 4, dtype=torch.int32, device=device)
    half = len(buffer) // 2
    repeats = max(1, 2**28 // buffer.nbytes) if device.type == "cuda" else 1

    def seconds(run: Callable[[], object]) -> float:
        times = []
        for _ in range(BEST_OF):
            start = working_time(device)
            for _ in range(repeats):
                run()
            times.append((working_time(device) - start) / repeats)
        return min(times)

    copy = seconds(lambda: buffer[:half].copy_(buffer[half : 2 * half]))
    return buffer.nbytes / min(seconds(buffer.max), copy)


def count_kernels(run: Callable[[int], object]) -> float | None:
    """Kernels of a step on the GPU, copies left out: those of three steps less those of two.

    Args:
        run: runs as many steps as it is told.

    Returns:
        None where the profiler sees no kernels, as in a container that may not ask for them.
    """

    def launched(steps: int) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(steps)
            torch.cuda.synchronize()
        events = profile.events() or []
        device = torch._C._autograd.DeviceType.CUDA
        kernels = [e for e in events if e.device_type == device and not e.is_user_annotation]
        return sum(not e.name.startswith("Mem") for e in kernels)

    run(2)
    two, three = launched(2), launched(3)
    return float(three - two) if three else None


def _status(name: str) -> int:
    """A size of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise OSError(f"no {name}")
    return int(found[1]) * 1024
