"""Kernels built in threads while the weights are loaded, instead of one after another in a step.

Owns what is built ahead and the threads. Does not own the kernels, nor the first runs (`warmup`):
whatever is missed here is built there, later but no less right.

    with kernel_builds(compiled, device, dtype, sizes, forced) as builds:
        weights = ...                      # loaded meanwhile
        builds.wait()
        builds.count, builds.seconds

What a launch builds depends on its arguments' shapes, strides and dtypes and on whether addresses
are multiples of 16, as in every bucket (`prefill_inputs.ALIGNMENT`), never on data. So both graphs
run on meta tensors with the implementations of CUDA, at every size that a step may have; no kernel
is launched, and what is not built yet is handed to the threads with the very arguments of that
launch. It ends up in triton's own cache, where the real launch finds it. Most of a build (MLIR,
LLVM, ptxas, the C compiler for a launcher) runs without Python's lock.

One engine of a process starts at a time: while another one's kernels are built or its graphs
captured, a launch might meet a kernel that is not ready.

Left to their first use: what an autotuner has to time, and entries that look at data. FLA's are
both, which run in eager mode.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.compile import CompiledModel
from minivllm.compiler.graph import META
from minivllm.compiler.skeleton import meta_inputs, meta_weights, skeleton
from minivllm.ops import Implementation, Op
from minivllm.ops.chunks import CHUNK_SIZE, max_chunks
from minivllm.ops.decode_step import DECODE_INPUTS, GREEDY_TOKENS
from minivllm.ops.op import is_importable
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.pools import meta_views
from minivllm.runtime.prefill_inputs import Bucket
from minivllm.runtime.warmup import Parts

logger = logging.getLogger(__name__)

MAX_THREADS = 8  # a sixth to a quarter of a build holds Python's lock: more would wait for it
# CPython counts how deep all threads' syntax trees are in one number, and rarely finds it changed
# ("AST constructor recursion depth mismatch"): triton parses a kernel's source in each build
ATTEMPTS = 3
_recording = threading.Lock()  # triton's launch is replaced by one recording at a time


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the steps that will run.

    Attributes:
        decode: numbers of rows.
        buckets: of captured prefills.
        prefills: parts of sequences that run at their exact sizes.
        max_blocks: columns of a block table.
        vocab_limit: see `NewestTokens`.
    """

    decode: Sequence[int]
    buckets: Sequence[Bucket]
    prefills: Sequence[Parts]
    max_blocks: int
    vocab_limit: int


class _Closed(BaseException):
    """Nobody waits for the builds any more; no error of an op, which recording would survive."""


class KernelBuilds:
    """Builds that are under way.

    Args:
        launch_all: launches everything, on meta; runs in a thread of its own.
        gpu: whose kernels they are; None: those of the device that triton's driver names.
    """

    def __init__(self, launch_all: Callable[[], None], gpu: int | None) -> None:
        self._start = self._end = time.perf_counter()
        self._builds: dict[tuple[Any, str], Future[None]] = {}
        self._closed = False
        use_gpu = (lambda: None) if gpu is None else (lambda: torch.cuda.set_device(gpu))
        self._threads = ThreadPoolExecutor(
            min(MAX_THREADS, os.cpu_count() or 1), "kernel-build", initializer=use_gpu
        )
        self._recorded = self._threads.submit(self._record, launch_all)

    @property
    def count(self) -> int:
        """Kernels that were built, or found in triton's cache on disk."""
        done = [b for b in self._builds.values() if b.done() and not b.cancelled()]
        return sum(build.exception() is None for build in done)

    @property
    def seconds(self) -> float:
        """From the beginning to the end of the last build so far."""
        return self._end - self._start

    def wait(self) -> None:
        """Wait for all builds; what failed is logged, and fails again where it is needed."""
        error = self._recorded.exception()
        if error is not None:
            logger.warning("not all kernels were built ahead: %s", error, exc_info=error)
        for (function, _), build in self._builds.items():
            error = build.exception()
            if error is not None:
                name = f"{function.__module__}.{function.__name__}"
                logger.warning("%s was not built ahead: %s", name, error, exc_info=error)
        self.close()

    def close(self) -> None:
        """Let go of the threads; builds that have not begun are left out, and nothing is recorded
        any more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _record(self, launch_all: Callable[[], None]) -> None:
        with suppress(_Closed), _recording, recorded_launches(self._take), torch.inference_mode():
            launch_all()

    def _take(self, function: Any, key: str, build: Callable[[], Any]) -> None:
        if self._closed:
            raise _Closed
        if (function, key) not in self._builds:
            self._builds[function, key] = self._threads.submit(self._build, build)

    def _build(self, build: Callable[[], Any]) -> None:
        for attempt in range(ATTEMPTS):
            try:
                built = build()
                break
            except SystemError:
                if attempt == ATTEMPTS - 1:
                    raise
        # a kernel has `run` once its launcher is there and its code is on the device
        _ = built.run
        self._end = time.perf_counter()


@contextmanager
def recorded_launches(take: Callable[[Any, str, Callable[[], Any]], None]) -> Iterator[None]:
    """Launches of this thread stop short: `take(function, key, build)` gets those not built yet.

    Triton's cache hook alone would not do: a kernel that is built already would be launched, on
    tensors without memory. A tuner is not entered at all, since it would time launches.
    """
    from triton import knobs
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    thread = threading.get_ident()
    run, tune, earlier_hook = JITFunction.run, Autotuner.run, knobs.runtime.jit_cache_hook
    missing: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            missing.append(kwargs["key"])
            return True  # not now
        return earlier_hook(*args, **kwargs) if earlier_hook is not None else None

    def recording_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, **kwargs)
        kwargs["warmup"] = True  # which never launches
        missing.clear()
        run(self, *args, **kwargs)
        for key in missing:
            take(self, key, lambda: run(self, *args, **kwargs))
        return None

    def recording_tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == thread else tune(self, *args, **kwargs)

    JITFunction.run, Autotuner.run = recording_run, recording_tune
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune
        knobs.runtime.jit_cache_hook = earlier_hook


class MetaSteps:
    """Both graphs and what stands around them, on meta, with the implementations of a device.

    Args:
        compiled: both graphs, finished.
        device, dtype: what the implementations are chosen for.
        forced: op name to the implementation forced on it.
        reduced: each call once of those that launch the same; False: all.

    Raises:
        UserError: `forced` names an unknown op, or an implementation that cannot run there.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        device: torch.device,
        dtype: torch.dtype,
        forced: Mapping[str, str],
        reduced: bool = True,
    ) -> None:
        self._later: list[Callable[[], None]] = []
        self._given_up: set[str] = set()
        self._graphs = compiled.graphs
        pools = meta_views(compiled.decode.states)
        self._steps: dict[str, Executable] = {}
        for phase, graph in self._graphs.items():
            graph = skeleton(graph, pools) if reduced else graph
            weights = meta_weights(graph)
            self._steps[phase] = bind(graph, weights, pools, device, dtype, forced, self._call_of)
        self._around = [
            op.choose(device, torch.float32, forced.get(op.name))[0]
            for op in (DECODE_INPUTS, GREEDY_TOKENS)
        ]

    def launch(self, sizes: StepSizes) -> None:
        """Launch what steps of these sizes launch; what needs an import that takes long, last."""
        for rows in sizes.decode:
            step = {"tokens": rows, "seqs": rows, "blocks": sizes.max_blocks}
            self._launch_around(self._run("decode", step), sizes)
        for step in prefill_sizes(sizes.buckets, sizes.prefills):
            self._run("prefill", step)
        for call in self._later:
            call()

    def _run(self, phase: str, sizes: Mapping[str, int]) -> Tensor:
        return self._steps[phase](**meta_inputs(self._graphs[phase], sizes))

    def _call_of(self, op: Op, chosen: Implementation) -> Callable[..., Any]:
        """A call of the implementation for its launches; its result is the op's fake's."""

        def call(*args: Any) -> Any:
            if chosen.package == "triton":
                self._try(op, chosen, args)
            elif chosen.package is not None:
                self._later.append(lambda: self._try(op, chosen, args))
            return op.overload(*args)

        call.__name__ = call.__qualname__ = op.name  # its name in generated code
        return call

    def _try(self, op: Op, chosen: Implementation, args: Sequence[Any]) -> None:
        if op.name in self._given_up:
            return
        try:
            chosen.call(*args)
        except Exception as error:
            self._given_up.add(op.name)
            logger.info("%s=%s is built at its first use: %s", op.name, chosen.name, error)

    def _launch_around(self, logits: Tensor, sizes: StepSizes) -> None:
        """What `DecodeRunner` launches before and behind its graph."""
        rows = logits.shape[0]
        slots, tokens = (torch.empty(n, dtype=torch.int64, device=META) for n in (rows, 2))
        tables = torch.empty(2, sizes.max_blocks, dtype=torch.int32, device=META)
        inputs, choose = self._around
        inputs.call(slots, slots, tokens, tables)
        choose.call(logits, slots, sizes.vocab_limit, slots, tokens)


def prefill_sizes(buckets: Iterable[Bucket], prefills: Iterable[Parts]) -> list[dict[str, int]]:
    """The symbols' values in prefills of these buckets and of these parts."""
    sizes = [
        {
            "tokens": bucket.tokens,
            "seqs": bucket.seqs,
            "rows": bucket.rows,
            "kv_blocks": bucket.blocks,
            "chunks": max_chunks(bucket.tokens, bucket.seqs),
        }
        for bucket in buckets
    ]
    for parts in prefills:
        lengths = [end - start for start, end in parts]
        sizes.append(
            {
                "tokens": sum(lengths),
                "seqs": len(parts),
                "rows": len(parts),
                "kv_blocks": sum(-(-end // BLOCK_SIZE) for _, end in parts),
                "chunks": sum(-(-length // CHUNK_SIZE) for length in lengths),
            }
        )
    return sizes


@contextmanager
def kernel_builds(
    compiled: CompiledModel | None,
    device: torch.device,
    dtype: torch.dtype,
    sizes: StepSizes,
    forced: Mapping[str, str],
) -> Iterator[KernelBuilds | None]:
    """Build in threads what steps of these sizes launch; None where nothing is to be built.

    What has not begun when the block is left is left out.
    """
    if compiled is None or device.type != "cuda" or not builds_kernels():
        yield None
        return
    gpu = torch.cuda.current_device() if device.index is None else device.index
    steps = MetaSteps(compiled, device, dtype, forced)
    builds = KernelBuilds(lambda: steps.launch(sizes), gpu)
    try:
        yield builds
    finally:
        builds.close()


def builds_kernels() -> bool:
    """Whether triton is there, and compiles what it is given."""
    if not is_importable("triton"):
        return False
    from triton import knobs

    return not knobs.runtime.interpret
