"""The first run of both graphs, before the first request: it builds the GPU's kernels.

Owns what is run and the counting of builds. Does not own the kernels.

    builds = warm_up(runner, slot=1, blocks=range(1, 9))     # Builds(count=31, seconds=12.4)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from minivllm.runtime.model_runner import ModelRunner, Row

PROMPT = 65  # tokens: a whole chunk and the beginning of another


@dataclass
class Builds:
    """Kernels that Triton built, and the time that the runs took with them."""

    count: int = 0
    seconds: float = 0.0


def warm_up(runner: ModelRunner, slot: int, blocks: Sequence[int]) -> Builds:
    """Run a prompt in two chunks and one token through the graphs.

    Args:
        slot, blocks: owned by nobody yet; their content is that of no request.

    Returns:
        The kernels built and the seconds of the runs.
    """
    builds = Builds()
    start = time.perf_counter()
    with _counted(builds):
        ids = [0] * min(PROMPT + 1, len(blocks) * runner.block_size)
        cuts = sorted({0, max(len(ids) - 2, 0), len(ids) - 1})
        for start, end in itertools.pairwise(cuts):
            runner.prefill([Row(ids[:end], start, slot, blocks)])
        runner.decode([Row(ids, len(ids) - 1, slot, blocks)])
        torch.cuda.synchronize(runner.device)
    builds.seconds = time.perf_counter() - start
    return builds


@contextmanager
def _counted(builds: Builds) -> Iterator[None]:
    """Count what Triton compiles meanwhile; without Triton there is nothing to count."""
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    earlier = knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        builds.count += 1
        return earlier(*args, **kwargs) if earlier is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = earlier
