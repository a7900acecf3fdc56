"""Runs before the first request: they build every kernel, and show what a step takes.

Owns what is run, the counting of builds and the measuring of memory. Does not own the kernels.

    with counted_builds() as builds:
        warm_up_prefill(runner)
    builds.count

Pools hold nothing yet when these run, and what they write is never read: a sequence that starts
reads no state, and no key beyond its own length.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.penalties import History, TokenCounts
from minivllm.runtime.prefill_inputs import Row
from minivllm.runtime.sampler import sample
from minivllm.runtime.sampling_batch import SamplingBatch
from minivllm.runtime.sampling_params import MAX_LOGPROBS, SamplingParams

Parts = tuple[tuple[int, int], ...]  # of sequences that a prefill takes: from where to where

SLOT = 1  # that all rows of a prefill share; what they leave there is never read
# One token, part of a chunk, exactly one chunk, more; alone and several; with history and without.
PREFILLS: tuple[Parts, ...] = (
    ((0, 1),),
    ((0, 16),),
    ((0, 64),),
    ((0, 130),),
    ((64, 65),),
    ((0, 3), (64, 80), (0, 65)),
    ((0, 16),) * 16,
)


@dataclass
class Builds:
    """Kernels that Triton built."""

    count: int = 0


def warm_up_prefill(runner: ModelRunner) -> None:
    """Run short prefills of every kind."""
    longest = runner.decoder.block_tables.shape[1]
    for parts in prefills(longest * BLOCK_SIZE):
        runner.prefill([_row(start, end, longest) for start, end in parts])


def warm_up_decode(runner: ModelRunner) -> None:
    """Run a decode step of every batch size."""
    longest = runner.decoder.block_tables.shape[1]
    for size in runner.decoder.buckets:
        runner.decode([_row(0, 1, longest, slot) for slot in range(1, size + 1)])


def prefills(model_len: int) -> list[Parts]:
    """`PREFILLS` without the parts of sequences longer than any may be."""
    fitting = [tuple(part for part in parts if part[1] <= model_len) for parts in PREFILLS]
    return [parts for parts in fitting if parts]


def largest_prefill(tokens: int, model_len: int) -> Parts:
    """As many tokens as a step may have, in as few sequences as they fit into."""
    length = min(tokens, model_len)
    whole, rest = divmod(tokens, length)
    return ((0, length),) * whole + (((0, rest),) if rest else ())


def run_largest_prefill(runner: ModelRunner, tokens: int, model_len: int) -> None:
    """A step of `largest_prefill`."""
    longest = runner.decoder.block_tables.shape[1]
    parts = largest_prefill(tokens, model_len)
    runner.prefill([_row(start, end, longest) for start, end in parts])


def run_largest_decode(runner: ModelRunner) -> Tensor:
    """A step of the largest batch, all in one slot: a runner that is only measured has no more."""
    return runner.decode([_row(0, 1, 1)] * runner.decoder.buckets[-1])


def run_largest_sampling(logits: Tensor) -> None:
    """Draw a token for each row in the way that takes most memory: penalties, order, logprobs."""
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    history = History([0], 1, TokenCounts([0], 1))
    rows, width = logits.shape
    batch = SamplingBatch.build(
        [params] * rows, [0] * rows, [0] * rows, [history] * rows, (), logits.device, width
    )
    sample(logits, batch)


def measured_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most device memory that a run needs beyond what is there before it.

    It runs twice: the first time builds kernels and workspaces that stay.
    """
    run()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


@contextmanager
def counted_builds() -> Iterator[Builds]:
    """Count what Triton compiles meanwhile; without Triton there is nothing to count."""
    builds = Builds()
    try:
        from triton import knobs
    except ImportError:
        yield builds
        return
    earlier = knobs.runtime.jit_post_compile_hook
    lock = threading.Lock()

    def hook(*args: Any, **kwargs: Any) -> Any:
        with lock:  # triton calls it in the thread that has built
            builds.count += 1
        return earlier(*args, **kwargs) if earlier is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield builds
    finally:
        knobs.runtime.jit_post_compile_hook = earlier


def _row(start: int, end: int, blocks: int, slot: int = SLOT) -> Row:
    """A part of a sequence of zeros in the pools' first entries."""
    ids = list(itertools.repeat(0, end))
    return Row(ids, start, end, slot, range(1, min(-(-end // BLOCK_SIZE), blocks) + 1))
