"""Kernels of `ops/decode_step.py`: a decode step's inputs, and the highest logit of each row.

A row of logits is long and rows are few, so several programs share a row, each keeping the best of
its part lane by lane; a second kernel compares the parts.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rows_of
from minivllm.ops.paged_attention import BLOCK_SIZE

BLOCK_BLOCKS = 256  # entries of a block table at a time
GREEDY_BLOCK = 2048  # logits at a time
GREEDY_WARPS = 4
GREEDY_PROGRAMS = 2048  # of all rows together: some 16 on each SM of a large GPU
MAX_PARTS = 256  # of a row: what the second kernel loads at once


@triton.jit(do_not_specialize=["width", "table_row"])
def _inputs_kernel(
    positions,
    slots,
    tokens,
    block_tables,
    input_ids,
    block_table,
    seq_lens,
    slot_mapping,
    row_stride,
    table_row,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + n * row_stride)
    slot = tl.load(slots + n * row_stride)
    table = block_tables + slot * table_row
    last = position // BLOCK_SIZE
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        blocks = tl.load(table + column, mask=column <= last, other=0)
        tl.store(block_table + n * width + column, blocks, mask=column < width)
    tl.store(input_ids + n, tl.load(tokens + slot))
    tl.store(seq_lens + n, tl.where(slot > 0, position + 1, 0).to(tl.int32))
    block = tl.load(table + last).to(tl.int64)
    tl.store(slot_mapping + n, block * BLOCK_SIZE + position % BLOCK_SIZE)


@triton.jit(do_not_specialize=["limit", "blocks", "parts"])
def _best_kernel(
    logits,
    best,
    best_ids,
    row_stride,
    limit,
    blocks,
    parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Part `program_id(0)` of a row: the highest logit of `blocks` blocks and its lowest id."""
    wait_for_inputs(PDL)
    part, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    begin = part * blocks * BLOCK
    end = tl.minimum(begin + blocks * BLOCK, limit)
    row = logits + n * row_stride
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.zeros([BLOCK], tl.int32) + begin  # where the block of a lane's highest begins
    for first in range(begin, end, BLOCK):
        # a mask that ends anywhere would split 16-byte loads, so only the last block has one
        if first + BLOCK <= end:
            values = tl.load(row + first + lane)
        else:
            values = tl.load(row + first + lane, mask=first + lane < end, other=float("-inf"))
        values = values.to(tl.float32)
        found = tl.where(values > highest, first, found)
        highest = tl.maximum(highest, values, propagate_nan=tl.PropagateNan.ALL)
    # NaN is no token either, and compares like a number from here on
    highest = tl.where(highest == highest, highest, float("inf"))
    value = tl.max(highest, axis=0)
    place = tl.min(tl.where(highest == value, found + lane, 2147483647), axis=0)
    tl.store(best + n * parts + part, value)
    tl.store(best_ids + n * parts + part, place)


@triton.jit(do_not_specialize=["parts"])
def _choose_kernel(
    best,
    best_ids,
    slots,
    greedy,
    tokens,
    slot_stride,
    parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n * slot_stride)
    part = tl.arange(0, BLOCK)
    values = tl.load(best + n * parts + part, mask=part < parts, other=float("-inf"))
    ids = tl.load(best_ids + n * parts + part, mask=part < parts, other=2147483647)
    value = tl.max(values, axis=0)
    token = tl.min(tl.where(values == value, ids, 2147483647), axis=0)
    chosen = tl.abs(value) < float("inf")
    tl.store(greedy + n, tl.where(chosen, token, -1).to(tl.int64))
    tl.store(tokens + slot, tl.where(chosen & (slot > 0), token, 0).to(tl.int64))


def decode_inputs(
    positions: Tensor, slots: Tensor, tokens: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `ops.decode_step.define_decode_inputs`.

    The first kernel of a step, so it starts only when all that was launched before has ended: no
    programmatic dependent launch. Behind it, a kernel of the step may read before its wait what no
    kernel of this step has written yet, such as a state.
    """
    rows, width = slots.shape[0], block_tables.shape[1]
    assert positions.stride() == slots.stride()
    input_ids = torch.empty(rows, dtype=torch.int64, device=slots.device)
    block_table = torch.empty(rows, width, dtype=torch.int32, device=slots.device)
    seq_lens = torch.empty(rows, dtype=torch.int32, device=slots.device)
    slot_mapping = torch.empty(rows, dtype=torch.int64, device=slots.device)
    _inputs_kernel[(rows,)](
        positions,
        slots,
        tokens,
        block_tables,
        input_ids,
        block_table,
        seq_lens,
        slot_mapping,
        slots.stride(0),
        rows_of(block_tables).token,
        width,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK=BLOCK_BLOCKS,
        num_warps=1,
    )
    return input_ids, block_table, seq_lens, slot_mapping


def greedy_tokens(
    logits: Tensor, slots: Tensor, vocab_limit: int, greedy: Tensor, tokens: Tensor
) -> None:
    """As `ops.decode_step.define_greedy_tokens`; `greedy` and `tokens` are contiguous."""
    rows = logits.shape[0]
    if rows == 0:
        return
    assert 0 < vocab_limit <= logits.shape[1]
    assert greedy.is_contiguous() and tokens.is_contiguous()
    blocks = triton.cdiv(vocab_limit, GREEDY_BLOCK)
    wanted = min(MAX_PARTS, triton.cdiv(GREEDY_PROGRAMS, rows))
    blocks_a_part = triton.cdiv(blocks, wanted)
    parts = triton.cdiv(blocks, blocks_a_part)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _best_kernel[(parts, rows)](
        logits,
        best,
        best_ids,
        rows_of(logits).token,
        vocab_limit,
        blocks_a_part,
        parts,
        BLOCK=GREEDY_BLOCK,
        num_warps=GREEDY_WARPS,
        **pdl(),
    )
    _choose_kernel[(rows,)](
        best,
        best_ids,
        slots,
        greedy,
        tokens,
        slots.stride(0),
        parts,
        BLOCK=MAX_PARTS,
        num_warps=1,
        **pdl(),
    )
