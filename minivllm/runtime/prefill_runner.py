"""The prefill graph: at its exact sizes, or captured in buckets of tokens and sequences on a GPU.

Owns the buckets and the choice among them. Does not own what the inputs hold (`prefill_inputs`),
the graph (`compiler/bind`), CUDA Graphs (`captures`) nor which prompts run.

    prefiller = PrefillRunner(executable, device)
    prefiller.capture(buckets)
    logits = prefiller.run([Row(ids, 0, len(ids), slot=1, blocks=[1, 2])])

Called from Python, the kernels of a short prefill take the host longer than the GPU; a captured
one is one launch. A bucket has fixed numbers of tokens, sequences, KV blocks and wanted logits.

Shapes: V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable
from minivllm.runtime.captures import Captures
from minivllm.runtime.prefill_inputs import Bucket, Row, prefill_inputs


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

    Attributes:
        buckets: those captured, ascending.
    """

    def __init__(self, prefill: Executable, device: torch.device) -> None:
        self.prefill = prefill
        self.device = device
        self.buckets: list[Bucket] = []
        self.captures: Captures | None = None
        self._static: dict[Bucket, Tensor] = {}  # inputs of each, in one storage
        self._staging: _Staging | None = None

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket]) -> None:
        """Capture these buckets, if there are any; the GPU only."""
        if not buckets:
            return
        self.buckets = sorted(buckets)
        self.captures = Captures(self.device)
        inputs = {bucket: prefill_inputs([], bucket) for bucket in self.buckets}
        size = max(len(of_bucket.data) for of_bucket in inputs.values())
        storage = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._staging = _Staging(size, self.device)
        steps = {}
        for bucket in reversed(self.buckets):
            of_bucket = inputs[bucket]
            there = self._static[bucket] = storage[: len(of_bucket.data)]
            there.copy_(of_bucket.tensor())
            steps[bucket] = functools.partial(self._step, of_bucket.views(there))
            self.captures.rehearse(steps[bucket])
        for bucket, step in steps.items():
            self.captures.capture(bucket, step)

    def bucket(self, rows: Sequence[Row]) -> Bucket | None:
        """The smallest captured bucket that holds these rows; None: they run at exact sizes."""
        tokens = sum(r.end - r.start for r in rows)
        blocks = sum(r.num_blocks for r in rows)
        wanted = sum(r.num_logits for r in rows)
        for bucket in self.buckets:
            seqs = len(rows) + (tokens < bucket.tokens)
            if (
                tokens <= bucket.tokens
                and seqs <= bucket.seqs
                and blocks <= bucket.blocks
                and wanted <= bucket.rows
            ):
                return bucket
        return None

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> Tensor:
        """The wanted logits, row after row, `[sum of num_logits, V]`; valid until the next run."""
        bucket = self.bucket(rows)
        if bucket is None or self.captures is None:
            inputs = prefill_inputs(rows)
            return self._step(inputs.views(self._sent(inputs.tensor())))
        assert self._staging is not None
        self._staging.send(prefill_inputs(rows, bucket).data, self._static[bucket])
        return self.captures.replay(bucket)[: sum(r.num_logits for r in rows)]

    def _sent(self, data: Tensor) -> Tensor:
        """On the device, without waiting for it."""
        data = data.pin_memory() if self.device.type == "cuda" else data
        return data.to(self.device, non_blocking=True)

    def _step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.prefill(**{name: inputs[name] for name in self.prefill.inputs})


class _Staging:
    """Page-locked memory that steps' inputs leave the host through, each time another buffer.

    Args:
        size: bytes of the largest step's.
        device: where they go.
    """

    def __init__(self, size: int, device: torch.device, count: int = 4) -> None:
        self._device = device
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)
        ]
        # written without torch, whose calls take long after a wait
        self._bytes = [
            memoryview((ctypes.c_ubyte * size).from_address(buffer.data_ptr())).cast("B")
            for buffer in self._buffers
        ]
        self._read = [torch.cuda.Event() for _ in range(count)]
        self._next = 0

    def send(self, data: bytearray, there: Tensor) -> None:
        """Copy to the device; the host waits only for the copy of `count` steps ago."""
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._read[index].synchronize()
        self._bytes[index][: len(data)] = data
        there.copy_(self._buffers[index][: len(data)], non_blocking=True)
        self._read[index].record(torch.cuda.current_stream(self._device))
