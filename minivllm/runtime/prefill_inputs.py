"""A prefill's inputs on the host: exact, or padded to a bucket's sizes.

Owns what they hold and how they lie: side by side in one row of bytes, which one copy brings to
the device. Does not own the choice of a bucket nor the graph (`prefill_runner`).

    inputs = prefill_inputs([Row(ids, 0, len(ids), slot=1, blocks=[1, 2])], Bucket(64, 2))
    there.copy_(inputs.tensor())
    prefill(**inputs.views(there))

Surplus tokens form a last sequence of slot 0 and block 0, which belong to nobody; sequences
between it and the given ones are empty (`ops.fla.padded_chunk_lists`).

Shapes: T tokens, N sequences, C chunks, B KV blocks of all sequences together, R wanted rows.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.compiler.graph import INPUTS
from minivllm.ops.fla import CHUNK_SIZE, chunk_lists, max_chunks, padded_chunk_lists
from minivllm.ops.paged_attention import BLOCK_SIZE

ALIGNMENT = 16  # bytes: every input starts there in every bucket, or kernels would be built anew
HISTORY_BLOCKS = 256  # that a bucket has beside those of its own tokens: 16,384 tokens

# int64 numbers side by side in one: the places in block 0, and from each to that of the next block
_INSIDE = sum(i << 64 * i for i in range(BLOCK_SIZE))
_BLOCK = sum(BLOCK_SIZE << 64 * i for i in range(BLOCK_SIZE))


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


class PrefillInputs:
    """Inputs in the vocabulary of `compiler.graph.INPUTS`.

    Args:
        values: by name, as numbers of the input's dtype.

    Attributes:
        data: all of them, each from a multiple of `ALIGNMENT` on.
    """

    def __init__(self, values: Mapping[str, bytes | array[int]]) -> None:
        self.data = bytearray()
        self._ranges: dict[str, tuple[int, int]] = {}
        for name, x in values.items():
            start = len(self.data)
            self.data += x if isinstance(x, bytes) else x.tobytes()
            self._ranges[name] = start, len(self.data)
            self.data += bytes(-len(self.data) % ALIGNMENT)

    def views(self, data: Tensor | None = None) -> dict[str, Tensor]:
        """The inputs by name, as views of a copy of the bytes; None: of the bytes here."""
        there = self.tensor() if data is None else data
        views = {}
        for name, (start, end) in self._ranges.items():
            sizes = [d if isinstance(d, int) else -1 for d in INPUTS[name].dims]
            views[name] = there[start:end].view(INPUTS[name].dtype).view(sizes)
        return views

    def tensor(self) -> Tensor:
        """The bytes, as `[bytes]` uint8 over the same memory."""
        return torch.frombuffer(self.data, dtype=torch.uint8)


def prefill_inputs(rows: Sequence[Row], bucket: Bucket | None = None) -> PrefillInputs:
    """The inputs of a prefill of these rows.

    The first token waits for them. So what has an entry a token is no list, and nothing is a
    tensor: a call of torch is short in a loop, but ten times as long after milliseconds of waiting.

    Args:
        rows: any number; none is a bucket of padding alone.
        bucket: sizes to pad to; None: the exact ones.
    """
    lengths = [r.end - r.start for r in rows]
    total = sum(lengths)
    if bucket is None:
        tokens, seqs = total, len(rows)
        starts, chunk_indices = chunk_lists(lengths)
    else:
        tokens, seqs = bucket.tokens, bucket.seqs
        chunks = max_chunks(tokens, seqs)
        starts, chunk_indices = padded_chunk_lists(lengths, tokens, seqs, chunks)
    ids, places, positions = b"", b"", array("q")
    blocks: list[int] = []
    indptr = [0]
    wanted: list[int] = []
    begin = 0
    for row, length in zip(rows, lengths, strict=True):
        ids += struct.pack(f"={length}q", *row.token_ids[row.start : row.end])
        positions += _counted(row.end)[row.start : row.end]
        blocks += row.blocks[: row.num_blocks]
        places += _places(row)
        indptr.append(len(blocks))
        wanted += range(begin, begin + length) if row.all_logits else []
        begin += length
        wanted += [begin - 1] * row.copies
    padding = Row([], 0, tokens - total, slot=0, blocks=[0] * (-(-(tokens - total) // BLOCK_SIZE)))
    surplus = bytes(8 * (tokens - total))
    empty = [0] * (seqs - len(rows))
    more_blocks = [0] * (bucket.blocks - len(blocks) if bucket else 0)
    more_rows = [0] * (bucket.rows - len(wanted) if bucket else 0)
    values: dict[str, bytes | array[int]] = {
        "input_ids": ids + surplus,
        "positions": positions.tobytes() + surplus,
        "state_slots": array("q", [r.slot for r in rows] + empty),
        "num_computed_tokens": array("i", [r.start for r in rows] + empty),
        "kv_indptr": array("i", indptr + indptr[-1:] * len(empty)),
        "kv_indices": array("i", blocks + more_blocks),
        "seq_lens": array("i", [r.end for r in rows] + empty),
        "slot_mapping": places + _places(padding),
        "logits_rows": array("q", wanted + more_rows),
        "cu_seqlens": array("i", starts),
        "chunk_indices": array("i", chunk_indices),
        "chunk_slots": _chunk_slots(rows, len(chunk_indices) // 2),
    }
    return PrefillInputs(values)


def _counted(end: int) -> array[int]:
    """0, 1, 2 and so on, to `end` at least; made once."""
    return _counted_to(1 << max(end - 1, 4095).bit_length())


@functools.cache
def _counted_to(end: int) -> array[int]:
    return array("q", range(end))


def _chunk_slots(rows: Sequence[Row], chunks: int) -> array[int]:
    """The entry that keeps the state behind each chunk; 0: none."""
    entries = array("i", bytes(4 * chunks))
    first = 0
    for row in rows:
        for end, entry in row.snapshots:
            offset, inside = divmod(end - row.start, CHUNK_SIZE)
            assert row.start < end <= row.end and not inside, (row.start, end, row.end)
            entries[first + offset - 1] = entry
        first += -(-(row.end - row.start) // CHUNK_SIZE)
    return entries


def _places(row: Row) -> bytes:
    """The place in the KV cache of each of its tokens, int64: a block's places are one number."""
    first = row.start // BLOCK_SIZE
    begin = first * BLOCK_SIZE
    of_blocks = [
        (_INSIDE + block * _BLOCK).to_bytes(8 * BLOCK_SIZE, "little")
        for block in row.blocks[first : row.num_blocks]
    ]
    return b"".join(of_blocks)[8 * (row.start - begin) : 8 * (row.end - begin)]
