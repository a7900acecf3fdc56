"""Attention over a paged KV cache: the write, packed prompts, and one token a sequence.

Owns the ops that lowering puts in the place of `attention`. Does not own which block belongs to
whom.

    torch.ops.minivllm.paged_kv_write(k_cache, v_cache, k, v, slot_mapping)
    o = torch.ops.minivllm.paged_attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale)

Shapes: T tokens, N sequences, H query heads, HK key/value heads, D head dim, B blocks a row of the
block table. A cache is `[num_blocks, block_size, HK, D]`, one for keys and one for values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.attention import (
    HEAD_DIM,
    KV_HEADS,
    TOLERANCE,
    define_attention,
    example_rows,
    fused_attention,
)
from minivllm.ops.kernels import kernel
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op

FLASH_ATTENTION_PAGE = 256  # its paged entries take multiples of this block size only
COMPILED_HEAD_DIMS = (64, 128, 256)  # that every build of flash-attn has


def define_write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor
) -> None:
    """Write the keys and values of T tokens into their places in the cache.

    Args:
        k_cache, v_cache: `[num_blocks, block_size, HK, D]`; changed.
        k, v: `[T, HK, D]`.
        slot_mapping: `[T]`, int64: block * block_size + offset of each token. Padding rows name
            places of block 0, which belongs to nobody.
    """
    block_size = k_cache.shape[1]
    place = slot_mapping // block_size, slot_mapping % block_size
    k_cache[place] = k
    v_cache[place] = v


def _write_fake(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor
) -> None:
    return None


def _over_cache(
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    bounds: list[int],
    lengths: list[int],
    scale: float,
) -> Tensor:
    """Sequence by sequence: gather its keys and values, then attend; empty rows give zeros."""
    block_size = k_cache.shape[1]
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for n, length in enumerate(lengths):
        rows = slice(bounds[n], bounds[n + 1])
        if length > 0 and bounds[n + 1] > bounds[n]:
            blocks = block_table[n, : -(-length // block_size)].long()
            k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            o[rows] = attention(q[rows], k, v, scale)
    return o


def define_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Packed queries, each sequence over its cached keys (its history and its new tokens).

    Args:
        q: `[T, H, D]`; sequence n has rows `cu_seqlens[n]:cu_seqlens[n + 1]`, its last tokens.
        k_cache, v_cache: `[num_blocks, block_size, HK, D]`.
        block_table: `[N, B]`, int32: the blocks of each sequence in order.
        cu_seqlens: `[N + 1]`, int32.
        seq_lens: `[N]`, int32: length of each sequence with its history; 0 for a padding row.

    Returns:
        `[T, H, D]` in q's dtype.
    """
    return _over_cache(
        define_attention, q, k_cache, v_cache, block_table, cu_seqlens.tolist(),
        seq_lens.tolist(), scale,
    )  # fmt: skip


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    return _over_cache(
        fused_attention, q, k_cache, v_cache, block_table, cu_seqlens.tolist(), seq_lens.tolist(),
        scale,
    )  # fmt: skip


def _prefill_flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """flash-attn's varlen entry over pages; lengths stay on the device.

    The largest lengths only size its grid, so upper bounds known from shapes do, and the host
    need not wait for the device.
    """
    return _flash_attn().flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=q.shape[0],
        max_seqlen_k=block_table.shape[1] * k_cache.shape[1],
        softmax_scale=scale,
        causal=True,
        block_table=block_table,
    )


def _prefill_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


def define_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """One query a sequence over its cached keys, its own among them.

    Args:
        q: `[N, H, D]`.
        k_cache, v_cache: `[num_blocks, block_size, HK, D]`.
        block_table: `[N, B]`, int32.
        seq_lens: `[N]`, int32: length of each sequence with this token; 0 for a padding row.

    Returns:
        `[N, H, D]` in q's dtype; zeros for padding rows.
    """
    return _over_cache(
        define_attention, q, k_cache, v_cache, block_table, list(range(q.shape[0] + 1)),
        seq_lens.tolist(), scale,
    )  # fmt: skip


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    return _over_cache(
        fused_attention, q, k_cache, v_cache, block_table, list(range(q.shape[0] + 1)),
        seq_lens.tolist(), scale,
    )  # fmt: skip


def _decode_flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    # Seen with a build of 2.8.3 for head dims 64, 128 and 256 alone: at 32, wrong values as soon as
    # it splits a sequence's keys, right ones with a single split.
    splits = 0 if q.shape[-1] in COMPILED_HEAD_DIMS else 1
    o = _flash_attn().flash_attn_with_kvcache(
        q[:, None],
        k_cache,
        v_cache,
        cache_seqlens=seq_lens,
        block_table=block_table,
        softmax_scale=scale,
        causal=True,
        num_splits=splits,  # 0: flash-attn chooses
    )
    return o[:, 0]


def _decode_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


@functools.cache
def _flash_attn() -> Any:
    import flash_attn

    return flash_attn


def _cache(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """A cache whose unused places are NaN, and the block table of `lengths`, scattered."""
    block = FLASH_ATTENTION_PAGE
    counts = [-(-length // block) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(lengths), max(*counts, 1), dtype=torch.int32)
    caches = torch.full((2, sum(counts) + 1, block, KV_HEADS, HEAD_DIM), torch.nan)
    for n, length in enumerate(lengths):
        table[n, : counts[n]] = order[sum(counts[:n]) : sum(counts[: n + 1])]
        for position in range(length):
            place = table[n, position // block], position % block
            caches[:, place[0], place[1]] = torch.randn(2, KV_HEADS, HEAD_DIM, generator=generator)
    k_cache, v_cache = caches.to(dtype).unbind(0)
    return k_cache, v_cache, table


def _write_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    for tokens in (1, 9):
        k_cache, v_cache, _ = _cache(generator, dtype, (3, 300))
        _, k, v = example_rows(generator, dtype, tokens)
        places = torch.randperm(k_cache.shape[0] * k_cache.shape[1], generator=generator)
        examples.append((k_cache, v_cache, k, v, places[:tokens]))
    return examples


def _prefill_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    for new, history in (((1,), (0,)), ((5, 1, 40), (0, 300, 7)), ((3, 0, 2), (0, 0, 254))):
        lengths = tuple(a + b if a else 0 for a, b in zip(new, history, strict=True))
        cu_seqlens = F.pad(torch.tensor(new, dtype=torch.int32).cumsum(0), (1, 0)).int()
        q = example_rows(generator, dtype, sum(new))[0]
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        caches = _cache(generator, dtype, lengths)
        examples.append((q, *caches, cu_seqlens, seq_lens, HEAD_DIM**-0.5))
    return examples


def _decode_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    for lengths in ((1,), (300, 256, 5)):
        q = example_rows(generator, dtype, len(lengths))[0]
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        caches = _cache(generator, dtype, lengths)
        examples.append((q, *caches, seq_lens, HEAD_DIM**-0.5))
    return examples


PAGED_KV_WRITE = define_op(
    "paged_kv_write(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor slot_mapping) -> ()",
    definition=define_write,
    fake=_write_fake,
    implementations=(
        Implementation("torch", define_write),
        Implementation(
            "triton", kernel("paged_kv_write", "paged_kv_write"), ("cuda",), package="triton"
        ),
    ),
    examples=_write_examples,
    tolerance=dict.fromkeys(TOLERANCE, 0.0),  # a copy
)

PAGED_ATTENTION_PREFILL = define_op(
    "paged_attention_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor cu_seqlens, Tensor seq_lens, float scale) -> Tensor",
    definition=define_prefill,
    fake=_prefill_fake,
    implementations=(
        Implementation("torch", _prefill),
        Implementation("flash_attn", _prefill_flash, ("cuda",), HALF_DTYPES, "flash_attn"),
    ),
    examples=_prefill_examples,
    tolerance=TOLERANCE,
)

PAGED_ATTENTION_DECODE = define_op(
    "paged_attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seq_lens, float scale) -> Tensor",
    definition=define_decode,
    fake=_decode_fake,
    implementations=(
        Implementation("torch", _decode),
        Implementation("flash_attn", _decode_flash, ("cuda",), HALF_DTYPES, "flash_attn"),
    ),
    examples=_decode_examples,
    tolerance=TOLERANCE,
)
