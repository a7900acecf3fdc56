"""The decode graph over static buffers, in buckets of rows: captured into CUDA Graphs on a GPU.

Owns buckets, padding and the static inputs. Does not own the graph (`compiler/bind`), the kernels
around it (`ops/decode_step`), the tokens that steps begin with (`newest_tokens`), CUDA Graphs
(`captures`) nor who decodes.

    decoder = DecodeRunner(executable, device, newest_tokens, max_num_seqs=256, max_blocks=32)
    decoder.capture(rehearsal)
    newest_tokens.store([3], torch.tensor([5]))
    logits = decoder.run(positions=[12], slots=[3], blocks=[[7]])

A step runs in the smallest bucket that holds its rows. Padding rows are token 0 at position 0 of
slot 0 with length 0: they read and write only what belongs to nobody. What a row needs is found by
its slot, never by its place in the batch: its newest token and its block table lie on the device.
So a step can be launched before the host has seen the tokens of the one before it, and sends only
blocks that are new. A CPU runs the same code without a capture.

Shapes: N rows of a bucket, S slots, B blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable
from minivllm.ops.decode_step import DECODE_INPUTS
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.captures import Captures
from minivllm.runtime.newest_tokens import NewestTokens

ROWS = ("positions", "state_slots")  # of the buffer that a step's one copy fills


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that are run: 1, 2, 4, then steps of 8, 16 and 32 up to the largest batch."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [*(n for n in steps if n < max_num_seqs), max_num_seqs]


class DecodeRunner:
    """Runs one token of each of up to `max_num_seqs` sequences.

    Args:
        decode: the bound decode graph.
        device: what it is bound to.
        newest: each slot's token; a step takes its rows' from there and leaves the next there.
        max_num_seqs: rows of the largest bucket.
        max_blocks: B.
        implementations: op name to the implementation forced on it.
        checked: assert before every run that the inputs are legal and that no static buffer has
            moved; costs host time, meant for tests.

    Attributes:
        buckets: batch sizes, ascending.
        implementations: of the op before the graph, by name.
        block_tables: `[S, B]` int32, blocks of the sequence in each slot; row 0 is zeros.
        tokens: `[S]` int64, `newest`'s.
        greedy: each row's most probable token of the last run, -1 where its logits hold NaN or
            infinity; the first `len(slots)` rows. Its slot's newest token already: rows that are
            sampled in another way store theirs over it.
    """

    def __init__(
        self,
        decode: Executable,
        device: torch.device,
        newest: NewestTokens,
        *,
        max_num_seqs: int,
        max_blocks: int,
        implementations: Mapping[str, str] | None = None,
        checked: bool = False,
    ) -> None:
        self.decode = decode
        self.device = device
        self.buckets = bucket_sizes(max_num_seqs)
        # rows of a multiple of 16 elements: every bucket's slices are equally aligned, so that
        # kernels are built once
        width = -(-max_num_seqs // 16) * 16
        self.rows = torch.zeros(len(ROWS), width, dtype=torch.int64, device=device)
        self.tokens = newest.tokens
        num_slots = len(self.tokens)
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self.greedy = torch.zeros(width, dtype=torch.int64, device=device)
        self._newest = newest
        forced = (implementations or {}).get(DECODE_INPUTS.name)
        # it copies, the same in every dtype
        self._inputs, _ = DECODE_INPUTS.choose(device, torch.float32, forced)
        self.implementations = {DECODE_INPUTS.name: self._inputs.name}
        self._written: list[list[int]] = [[] for _ in range(num_slots)]
        self.captures: Captures | None = None
        self._checked = checked
        self._addresses = self._static_addresses()

    @torch.inference_mode()
    def capture(self, rehearsal: Executable) -> None:
        """Capture every bucket; the GPU only.

        Args:
            rehearsal: runs what the graph runs, each call once; see `Captures.rehearse`.
        """
        self.captures = Captures(self.device)
        self.rows.zero_()  # all are padding
        for size in reversed(self.buckets):
            self.captures.rehearse(functools.partial(self._step, size, rehearsal))
        for size in reversed(self.buckets):
            self.captures.capture(size, functools.partial(self._step, size, self.decode))

    @torch.inference_mode()
    def run(
        self,
        positions: Sequence[int],
        slots: Sequence[int],
        blocks: Sequence[Sequence[int]],
    ) -> Tensor:
        """Run the newest token of each row's slot.

        Args:
            positions: of those tokens.
            slots: of each row, all different, none of them 0.
            blocks: of each row, enough for its position.

        Returns:
            Logits `[len(slots), V]`; valid until the next run.
        """
        count = len(slots)
        size = next(n for n in self.buckets if n >= count)
        if self._checked:
            self._check(positions, slots, blocks)
        self._send_blocks(slots, blocks)
        padding = [0] * (self.rows.shape[1] - count)
        host = torch.tensor([[*row, *padding] for row in (positions, slots)])
        self.rows.copy_(self._staged(host), non_blocking=True)
        if self.captures is None:
            return self._step(size, self.decode)[:count]
        return self.captures.replay(size)[:count]

    def _step(self, size: int, decode: Executable) -> Tensor:
        """What is captured: from the static rows to logits, `[size, V]`, and greedy tokens."""
        rows = {name: row[:size] for name, row in zip(ROWS, self.rows, strict=True)}
        positions, slots = rows["positions"], rows["state_slots"]
        input_ids, block_table, seq_lens, slot_mapping = self._inputs.call(
            positions, slots, self.tokens, self.block_tables
        )
        logits = decode(
            input_ids=input_ids,
            **rows,
            block_table=block_table,
            seq_lens=seq_lens,
            slot_mapping=slot_mapping,
        )
        self._newest.choose(logits, slots, self.greedy[:size])
        return logits

    def _send_blocks(self, slots: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Bring the block tables up to date; usually nothing, or a block for a few rows."""
        changes: list[tuple[int, int, int]] = []
        rows: dict[int, list[int]] = {}
        for slot, row in zip(slots, blocks, strict=True):
            written = self._written[slot]
            if written == row:
                continue
            kept = len(written) if row[: len(written)] == written else 0
            changes += [(slot, column, row[column]) for column in range(kept, len(row))]
            rows[slot] = list(row)
        if changes:
            packed = self._staged(torch.tensor(changes).T.contiguous())
            row_index, column_index, values = packed.to(self.device, non_blocking=True)
            self.block_tables.index_put_((row_index, column_index), values.int())
        for slot, row in rows.items():  # now that the device has them
            self._written[slot] = row

    def _staged(self, host: Tensor) -> Tensor:
        return host.pin_memory() if self.device.type == "cuda" else host

    def _static_addresses(self) -> tuple[int, ...]:
        static = (self.rows, self.block_tables, self.tokens, self.greedy)
        return tuple(x.data_ptr() for x in static)

    def _check(
        self,
        positions: Sequence[int],
        slots: Sequence[int],
        blocks: Sequence[Sequence[int]],
    ) -> None:
        assert self._static_addresses() == self._addresses, "a static buffer has moved"
        assert len(positions) == len(slots) == len(blocks), "rows of other steps"
        assert len(set(slots)) == len(slots), f"a slot runs twice: {slots}"
        assert all(0 < s < len(self._written) for s in slots), slots
        assert min(positions) >= 0, positions
        for position, row in zip(positions, blocks, strict=True):
            assert position < len(row) * BLOCK_SIZE and 0 not in row, (position, row)
            assert len(row) <= self.block_tables.shape[1], len(row)
