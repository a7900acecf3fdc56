"""A prefill's inputs on the host: exact, or padded to a bucket's sizes.

Owns what they hold and how they lie: side by side in one row of bytes, which one copy brings to
the device. Does not own the choice of a bucket nor the graph (`prefill_runner`).

    inputs = prefill_inputs([Row(ids, 0, len(ids), slot=1, blocks=[1, 2])], Bucket(64, 2))
    there.copy_(inputs.tensor())
    views = inputs.views(there)
    prefill(**{name: views[name] for name in prefill.inputs})

Surplus tokens form a last sequence of slot 0 and block 0, which belong to nobody; sequences
between it and the given ones are empty (`ops.chunks.padded_chunk_lists`).

Shapes: T tokens, N sequences, C chunks, B KV blocks of all sequences together, R wanted rows.
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.compiler.graph import INPUTS, InputSpec
from minivllm.ops.chunks import CHUNK_SIZE, chunk_lists, max_chunks, padded_chunk_lists
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.request import packed

ALIGNMENT = 16  # bytes: every input starts there in every bucket, or kernels would be built anew
HISTORY_BLOCKS = 256  # that a bucket has beside those of its own tokens: 16,384 tokens
TOKEN_SLOTS = "token_slots"  # of no graph: what is launched behind it reads them

OF_TOKENS = ("input_ids", "positions", "slot_mapping")  # long: copied, not packed number by number
SPECS = {
    **{name: INPUTS[name] for name in OF_TOKENS},
    **{name: spec for name, spec in INPUTS.items() if name not in (*OF_TOKENS, "block_table")},
    TOKEN_SLOTS: InputSpec(("rows",), torch.int64, "slot that goes on from each row; 0: nobody's"),
}
CODES = {torch.int64: "q", torch.int32: "i"}  # of `struct`

# The places in a block are int64 numbers, 64 * block + 0 to 63; byte by byte, little end first:
# those that a block's lowest two bits give to byte 0, and a byte of what is above them, repeated.
_LOWEST = [bytes(range(n * BLOCK_SIZE, (n + 1) * BLOCK_SIZE)) for n in range(4)]
_REPEATED = [bytes([n]) * BLOCK_SIZE for n in range(256)]


@dataclass(frozen=True)
class Row:
    """One sequence's part of a prefill.

    Attributes:
        token_ids: the sequence; `[start, end)` of it runs in this step. As an array of 64-bit
            numbers it is only copied.
        start: tokens that earlier steps have run.
        end: where this step's part ends.
        slot: its entry in the slot pools; never 0.
        blocks: its KV blocks in order, enough for `end` tokens; never 0.
        copies: how often the logits behind `end` are wanted: once, or once for each completion.
        all_logits: the logits behind every token of the part are wanted too, before those.
        snapshots: where states are kept on the way: token counts in (start, end], whole blocks
            behind `start`, and entries of the slot pools. Only if the graph has `chunk_slots`.
        fork_slots: where the completions behind the first go on; those of other copies nowhere.
    """

    token_ids: Sequence[int]
    start: int
    end: int
    slot: int
    blocks: Sequence[int]
    copies: int = 1
    all_logits: bool = False
    snapshots: Sequence[tuple[int, int]] = ()
    fork_slots: Sequence[int] = ()

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


class Layout:
    """Where each input lies: one behind the other, each from a multiple of `ALIGNMENT` on.

    Args:
        tokens, seqs, rows, blocks, chunks: T, N, R, B and C.

    Attributes:
        ranges: first byte and end of each input, by name.
        size: bytes in all.
        lengths: numbers in each input that is not `OF_TOKENS`.
        numbers: the form of all of those together, which lie at the end.
    """

    def __init__(self, tokens: int, seqs: int, rows: int, blocks: int, chunks: int) -> None:
        sizes = {"tokens": tokens, "seqs": seqs, "seqs + 1": seqs + 1, "rows": rows,
                 "kv_blocks": blocks, "chunks": chunks}  # fmt: skip
        self.ranges: dict[str, tuple[int, int]] = {}
        self.lengths: dict[str, int] = {}
        self.size = 0
        form = "="
        for name, spec in SPECS.items():
            length = math.prod(dim if isinstance(dim, int) else sizes[dim] for dim in spec.dims)
            end = self.size + length * spec.dtype.itemsize
            gap = -end % ALIGNMENT
            self.ranges[name] = self.size, end
            self.size = end + gap
            if name not in OF_TOKENS:
                self.lengths[name] = length
                form += f"{length}{CODES[spec.dtype]}{gap}x"
        self.numbers = struct.Struct(form)


@functools.cache
def bucket_layout(bucket: Bucket) -> Layout:
    """Of all prefills that run in this bucket."""
    chunks = max_chunks(bucket.tokens, bucket.seqs)
    return Layout(bucket.tokens, bucket.seqs, bucket.rows, bucket.blocks, chunks)


class PrefillInputs:
    """Inputs by the names of `SPECS`.

    Args:
        layout: how they lie in `data`.

    Attributes:
        data: all of them, as bytes.
    """

    def __init__(self, layout: Layout, data: memoryview) -> None:
        self.data = data
        self._ranges = layout.ranges

    def views(self, data: Tensor | None = None) -> dict[str, Tensor]:
        """The inputs by name, as views of a copy of the bytes; None: of the bytes here."""
        there = self.tensor() if data is None else data
        views = {}
        for name, (start, end) in self._ranges.items():
            sizes = [d if isinstance(d, int) else -1 for d in SPECS[name].dims]
            views[name] = there[start:end].view(SPECS[name].dtype).view(sizes)
        return views

    def tensor(self) -> Tensor:
        """The bytes, as `[bytes]` uint8 over the same memory."""
        return torch.frombuffer(self.data, dtype=torch.uint8)


def prefill_inputs(
    rows: Sequence[Row], bucket: Bucket | None = None, into: memoryview | None = None
) -> PrefillInputs:
    """The inputs of a prefill of these rows.

    The first token waits for them. So what has an entry a token is no list, and nothing is a
    tensor: a call of torch is short in a loop, but ten times as long after milliseconds of waiting.

    Args:
        rows: any number; none is a bucket of padding alone.
        bucket: sizes to pad to; None: the exact ones.
        into: bytes to write them to, whatever was there; None: new ones.
    """
    lengths = [r.end - r.start for r in rows]
    ids, positions, places = [], [], []
    blocks: list[int] = []
    indptr = [0]
    wanted: list[int] = []
    token_slots: list[int] = []
    begin = 0
    for row, length in zip(rows, lengths, strict=True):
        ids.append(packed(row.token_ids, row.start, row.end))
        positions.append(_counted(row.end)[8 * row.start : 8 * row.end])
        places.append(_places(row.blocks, row.start, row.end))
        blocks += row.blocks[: row.num_blocks]
        indptr.append(len(blocks))
        if row.all_logits:
            wanted += range(begin, begin + length)
            token_slots += [0] * length
        begin += length
        if row.copies:
            assert len(row.fork_slots) < row.copies, (row.fork_slots, row.copies)
            wanted += [begin - 1] * row.copies
            token_slots += [row.slot, *row.fork_slots]
            token_slots += [0] * (len(wanted) - len(token_slots))
    if bucket is None:
        starts, chunk_indices = chunk_lists(lengths)
        chunks = len(chunk_indices) // 2
        layout = Layout(begin, len(rows), len(wanted), len(blocks), chunks)
    else:
        chunks = max_chunks(bucket.tokens, bucket.seqs)
        starts, chunk_indices = padded_chunk_lists(lengths, bucket.tokens, bucket.seqs, chunks)
        layout = bucket_layout(bucket)
        surplus = bucket.tokens - begin
        places.append(_places([0] * -(-surplus // BLOCK_SIZE), 0, surplus))
        indptr += indptr[-1:] * (bucket.seqs - len(rows))
    data = memoryview(bytearray(layout.size)) if into is None else into[: layout.size]
    for name, parts in (("input_ids", ids), ("positions", positions), ("slot_mapping", places)):
        _write(data, *layout.ranges[name], parts)
    values = {
        "state_slots": [r.slot for r in rows],
        "num_computed_tokens": [r.start for r in rows],
        "kv_indptr": indptr,
        "kv_indices": blocks,
        "seq_lens": [r.end for r in rows],
        "logits_rows": wanted,
        "cu_seqlens": starts,
        "chunk_indices": chunk_indices,
        "chunk_slots": _chunk_slots(rows),
        TOKEN_SLOTS: token_slots,
    }
    numbers: list[int] = []
    for name, length in layout.lengths.items():
        numbers += values[name]
        numbers += [0] * (length - len(values[name]))
    layout.numbers.pack_into(data, layout.size - layout.numbers.size, *numbers)
    return PrefillInputs(layout, data)


def _write(data: memoryview, start: int, end: int, parts: Iterable[bytes | memoryview]) -> None:
    """These bytes, and zeros behind them."""
    for part in parts:
        data[start : start + len(part)] = part
        start += len(part)
    data[start:end] = bytes(end - start)


def _counted(end: int) -> memoryview:
    """0, 1, 2 and so on, to `end` at least, as int64; made once."""
    return _counted_to(1 << max(end - 1, 4095).bit_length())


@functools.cache
def _counted_to(end: int) -> memoryview:
    return memoryview(array("q", range(end))).cast("B")


def _chunk_slots(rows: Sequence[Row]) -> list[int]:
    """The entry that keeps the state behind each chunk; 0: none."""
    entries: list[int] = []
    for row in rows:
        of_row = [0] * -(-(row.end - row.start) // CHUNK_SIZE)
        for end, entry in row.snapshots:
            offset, inside = divmod(end - row.start, CHUNK_SIZE)
            assert row.start < end <= row.end and not inside, (row.start, end, row.end)
            of_row[offset - 1] = entry
        entries += of_row
    return entries


def _places(blocks: Sequence[int], start: int, end: int) -> memoryview:
    """The places in the KV cache of tokens [start, end) of a sequence with these blocks, int64."""
    first = start // BLOCK_SIZE
    used = blocks[first : -(-end // BLOCK_SIZE)]
    places = bytearray(8 * BLOCK_SIZE * len(used))
    places[0::8] = b"".join([_LOWEST[block & 3] for block in used])
    above = [block >> 2 for block in used]
    byte = 1
    while any(above):
        places[byte::8] = b"".join([_REPEATED[n & 255] for n in above])
        above = [n >> 8 for n in above]
        byte += 1
    begin = 8 * BLOCK_SIZE * first
    return memoryview(places)[8 * start - begin : 8 * end - begin]
