"""The two ends of a decode step: its inputs by slot, and the most probable token of each row.

    input_ids, block_table, seq_lens, slot_mapping = torch.ops.minivllm.decode_inputs(
        positions, slots, tokens, block_tables)
    torch.ops.minivllm.greedy_tokens(logits, slots, vocab_limit, greedy, tokens)

Owns what is computed around the decode graph on the device; the graph itself holds neither op. The
runtime calls them (`runtime/decode_runner.py`).

Shapes: N rows, S slots, B blocks of the longest sequence, V columns of the logits. Rows of slot 0
are padding; all others have slots of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.ops.examples import columns, scattered_slots
from minivllm.ops.kernels import kernel
from minivllm.ops.op import ALL_DTYPES, Implementation, define_op
from minivllm.ops.paged_attention import BLOCK_SIZE

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def define_decode_inputs(
    positions: Tensor, slots: Tensor, tokens: Tensor, block_tables: Tensor
) -> Inputs:
    """What a step over the sequences in `slots` needs, found by slot.

    Args:
        positions: `[N]`, int64: of each row's token; 0 in padding rows.
        slots: `[N]`, int64.
        tokens: `[S]`, int64: the newest token of the sequence in each slot.
        block_tables: `[S, B]`, int32: its blocks, enough for its position.

    Returns:
        input_ids `[N]`, int64.
        block_table `[N, B]`, int32: the blocks up to each row's position; zeros behind them.
        seq_lens `[N]`, int32: `positions + 1`; 0 in padding rows.
        slot_mapping `[N]`, int64: the place of each position in the cache.
    """
    last = positions // BLOCK_SIZE
    column = torch.arange(block_tables.shape[1], device=slots.device)
    block_table = torch.where(column <= last[:, None], block_tables[slots], 0)
    block = block_table.gather(1, last[:, None])[:, 0].long()
    seq_lens = torch.where(slots > 0, positions + 1, 0).int()
    return tokens[slots], block_table, seq_lens, block * BLOCK_SIZE + positions % BLOCK_SIZE


def _decode_inputs_fake(
    positions: Tensor, slots: Tensor, tokens: Tensor, block_tables: Tensor
) -> Inputs:
    rows = slots.shape[0]
    return (
        tokens.new_empty(rows),
        block_tables.new_empty(rows, block_tables.shape[1]),
        block_tables.new_empty(rows),
        positions.new_empty(rows),
    )


def define_greedy_tokens(
    logits: Tensor, slots: Tensor, vocab_limit: int, greedy: Tensor, tokens: Tensor
) -> None:
    """Choose each row's most probable token, the lowest id among equals.

    Args:
        logits: `[N, V]`.
        slots: `[N]`, int64.
        vocab_limit: ids from here on (a padded head's) are never chosen; at most V.
        greedy: `[N]`, int64; set to the ids, to -1 where the highest logit is NaN or infinite.
        tokens: `[S]`, int64; set at `slots`: to 0 where there is no id, and in slot 0.
    """
    highest, ids = logits[:, :vocab_limit].max(dim=-1)  # NaN is the highest of all
    chosen = highest.isfinite()
    greedy.copy_(torch.where(chosen, ids, -1))
    tokens.index_copy_(0, slots, torch.where(chosen & (slots > 0), ids, 0))


def _greedy_tokens_fake(
    logits: Tensor, slots: Tensor, vocab_limit: int, greedy: Tensor, tokens: Tensor
) -> None:
    return None


def _decode_inputs_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    """No argument is of `dtype`; the table's and the rows' buffers are wider than what is used."""
    examples = []
    for positions, padding, slots in (((0,), 0, 2), ((64, 0, 319), 2, 7), ((128, 191, 5), 0, 4)):
        count, width = len(positions), 5
        rows = torch.zeros(count + padding, 2, dtype=torch.int64)
        rows[:count, 0] = torch.tensor(positions)
        rows[:count, 1] = scattered_slots(generator, count, slots)
        tokens = torch.randint(1, 1000, (slots,), generator=generator)
        tokens[0] = 0
        tables = torch.randint(1, 99, (slots, width + 3), generator=generator, dtype=torch.int32)
        tables[0] = 0
        examples.append((*rows.unbind(1), tokens, tables[:, :width]))
    return examples


def _greedy_tokens_examples(
    generator: torch.Generator, dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    """Equals near and far, NaN and infinities below and beyond the limit, padding rows."""
    examples = []
    for rows, width, limit, padding in ((1, 40, 40, 0), (9, 5003, 5001, 2), (3, 2048, 2033, 0)):
        (logits,) = columns(generator, dtype, rows, (width,))
        logits[:, limit:] = torch.nan
        logits[0, [limit - 1, 7]] = 9.0
        if rows > 1:
            logits[1, [limit - 2, limit - 1]] = 9.0
            logits[2, 3] = -torch.inf
        if rows > 3:
            logits[3, limit // 2] = torch.nan
            logits[4, limit - 1] = torch.inf
            logits[5, :limit] = -torch.inf
            logits[6, [5, 4999]] = torch.tensor([torch.inf, torch.nan]).to(dtype)
        slots = torch.zeros(rows, dtype=torch.int64)
        slots[: rows - padding] = scattered_slots(generator, rows - padding, rows + 3)
        greedy, tokens = torch.full((rows,), 77), torch.full((rows + 3,), 77)
        examples.append((logits, slots, limit, greedy, tokens))
    return examples


# both copy and compare: nothing is rounded
_TOLERANCE = dict.fromkeys(ALL_DTYPES, 0.0)

DECODE_INPUTS = define_op(
    "decode_inputs(Tensor positions, Tensor slots, Tensor tokens, Tensor block_tables) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    definition=define_decode_inputs,
    fake=_decode_inputs_fake,
    implementations=(
        Implementation("torch", define_decode_inputs),
        Implementation(
            "triton", kernel("decode_step", "decode_inputs"), ("cuda",), package="triton"
        ),
    ),
    examples=_decode_inputs_examples,
    tolerance=_TOLERANCE,
)

GREEDY_TOKENS = define_op(
    "greedy_tokens(Tensor logits, Tensor slots, int vocab_limit, Tensor(a!) greedy, "
    "Tensor(b!) tokens) -> ()",
    definition=define_greedy_tokens,
    fake=_greedy_tokens_fake,
    implementations=(
        Implementation("torch", define_greedy_tokens),
        Implementation(
            "triton", kernel("decode_step", "greedy_tokens"), ("cuda",), package="triton"
        ),
    ),
    examples=_greedy_tokens_examples,
    tolerance=_TOLERANCE,
)
