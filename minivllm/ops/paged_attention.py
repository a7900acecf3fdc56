"""Attention over a paged KV cache: the write, packed prompts, and one token a sequence.

Owns the ops that lowering puts in the place of `attention`. Does not own which block belongs to
whom.

    torch.ops.minivllm.paged_kv_write(k_cache, v_cache, k, v, slot_mapping)
    o = torch.ops.minivllm.paged_attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale)

Shapes: T tokens, N sequences, H query heads, HK key/value heads, D head dim, B blocks a row of the
block table. A cache is `[num_blocks, block_size, HK, D]`, one for keys and one for values; it may
be a strided view of a larger pool.
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
from minivllm.ops.chunks import CHUNK_SIZE
from minivllm.ops.kernels import kernel
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op

BLOCK_SIZE = CHUNK_SIZE  # tokens a KV block: a boundary of blocks is one of the delta rule's chunks

# of the decode kernel, whose programs share out the blocks of one sequence
PROGRAMS = 396  # three for each of an H200's 132 multiprocessors, which hold so many at D = 256
MAX_SPLITS = 128  # what one program of the second kernel combines at once


def num_splits(sequences: int, kv_heads: int, blocks: int) -> int:
    """Programs that share the keys of one sequence and head in decode.

    It depends on shapes alone, so that a launch can be captured; a program finds its share when it
    runs, and one without a share ends at once.

    Args:
        blocks: B, most blocks of a sequence.
    """
    return max(1, min(PROGRAMS // max(1, sequences * kv_heads), MAX_SPLITS, blocks))


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
    blocks_of: Callable[[int], Tensor],
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
            blocks = blocks_of(n)[: -(-length // block_size)].long()
            k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            o[rows] = attention(q[rows], k, v, scale)
    return o


def _packed(
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    starts = kv_indptr.tolist()
    return _over_cache(
        attention, q, k_cache, v_cache, lambda n: kv_indices[starts[n] : starts[n + 1]],
        cu_seqlens.tolist(), seq_lens.tolist(), scale,
    )  # fmt: skip


def define_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Packed queries, each sequence over its cached keys (its history and its new tokens).

    Args:
        q: `[T, H, D]`; sequence n has rows `cu_seqlens[n]:cu_seqlens[n + 1]`, its last tokens.
        k_cache, v_cache: `[num_blocks, block_size, HK, D]`.
        kv_indptr: `[N + 1]`, int32: where each sequence's blocks start.
        kv_indices: `[blocks of all sequences]`, int32: sequence n has, in order, the blocks
            `kv_indices[kv_indptr[n]:kv_indptr[n + 1]]`, enough for its length. What stands behind
            the last sequence's belongs to nobody.
        cu_seqlens: `[N + 1]`, int32.
        seq_lens: `[N]`, int32: length of each sequence with its history; 0 for a padding row.

    Returns:
        `[T, H, D]` in q's dtype.
    """
    return _packed(
        define_attention, q, k_cache, v_cache, kv_indptr, kv_indices, cu_seqlens, seq_lens, scale
    )


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    return _packed(
        fused_attention, q, k_cache, v_cache, kv_indptr, kv_indices, cu_seqlens, seq_lens, scale
    )


def _prefill_flash(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """flash-attn's unpaged varlen entry over the blocks of all sequences, copied side by side.

    Its paged entries take multiples of 256 tokens only. Each sequence starts at a block here and
    `seqused_k` tells its length, so the lengths stay on the device; the largest ones only size the
    grid, for which bounds known from shapes do.

    Places past a sequence's end may hold anything in the cache. A masked key has the weight 0, but
    0 * NaN is NaN, so the copy holds zeros there (`gather_blocks`): nothing depends on whether
    flash-attn reads them.
    """
    k, v = gather_blocks(k_cache, v_cache, kv_indptr, kv_indices, seq_lens)
    o, *_ = _flash_attn()._flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens,
        kv_indptr * k_cache.shape[1],
        # a bound of 1 has an entry of its own, which takes every sequence to have one row
        max(q.shape[0], 2),
        k.shape[0],
        0.0,  # no dropout
        scale,
        causal=True,
        seqused_k=seq_lens,
    )
    return o


def _prefill_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
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
        define_attention, q, k_cache, v_cache, block_table.__getitem__,
        list(range(q.shape[0] + 1)), seq_lens.tolist(), scale,
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
        fused_attention, q, k_cache, v_cache, block_table.__getitem__,
        list(range(q.shape[0] + 1)), seq_lens.tolist(), scale,
    )  # fmt: skip


def _decode_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


gather_blocks = kernel("paged_attention", "gather_blocks")


@functools.cache
def _flash_attn() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def _cache(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache whose unused places are NaN, and the blocks of each of `lengths`, scattered."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator) + 1  # one block is nobody's
    blocks = list(order[:-1].to(torch.int32).split(counts))
    caches = torch.full((2, sum(counts) + 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan)
    for length, own in zip(lengths, blocks, strict=True):
        position = torch.arange(length)
        caches[:, own[position // BLOCK_SIZE].long(), position % BLOCK_SIZE] = torch.randn(
            2, length, KV_HEADS, HEAD_DIM, generator=generator
        )
    k_cache, v_cache = caches.to(dtype).unbind(0)
    return k_cache, v_cache, blocks


def _write_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    examples = []
    for tokens in (1, 9):
        k_cache, v_cache, _ = _cache(generator, dtype, (3, 300))
        _, k, v = example_rows(generator, dtype, tokens)
        places = torch.randperm(k_cache.shape[0] * k_cache.shape[1], generator=generator)
        examples.append((k_cache, v_cache, k, v, places[:tokens]))
    return examples


def _prefill_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """One token; histories that end on and off block edges; padding sequences and blocks."""
    examples = []
    for new, history in (
        ((1,), (0,)),
        ((5, 1, 40, 1), (0, 300, 24, 63)),
        ((3, 0, 2, 65), (0, 0, 126, 64)),
    ):
        lengths = tuple(a + b if a else 0 for a, b in zip(new, history, strict=True))
        cu_seqlens = F.pad(torch.tensor(new, dtype=torch.int32).cumsum(0), (1, 0)).int()
        q = example_rows(generator, dtype, sum(new))[0]
        k_cache, v_cache, blocks = _cache(generator, dtype, lengths)
        counts = torch.tensor([len(own) for own in blocks])
        kv_indptr = F.pad(counts.cumsum(0), (1, 0)).int()
        kv_indices = F.pad(torch.cat(blocks), (0, len(new) // 2))
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        tables = (kv_indptr, kv_indices, cu_seqlens, seq_lens)
        examples.append((q, k_cache, v_cache, *tables, HEAD_DIM**-0.5))
    return examples


def _decode_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Lengths on and off block edges, a padding row; unused entries name a block of NaN."""
    examples = []
    for lengths in ((1,), (300, 63, 64, 0, 65), (127, 128, 130, 1)):
        q = example_rows(generator, dtype, len(lengths))[0]
        k_cache, v_cache, blocks = _cache(generator, dtype, lengths)
        widest = max(len(own) for own in blocks) + 1
        table = torch.stack([F.pad(own, (0, widest - len(own))) for own in blocks])
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        examples.append((q, k_cache, v_cache, table, seq_lens, HEAD_DIM**-0.5))
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
    "paged_attention_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_indptr, "
    "Tensor kv_indices, Tensor cu_seqlens, Tensor seq_lens, float scale) -> Tensor",
    definition=define_prefill,
    fake=_prefill_fake,
    implementations=(
        Implementation("torch", _prefill, capturable=False),
        Implementation(
            "triton",
            kernel("prefill_attention", "paged_attention_prefill"),
            ("cuda",),
            package="triton",
        ),
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
        Implementation("torch", _decode, capturable=False),
        Implementation(
            "triton",
            kernel("paged_attention", "paged_attention_decode"),
            ("cuda",),
            package="triton",
        ),
    ),
    examples=_decode_examples,
    tolerance=TOLERANCE,
)
