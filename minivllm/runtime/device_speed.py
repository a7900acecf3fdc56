"""How fast a device is, and how long a run takes on it.

Owns clocks and the best that a device does. Does not own what is measured with them (`measure`).

    machine = measured_machine(torch.device("cuda"), torch.bfloat16)
    seconds = device_seconds(run, 20, device)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from minivllm.compiler.measured import Machine

ROUNDS = 5
RUNS = 5  # of a read, a copy or a product in a round


def measured_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """What the device does at its best: a read or a copy of much memory, a large product.

    Args:
        dtype: of the product.
    """
    on_gpu = device.type == "cuda"
    size = 2**30 if on_gpu else 2**26  # bytes: no cache holds them
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    read = _best_seconds(source.sum, device)
    copy = _best_seconds(lambda: target.copy_(source), device) / 2
    side = 8192 if on_gpu else 1024
    square = torch.ones(side, side, dtype=dtype, device=device)
    product = _best_seconds(lambda: square @ square, device)
    name = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
    return Machine(name, size / min(read, copy), 2 * side**3 / product)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return min(device_seconds(run, RUNS, device, rounds=1) for _ in range(ROUNDS))
    return min(host_seconds(run) for _ in range(RUNS))


def host_seconds(run: Callable[[], object]) -> float:
    """Seconds of one run on the host."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(
    run: Callable[[], object], count: int, device: torch.device, rounds: int = ROUNDS
) -> float:
    """Seconds of a run on a GPU, of `count` in a row; the median of some rounds."""
    seconds = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1000 / count)
    return statistics.median(seconds)
