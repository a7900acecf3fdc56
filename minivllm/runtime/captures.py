"""CUDA Graphs of one runner: captured before the first request, replayed after.

Owns capture and replay; the only file that knows CUDA Graphs. Does not own static inputs
(`decode_runner`, `prefill_runner`).

    captures = Captures(device)
    captures.rehearse(lambda: some_of(256))          # every size that will be captured
    captures.capture(256, lambda: step(256))         # the largest first
    logits = captures.replay(256)

All graphs of a `Captures` share one memory pool: the largest is captured first, so that what
smaller ones need besides their outputs fits into what it took. Each graph keeps its output, which
its next replay overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Captures:
    """Graphs by key.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def rehearse(self, run: Callable[[], object]) -> None:
        """Run each kernel that will be captured: its first run loads it, which a capture must not.

        A model's layers run the same kernels, so its skeleton does as well as all of it.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def capture(self, key: Hashable, run: Callable[[], Tensor]) -> None:
        """Capture `run`, which reads static tensors only; its result is the graph's output.

        The first capture frees the memory that rehearsals took. `torch.cuda.graph` would do so
        before each, for 30 ms a graph.
        """
        assert key not in self, f"{key} is captured already"
        if not self._graphs:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                output = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._graphs[key] = graph, output

    def replay(self, key: Hashable) -> Tensor:
        """Run a captured graph; its next replay overwrites the output."""
        graph, output = self._graphs[key]
        graph.replay()
        return output
