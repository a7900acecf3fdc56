"""`runtime.profile`: a trace of some steps of the engine, and their time by kernel.

Owns when the profiler runs, and the files. Does not own the steps (`engine`).

    profile = StepProfile(Path("profile"), skip=10, steps=20, device=device)
    with profile.step(): ...  # around each step of the engine
    profile.end()

Behind the last step that is traced, `trace.json` (Chrome's format: ui.perfetto.dev opens it) and
`kernels.txt` (a table, in Markdown) are in the folder. Before the first and behind the last one the
host waits for the device, so that the trace holds these steps' kernels and no others.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from minivllm.compiler.measured import gaps_and_times
from minivllm.errors import UserError
from minivllm.runtime.kernel_trace import device_kernels, host_spans, op_self_times, read_trace

logger = logging.getLogger(__name__)

STEP = "engine step "  # and its number: a span of the trace
TRACE, TABLE = "trace.json", "kernels.txt"
LOGGED = 12  # rows of the table that are logged; the file has all of them
NAME_WIDTH = 96  # characters of a kernel's name; templates have hundreds


class StepProfile:
    """Traces `steps` steps behind the first `skip`.

    Args:
        folder: made if it is not there; what an earlier profile wrote there is removed.
        device: where the steps run.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, skip: int, steps: int, device: torch.device) -> None:
        self.folder = folder
        self.skip = skip
        self.steps = steps
        self.device = device
        self._seen = 0  # steps
        self._profiler: Any = None  # while it records
        self._over = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (TRACE, TABLE):
                (folder / name).write_text("", encoding="utf-8")
                (folder / name).unlink()
        except OSError as error:
            raise UserError(
                f"runtime.profile={str(folder)!r}: cannot write {error.filename or 'there'} "
                f"({error.strerror}); name a folder that can be written"
            ) from error

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; writes the files behind the last one."""
        if not self._over and self._profiler is None and self._seen >= self.skip:
            self._begin()
        if self._profiler is None:
            yield
            self._seen += 1
            return
        try:
            with record_function(f"{STEP}{self._seen}"):
                yield
            self._seen += 1
        except BaseException:
            self.end()
            raise
        if self._seen == self.skip + self.steps:
            self.end()

    def end(self) -> None:
        """Write what has been traced; says so if that is nothing, or less than was asked for.

        The main thread alone can end a profiler that it began; if another one asks for it, that
        happens when the process ends.
        """
        if self._over or (self._profiler is not None and not _in_main_thread()):
            return
        self._over = True
        if self._profiler is None:
            logger.warning(
                "runtime.profile: nothing was traced; the engine ran %d steps, and "
                "runtime.profile_skip=%d come before the first that is",
                self._seen,
                self.skip,
            )
            return
        self._synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        atexit.unregister(self.end)
        count = self._seen - self.skip
        if count < self.steps:
            logger.warning(
                "runtime.profile: %d of the runtime.profile_steps=%d steps asked for were traced",
                count,
                self.steps,
            )
        try:
            profiler.export_chrome_trace(str(self.folder / TRACE))
            trace = read_trace(self.folder / TRACE)
            (self.folder / TABLE).write_text(profile_table(trace) + "\n", encoding="utf-8")
        except OSError as error:  # the disk is full, say; the requests are none the worse for it
            logger.error("runtime.profile: cannot write into %s: %s", self.folder, error)
            return
        table = profile_table(trace, LOGGED)
        logger.info("profile:\n%s\nwritten to %s: %s, %s", table, self.folder, TABLE, TRACE)

    def _begin(self) -> None:
        if not _in_main_thread():
            # a profiler that its own thread does not end takes the process down with it, and
            # nothing tells a thread that it is about to end
            logger.warning(
                "runtime.profile: nothing is traced, since the engine's steps run in the thread "
                "%s; profile an LLM that the main thread runs",
                threading.current_thread().name,
            )
            self._over = True
            return
        self._synchronize()
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        atexit.register(self.end)  # if nobody closes the engine

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def profile_table(trace: dict[str, Any], most: int | None = None) -> str:
    """The time of the traced steps by kernel, in Markdown; by op if no kernel is in the trace.

    Args:
        most: rows, the longest first; the others are added up. None: all.

    A kernel's time is what is left of it when those before it have ended, so that all of them and
    the idle time add up to the time from the first one's start to the last one's end. An op's time
    is without the ops that it calls.
    """
    spans = host_spans(trace, STEP)
    steps = max(len(spans), 1)
    kernels = device_kernels(trace)
    sums: dict[str, list[float]] = {}  # count and microseconds
    idle = 0.0
    if kernels:
        what = "kernel"
        times = [
            (kernel.name, gap, own)
            for kernel, (gap, own) in zip(kernels, gaps_and_times(kernels), strict=True)
        ]
    else:
        what = "op"
        times = [(name, 0.0, us) for name, us in op_self_times(trace)]
    for name, gap, own in times:
        row = sums.setdefault(name, [0, 0.0])
        row[0] += 1
        row[1] += own
        idle += gap
    host = sum(span.duration for span in spans)
    busy = sum(us for _, us in sums.values())
    rest = idle if kernels else max(host - busy, 0.0)
    whole = busy + rest or 1.0
    lines = [
        f"{len(spans)} steps, {host / steps / 1000:.3f} ms each on the host; "
        + (f"{whole / steps / 1000:.3f} ms on the device" if kernels else "all of it on the CPU"),
        "",
        f"| {what} | calls a step | µs a step | share |",
        "| --- | ---: | ---: | ---: |",
    ]
    rows = sorted(sums.items(), key=lambda item: -item[1][1])
    if most is not None and len(rows) > most:
        others = [row for _, row in rows[most:]]
        rows[most:] = [(f"({len(others)} others)", [sum(x) for x in zip(*others, strict=True)])]
    rows.append(("(idle)" if kernels else "(outside of ops)", [0, rest]))
    for name, (count, us) in rows:
        short = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
        calls = f"{count / steps:,.1f}" if count else ""
        cell = short.replace("|", "\\|")
        lines.append(f"| {cell} | {calls} | {us / steps:,.1f} | {100 * us / whole:.1f} % |")
    lines.append(f"| all | | {whole / steps:,.1f} | 100.0 % |")
    return "\n".join(lines)
