"""The prefill graph: at its exact sizes, or captured in buckets of tokens and sequences on a GPU.

Owns the inputs of a prefill, their padding to a bucket, and the choice of the bucket. Does not own
the graph (`compiler/bind`), CUDA Graphs (`captures`) nor which prompts run.

    prefiller = PrefillRunner(executable, device)
    prefiller.capture(buckets)
    logits = prefiller.run([Row(ids, 0, len(ids), slot=1, blocks=[1, 2])])

Called from Python, the kernels of a short prefill take the host longer than the GPU; a captured
one is one launch. A bucket has fixed numbers of tokens, sequences, KV blocks and wanted logits.
Surplus tokens form a last sequence of slot 0 and block 0, which belong to nobody; sequences
between it and the given ones are empty (`ops.fla.padded_chunk_metadata`).

Shapes: T tokens, N sequences, B KV blocks of all sequences together, R wanted rows, V vocabulary.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable
from minivllm.compiler.graph import INPUTS
from minivllm.ops.fla import CHUNK_SIZE, chunk_metadata, max_chunks, padded_chunk_metadata
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.captures import Captures

ALIGNMENT = 16  # bytes: every input starts there in every bucket, or kernels would be built anew
HISTORY_BLOCKS = 256  # that a bucket has beside those of its own tokens: 16,384 tokens


@dataclass(frozen=True)
class Row:
    """One sequence's part of a prefill.

    Attributes:
        token_ids: the sequence; `[start, end)` of it runs in this step.
        start: tokens that earlier steps have run.
        end: where this step's part ends.
        slot: its entry in the slot pools; never 0.
        blocks: its KV blocks in order, enough for `end` tokens; never 0.
        copies: how often the logits behind `end` are wanted: once, or once for each completion.
        all_logits: the logits behind every token of the part are wanted too, before those.
        snapshots: where states are kept on the way: token counts in (start, end], whole blocks
            behind `start`, and entries of the slot pools. Only if the graph has `chunk_slots`.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    slot: int
    blocks: Sequence[int]
    copies: int = 1
    all_logits: bool = False
    snapshots: Sequence[tuple[int, int]] = ()

    @property
    def num_blocks(self) -> int:
        """KV blocks that hold its tokens up to `end`."""
        return -(-self.end // BLOCK_SIZE)

    @property
    def num_logits(self) -> int:
        """Rows of logits that are wanted."""
        return self.copies + (self.end - self.start) * self.all_logits


@dataclass(frozen=True, order=True)
class Bucket:
    """Sizes of a captured prefill: T, N, and from them B and R."""

    tokens: int
    seqs: int

    @property
    def blocks(self) -> int:
        """B: a block for each 64 tokens, a begun one for each sequence, and some history."""
        return self.tokens // BLOCK_SIZE + self.seqs + HISTORY_BLOCKS

    @property
    def rows(self) -> int:
        """R: one for each sequence."""
        return self.seqs


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

    @torch.inference_mode()
    def capture(self, buckets: Sequence[Bucket]) -> None:
        """Capture these buckets; the GPU only."""
        self.buckets = sorted(buckets)
        self.captures = Captures(self.device)
        inputs = {bucket: self.inputs([], bucket) for bucket in self.buckets}
        packed = {bucket: pack(of_bucket) for bucket, of_bucket in inputs.items()}
        size = max(len(p) for p in packed.values())
        storage = torch.zeros(size, dtype=torch.uint8, device=self.device)
        for bucket in reversed(self.buckets):
            there = self._static[bucket] = storage[: len(packed[bucket])]
            there.copy_(packed[bucket])
            views = unpack(there, inputs[bucket])
            run = functools.partial(self.prefill, **{n: views[n] for n in self.prefill.inputs})
            self.captures.capture(bucket, run)

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
            inputs = self.inputs(rows)
            return self.prefill(**self._send({n: inputs[n] for n in self.prefill.inputs}))
        there = self._static[bucket]
        packed = pack(self.inputs(rows, bucket))
        there.copy_(packed.pin_memory(), non_blocking=True)
        return self.captures.replay(bucket)[: sum(r.num_logits for r in rows)]

    def inputs(self, rows: Sequence[Row], bucket: Bucket | None = None) -> dict[str, Tensor]:
        """The inputs of a prefill on the CPU, in the vocabulary of `compiler.graph.INPUTS`.

        Args:
            bucket: sizes to pad to; None: the exact ones.
        """
        lengths = [r.end - r.start for r in rows]
        total = sum(lengths)
        if bucket is None:
            bucket = Bucket(total, len(rows))
            metadata = chunk_metadata(lengths)
            surplus = surplus_blocks = surplus_rows = empty = 0
        else:
            chunks = max_chunks(bucket.tokens, bucket.seqs)
            metadata = padded_chunk_metadata(lengths, bucket.tokens, bucket.seqs, chunks)
            surplus, empty = bucket.tokens - total, bucket.seqs - len(rows)
            surplus_blocks = bucket.blocks - sum(r.num_blocks for r in rows)
            surplus_rows = bucket.rows - sum(r.num_logits for r in rows)
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        indptr = [0]
        wanted: list[int] = []
        for row in rows:
            begin = len(ids)
            ids += row.token_ids[row.start : row.end]
            positions += range(row.start, row.end)
            own = list(row.blocks[: row.num_blocks])
            for index in range(row.start // BLOCK_SIZE, row.num_blocks):
                first = own[index] * BLOCK_SIZE
                skip = max(row.start - index * BLOCK_SIZE, 0)
                places += range(first + skip, first + min(row.end - index * BLOCK_SIZE, BLOCK_SIZE))
            blocks += own
            indptr.append(len(blocks))
            wanted += range(begin, len(ids)) if row.all_logits else []
            wanted += [len(ids) - 1] * row.copies
        places += [i % BLOCK_SIZE for i in range(surplus)]
        zeros = [0] * empty
        values = {
            "input_ids": ids + [0] * surplus,
            "positions": positions + [0] * surplus,
            "state_slots": [r.slot for r in rows] + zeros,
            "num_computed_tokens": [r.start for r in rows] + zeros,
            "kv_indptr": indptr + indptr[-1:] * empty,
            "kv_indices": blocks + [0] * surplus_blocks,
            "seq_lens": [r.end for r in rows] + zeros,
            "slot_mapping": places,
            "logits_rows": wanted + [0] * surplus_rows,
        }
        tensors = {n: _tensor(v, INPUTS[n].dtype) for n, v in values.items()}
        cu_seqlens, chunk_indices = metadata
        return tensors | {
            "cu_seqlens": cu_seqlens,
            "chunk_indices": chunk_indices,
            "chunk_slots": _chunk_slots(rows, len(chunk_indices)),
        }

    def _send(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors from the host to the device, without waiting for the device."""
        if self.device.type == "cpu":
            return inputs
        packed = pack(inputs)
        return unpack(packed.pin_memory().to(self.device, non_blocking=True), inputs)


def _tensor(values: list[int], dtype: torch.dtype) -> Tensor:
    """A list as a tensor, four times as fast as by `torch.tensor`."""
    if not values:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(array("q" if dtype == torch.int64 else "i", values), dtype=dtype)


def _chunk_slots(rows: Sequence[Row], chunks: int) -> Tensor:
    """`[chunks]` int32: the entry that keeps the state behind each chunk; 0: none."""
    entries = [0] * chunks
    first = 0
    for row in rows:
        for end, entry in row.snapshots:
            offset, inside = divmod(end - row.start, CHUNK_SIZE)
            assert row.start < end <= row.end and not inside, (row.start, end, row.end)
            entries[first + offset - 1] = entry
        first += -(-(row.end - row.start) // CHUNK_SIZE)
    return torch.tensor(entries, dtype=torch.int32)


def pack(tensors: dict[str, Tensor]) -> Tensor:
    """All tensors as one row of bytes, which one copy moves."""
    parts = []
    for x in tensors.values():
        data = x.contiguous().view(-1).view(torch.uint8)
        parts += [data, torch.zeros(-len(data) % ALIGNMENT, dtype=torch.uint8)]
    return torch.cat(parts)


def unpack(packed: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `pack(like)` as views of a copy of its bytes."""
    views, at = {}, 0
    for name, x in like.items():
        size = x.numel() * x.element_size()
        views[name] = packed[at : at + size].view(x.dtype).view(x.shape)
        at += size + -size % ALIGNMENT
    return views
