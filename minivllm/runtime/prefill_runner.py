"""The prefill graph: at its exact sizes, or captured in buckets of tokens and sequences on a GPU.

Owns the buckets and the choice among them. Does not own what the inputs hold (`prefill_inputs`),
the graph (`compiler/bind`), whose tokens it chooses (`newest_tokens`), CUDA Graphs (`captures`) nor
which prompts run.

    prefiller = PrefillRunner(executable, device, newest_tokens)
    prefiller.capture(buckets, rehearsal)
    logits = prefiller.run([Row(ids, 0, len(ids), slot=1, blocks=[1, 2])])

Called from Python, the kernels of a short prefill take the host longer than the GPU; a captured
one is one launch. A bucket has fixed numbers of tokens, sequences, KV blocks and wanted logits.

Shapes: R wanted rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable
from minivllm.runtime.captures import Captures
from minivllm.runtime.newest_tokens import NewestTokens
from minivllm.runtime.prefill_inputs import (
    TOKEN_SLOTS,
    Bucket,
    Row,
    bucket_layout,
    prefill_inputs,
)


def prefill_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> list[Bucket]:
    """Buckets up to 8,192 tokens: there the GPU takes about as long as the host does without one.

    One sequence beside the padding is what a single request needs. It has the finest steps, as
    padding is time to its first token; and few sequences run in other tiles than many.
    """
    coarse = [64, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256),
              *range(2048, 4096, 512), *range(4096, 8192 + 1024, 1024)]  # fmt: skip
    fine = [16, *(n for n in coarse if n < 2048), *range(2048, 4096, 256),
            *range(4096, 8192 + 512, 512)]  # fmt: skip
    kinds = [(2, fine), (8, coarse), (32, [n for n in coarse if n >= 512])]
    return sorted(
        Bucket(tokens, seqs)
        for seqs, sizes in kinds
        for tokens in sizes
        if tokens <= max_num_batched_tokens and (seqs == 2 or max_num_seqs >= seqs // 4)
    )


class PrefillRunner:
    """Runs parts of prompts.

    Args:
        prefill: the bound prefill graph.
        device: what it is bound to.
        newest: each slot's token; a step leaves those that come behind its rows there.

    Attributes:
        buckets: those captured, ascending.
        greedy: `[R]` int64: of each wanted row of the last run the most probable token, -1 where
            its logits hold NaN or infinity; valid until the next run. Its slot's newest token
            already: rows that are sampled in another way store theirs over it.
    """

    def __init__(self, prefill: Executable, device: torch.device, newest: NewestTokens) -> None:
        self.prefill = prefill
        self.device = device
        self.buckets: list[Bucket] = []
        self.captures: Captures | None = None
        self.greedy = torch.empty(0, dtype=torch.int64, device=device)
        self._newest = newest
        self._tokens: list[int] = []  # of each bucket
        self._static: dict[Bucket, Tensor] = {}  # inputs of each, in one storage
        self._static_greedy = self.greedy
        self._staging: _Staging | None = None

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket], rehearsal: Executable) -> None:
        """Capture these buckets; the GPU only.

        Args:
            buckets: at least one.
            rehearsal: runs what the graph runs, each call once; see `Captures.rehearse`.
        """
        self.buckets = sorted(buckets)
        self._tokens = [bucket.tokens for bucket in self.buckets]
        self.captures = Captures(self.device)
        size = max(bucket_layout(bucket).size for bucket in self.buckets)
        storage = torch.zeros(size, dtype=torch.uint8, device=self.device)
        width = max(bucket.rows for bucket in self.buckets)
        self._static_greedy = torch.zeros(width, dtype=torch.int64, device=self.device)
        self._static = {bucket: storage[: bucket_layout(bucket).size] for bucket in self.buckets}
        self._staging = _Staging(self._static, self.device)
        steps = {}
        for bucket in reversed(self.buckets):
            padding = prefill_inputs([], bucket)
            self._static[bucket].copy_(padding.tensor())
            inputs = padding.views(self._static[bucket])
            greedy = self._static_greedy[: bucket.rows]
            steps[bucket] = functools.partial(self.step, inputs, greedy)
            self.captures.rehearse(functools.partial(self.step, inputs, greedy, rehearsal))
        for bucket, step in steps.items():
            self.captures.capture(bucket, step)

    def bucket(self, rows: Sequence[Row]) -> Bucket | None:
        """The smallest captured bucket that holds these rows; None: they run at exact sizes."""
        tokens = sum(r.end - r.start for r in rows)
        blocks = sum(r.num_blocks for r in rows)
        wanted = sum(r.num_logits for r in rows)
        for bucket in self.buckets[bisect_left(self._tokens, tokens) :]:
            seqs = len(rows) + (tokens < bucket.tokens)
            if seqs <= bucket.seqs and blocks <= bucket.blocks and wanted <= bucket.rows:
                return bucket
        return None

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> Tensor:
        """The wanted logits, row after row, `[R, V]`; valid until the next run."""
        bucket = self.bucket(rows)
        if bucket is None or self.captures is None:
            inputs = prefill_inputs(rows)
            views = inputs.views(self._sent(inputs.tensor()))
            self.greedy = torch.empty_like(views[TOKEN_SLOTS])
            return self.step(views, self.greedy)
        assert self._staging is not None
        prefill_inputs(rows, bucket, self._staging.next())
        self._staging.send(bucket)
        try:
            logits = self.captures.replay(bucket)
        finally:
            self._staging.sent()
        wanted = sum(r.num_logits for r in rows)
        self.greedy = self._static_greedy[:wanted]
        return logits[:wanted]

    def step(
        self, inputs: Mapping[str, Tensor], greedy: Tensor, prefill: Executable | None = None
    ) -> Tensor:
        """What is captured: from inputs to the wanted logits, `[R, V]`, and `greedy`, `[R]`.

        Args:
            prefill: the graph in another form; None: as it is bound.
        """
        prefill = prefill or self.prefill
        logits = prefill(**{name: inputs[name] for name in prefill.inputs})
        self._newest.choose(logits, inputs[TOKEN_SLOTS], greedy)
        return logits

    def _sent(self, data: Tensor) -> Tensor:
        """On the device, without waiting for it."""
        data = data.pin_memory() if self.device.type == "cuda" else data
        return data.to(self.device, non_blocking=True)


class _Staging:
    """Page-locked memory that steps' inputs leave the host through, each time another buffer.

    What is between `next` and the replay is time to the first token: so nothing is sliced there,
    and what marks a buffer as read comes behind it.

    Args:
        static: where the inputs of each bucket go.
        device: where that is.
    """

    def __init__(
        self, static: Mapping[Bucket, Tensor], device: torch.device, count: int = 4
    ) -> None:
        self._device = device
        self._static = static
        size = max(map(len, static.values()))
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._buffers = [{b: buffer[: len(x)] for b, x in static.items()} for buffer in buffers]
        # written without torch, whose calls take long after a wait
        self._bytes = [
            memoryview((ctypes.c_ubyte * size).from_address(buffer.data_ptr())).cast("B")
            for buffer in buffers
        ]
        self._read = [torch.cuda.Event() for _ in range(count)]
        self._index = 0

    def next(self) -> memoryview:
        """The buffer to write to; waits only for the step of `count` steps ago."""
        self._index = (self._index + 1) % len(self._buffers)
        self._read[self._index].synchronize()
        return self._bytes[self._index]

    def send(self, bucket: Bucket) -> None:
        """Copy the buffer, which holds this bucket's inputs, to the device."""
        there = self._static[bucket]
        there.copy_(self._buffers[self._index][bucket], non_blocking=True)

    def sent(self) -> None:
        """The buffer may be written to again once all that was launched so far has run."""
        self._read[self._index].record(torch.cuda.current_stream(self._device))
