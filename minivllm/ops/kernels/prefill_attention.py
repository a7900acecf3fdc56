"""Kernels of `paged_attention_prefill` (`ops/paged_attention.py`): packed queries, paged keys.

A program takes some tokens of one sequence with the query heads that share a key/value head, so
that these rows of one matrix product read each key once, and walks over the blocks that they see.
Which tokens, it finds from `cu_seqlens`: the grid depends on shapes alone and can be captured.
The longest walks start first. A grid that would leave multiprocessors idle is multiplied by
splits: a sequence's blocks are cut into shares, a tile that sees more than one share is computed
by as many programs, and a second kernel combines them, each by the weight of its largest score.

A token's result depends on its sequence (history, tokens, the token's place among them) and on
T and N, the shapes of the batch: never on the other sequences.

Shapes: T tokens, N sequences, H query heads, HK key/value heads, D head dim, S splits.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minivllm.ops.kernels.launch import is_hopper, pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rows_of

LOG2_E = math.log2(math.e)  # exp(x) is exp2(x * LOG2_E), and a GPU has exp2
PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
MAX_SPLITS = 32
MIN_SHARE = 2  # blocks: a shorter walk costs less than its part of the second kernel
MAX_GROUP = 16  # query heads a program; more are shared out
BLOCK_SEQUENCES = 64  # looked at at once, to find a program's own
COMBINED_ROWS, COMBINED_SHARES = 2, 8  # that a program of the second kernel reads at once


@dataclass(frozen=True)
class Tile:
    """What a program covers.

    Attributes:
        rows: query rows: tokens times query heads.
        keys: of a step; at most a block.
        num_warps: of a program.
        num_stages: steps whose loads are under way at once.
        tma: whole blocks are copied by the tensor memory accelerator.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False


EXACT = Tile(16, 16, 4, 2)  # float32: products without TF32
PORTABLE = Tile(64, 32, 8, 2)  # fits into the 99 KiB of a consumer's GPU at D = 256
# Measured on an H200, 8 query heads and D = 256, in us for 512 / 2,048 / 3,776 tokens, 64 behind
# 1,984: HOPPER 23 / 57 / 134 / 17, HOPPER_FEW 14 / 55 / 169 / 14; without TMA 24 / 61 / 144 / 18;
# flash-attn with the copy that it needs 31 / 121 / 298 / 73.
HOPPER = Tile(128, 64, 8, 2, tma=True)  # at D = 256: 64 KiB of queries, two steps of 64 KiB
HOPPER_FEW = Tile(64, 64, 4, 2, tma=True)


def tile_for(dtype: torch.dtype, rows: int) -> Tile:
    """The tile for so many rows (tokens times query heads) of `dtype` on the current device."""
    if dtype == torch.float32:
        return EXACT
    if not is_hopper():
        return PORTABLE
    return HOPPER_FEW if rows <= PROGRAMS * HOPPER_FEW.rows else HOPPER


def prefill_splits(programs: int) -> int:
    """Shares into which the blocks of a sequence are cut at most, for a grid of `programs`."""
    return max(1, min(PROGRAMS // max(1, programs), MAX_SPLITS))


@triton.jit
def _find_tile(
    cu_seqlens, seq_lens, index, sequences, TOKENS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr
):
    """The sequence of a tile, its first token, its end and length, and what to add to a row of
    q to get its position.

    Sequence n has the tiles from `cu_seqlens[n] // TOKENS + n` on: never too few, one too many at
    most.
    """
    n = 0
    i = tl.arange(0, BLOCK_SEQUENCES)
    for first in range(0, sequences, BLOCK_SEQUENCES):
        ends = tl.load(cu_seqlens + 1 + first + i, mask=first + i < sequences, other=0)
        behind = ends // TOKENS + first + i + 1
        n += tl.sum(((first + i < sequences) & (behind <= index)).to(tl.int32), axis=0)
    begin = tl.load(cu_seqlens + n)
    end = tl.load(cu_seqlens + n + 1)
    token = begin + (index - (begin // TOKENS + n)) * TOKENS
    length = tl.load(seq_lens + n)
    return n, token, end, length, length - end


@triton.jit
def _share(length, splits, BLOCK_SIZE: tl.constexpr, MIN_SHARE: tl.constexpr):
    """Keys of one share of a sequence."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_SIZE), splits), MIN_SHARE) * BLOCK_SIZE


@triton.jit
def _attend(queries, keys, values, visible, largest, total, acc, scale):
    """One step of the softmax; scores are in units of log 2."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = tl.where(visible, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    base = tl.where(larger == float("-inf"), 0.0, larger)  # a row may see nothing of a share
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(largest - base)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return larger, total, acc


@triton.jit(do_not_specialize=["tiles", "sequences", "splits"])
def _paged_prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_blocks,
    v_blocks,
    kv_indptr,
    kv_indices,
    cu_seqlens,
    seq_lens,
    o,
    partial,
    sums,
    q_token,
    q_head,
    k_block,
    k_position,
    k_head,
    v_block,
    v_position,
    v_head,
    tiles,
    sequences,
    splits,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """`sums` holds a row's largest score of a share and its sum of weights."""
    wait_for_inputs(PDL)
    parts: tl.constexpr = (GROUP + BLOCK_GROUP - 1) // BLOCK_GROUP
    TOKENS: tl.constexpr = ROWS // BLOCK_GROUP
    column = tl.program_id(0) % (KV_HEADS * parts)
    kv_head = column // parts
    split = tl.program_id(1)
    # the last tile of a sequence sees most
    index = tiles - 1 - tl.program_id(0) // (KV_HEADS * parts)
    n, first, end, length, offset = _find_tile(
        cu_seqlens, seq_lens, index, sequences, TOKENS, BLOCK_SEQUENCES
    )
    seen = tl.maximum(tl.minimum(first + TOKENS, end) + offset, 0)  # 0: a padding sequence
    share = _share(length, splits, BLOCK_SIZE, MIN_SHARE)
    start = split * share
    stop = tl.minimum(start + share, seen)
    if (first < end) & ((start < stop) | (split + seen == 0)):
        m = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)[None, :]
        j = tl.arange(0, KEYS)
        token = first + m // BLOCK_GROUP
        in_group = column % parts * BLOCK_GROUP + m % BLOCK_GROUP
        head = kv_head * GROUP + in_group
        mask = ((token < end) & (in_group < GROUP))[:, None] & (d < D)
        source = q + token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + d
        queries = tl.load(source, mask=mask, other=0.0)
        # rows behind the sequence's last one see no more than that
        position = tl.minimum(token + offset, length - 1)[:, None]
        kv_indices += tl.load(kv_indptr + n)
        k_cache += kv_head * k_head
        v_cache += kv_head * v_head
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        block = tl.load(kv_indices + start // BLOCK_SIZE, mask=start < stop, other=0).to(tl.int64)
        # the accelerator would copy what stands behind the sequence's end as well
        whole = tl.minimum(stop, length // KEYS * KEYS) if TMA else stop
        for step in range(start, whole, KEYS):
            # read a step before it is needed: loads that wait for it could not be pipelined
            following = tl.load(kv_indices + tl.minimum(step + KEYS, stop - 1) // BLOCK_SIZE)
            if TMA:
                row = (block * (k_block // k_position)).to(tl.int32) + step % BLOCK_SIZE
                keys = k_blocks.load([row, kv_head * k_head])
                row = (block * (v_block // v_position)).to(tl.int32) + step % BLOCK_SIZE
                values = v_blocks.load([row, kv_head * v_head])
            else:
                place = (step % BLOCK_SIZE + j)[:, None]
                keys = tl.load(
                    k_cache + block * k_block + place * k_position + d, mask=d < D, other=0.0
                )
                # places past the end may hold NaN, which a weight of 0 does not silence
                exists = (step + j < length)[:, None] & (d < D)
                values = tl.load(
                    v_cache + block * v_block + place * v_position + d, mask=exists, other=0.0
                )
            visible = (step + j)[None, :] <= position
            largest, total, acc = _attend(
                queries, keys, values, visible, largest, total, acc, scale
            )
            block = following.to(tl.int64)
        if TMA:  # noqa: SIM102 (known when it is compiled, the other when it runs)
            if whole < stop:
                step = tl.maximum(whole, start)
                place = (step % BLOCK_SIZE + j)[:, None]
                keys = tl.load(k_cache + block * k_block + place * k_position + d)
                exists = (step + j < length)[:, None]
                values = tl.load(
                    v_cache + block * v_block + place * v_position + d, mask=exists, other=0.0
                )
                visible = (step + j)[None, :] <= position
                largest, total, acc = _attend(
                    queries, keys, values, visible, largest, total, acc, scale
                )
        row = token.to(tl.int64) * (KV_HEADS * GROUP) + head
        if share < seen:
            row = row * splits + split
            tl.store(partial + row[:, None] * D + d, acc, mask=mask)
            lives = (token < end) & (in_group < GROUP)
            tl.store(sums + row * 2, largest, mask=lives)
            tl.store(sums + row * 2 + 1, total, mask=lives)
        else:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(o + row[:, None] * D + d, result.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequences", "splits"])
def _combine_tiles_kernel(
    partial,
    sums,
    cu_seqlens,
    seq_lens,
    o,
    sequences,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of a tile, `SHARES` shares at once."""
    wait_for_inputs(PDL)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    _, first, end, length, offset = _find_tile(
        cu_seqlens, seq_lens, tl.program_id(0), sequences, TOKENS, BLOCK_SEQUENCES
    )
    end = tl.minimum(first + TOKENS, end)
    share = _share(length, splits, BLOCK_SIZE, MIN_SHARE)
    used = tl.cdiv(end + offset, share)
    local = tl.program_id(1) * ROWS
    if (used > 1) & (first + local // HEADS < end):
        m = local + tl.arange(0, ROWS)
        lives = first + m // HEADS < end
        row = first.to(tl.int64) * HEADS + m
        source = sums + row[:, None] * splits * 2
        every = tl.arange(0, MAX_SPLITS)[None, :]
        live_rows = lives[:, None]
        largest = tl.load(source + every * 2, mask=live_rows & (every < used), other=float("-inf"))
        largest = tl.where(lives, tl.max(largest, axis=1), 0.0)[:, None]
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        d = tl.arange(0, BLOCK_D)
        for begin in range(0, used, SHARES):
            split = begin + tl.arange(0, SHARES)[None, :]
            there = live_rows & (split < used)
            weights = tl.load(source + split * 2, mask=there, other=float("-inf"))
            weights = tl.exp2(weights - largest)
            sum_of = tl.load(source + split * 2 + 1, mask=there, other=0.0)
            total += tl.sum(weights * sum_of, axis=1)
            place = (row[:, None] * splits + split)[:, :, None] * D + d[None, None, :]
            mask = there[:, :, None] & (d < D)[None, None, :]
            shares = tl.load(partial + place, mask=mask, other=0.0)
            acc += tl.sum(shares * weights[:, :, None], axis=1)
        result = (acc / tl.where(lives, total, 1.0)[:, None]).to(o.dtype.element_ty)
        tl.store(o + row[:, None] * D + d[None, :], result, mask=lives[:, None] & (d < D)[None, :])


def _rows_descriptor(cache: Tensor, keys: int, columns: int) -> TensorDescriptor:
    """A cache as rows of all heads of a position, of which a copy takes `keys` of one head."""
    blocks, block_size, heads, dim = cache.shape
    block, position, head, _ = cache.stride()
    shape = [(blocks - 1) * (block // position) + block_size, (heads - 1) * head + dim]
    return TensorDescriptor(cache, shape, [position, 1], [keys, columns])


def _is_rows(cache: Tensor) -> bool:
    """Whether the accelerator can copy it: positions of all blocks have one stride."""
    block, position, _, _ = cache.stride()
    size = cache.element_size()
    aligned = cache.data_ptr() % 16 == 0 and position * size % 16 == 0
    power = cache.shape[-1] & (cache.shape[-1] - 1) == 0
    return block % position == 0 and aligned and power and cache.shape[-1] * size >= 32


def paged_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """As `ops.paged_attention.define_prefill`; a block has a power of two of tokens, 16 or more."""
    tokens, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    sequences = seq_lens.shape[0]
    assert block_size >= 16 and block_size & (block_size - 1) == 0
    assert k_cache.stride(-1) == 1 and v_cache.stride(-1) == 1
    assert scale > 0  # the largest score times the scale is the largest scaled score
    cu_seqlens, seq_lens = cu_seqlens.contiguous(), seq_lens.contiguous()
    tile = tile_for(q.dtype, q.shape[0] * q.shape[1])
    keys = min(tile.keys, block_size)
    group = heads // kv_heads
    block_group = min(triton.next_power_of_2(group), MAX_GROUP)
    block_dim = max(16, triton.next_power_of_2(dim))
    tile_tokens = tile.rows // block_group
    tiles = tokens // tile_tokens + sequences
    columns = kv_heads * triton.cdiv(group, block_group)
    splits = prefill_splits(tiles * columns)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # one share is written by the first kernel itself
    scratch = (tokens, heads, splits if splits > 1 else 0)
    partial, sums = (
        torch.empty((*scratch, size), dtype=torch.float32, device=q.device) for size in (dim, 2)
    )
    tma = tile.tma and _is_rows(k_cache) and _is_rows(v_cache)
    k_blocks, v_blocks = (
        _rows_descriptor(c, keys, block_dim) if tma else None for c in (k_cache, v_cache)
    )
    rows = rows_of(q)
    _paged_prefill_kernel[(tiles * columns, splits)](
        q,
        k_cache,
        v_cache,
        k_blocks,
        v_blocks,
        kv_indptr.contiguous(),
        kv_indices.contiguous(),
        cu_seqlens,
        seq_lens,
        o,
        partial,
        sums,
        rows.token,
        rows.head,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        tiles,
        sequences,
        splits,
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        BLOCK_SIZE=block_size,
        MIN_SHARE=MIN_SHARE,
        ROWS=tile.rows,
        KEYS=keys,
        BLOCK_GROUP=block_group,
        BLOCK_D=block_dim,
        BLOCK_SEQUENCES=BLOCK_SEQUENCES,
        TMA=tma,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl(),
    )
    if splits > 1:
        _combine_tiles_kernel[(tiles, triton.cdiv(tile_tokens * heads, COMBINED_ROWS))](
            partial,
            sums,
            cu_seqlens,
            seq_lens,
            o,
            sequences,
            splits,
            KV_HEADS=kv_heads,
            GROUP=group,
            D=dim,
            BLOCK_SIZE=block_size,
            MIN_SHARE=MIN_SHARE,
            TOKENS=tile_tokens,
            ROWS=COMBINED_ROWS,
            SHARES=COMBINED_SHARES,
            MAX_SPLITS=MAX_SPLITS,
            BLOCK_D=block_dim,
            BLOCK_SEQUENCES=BLOCK_SEQUENCES,
            num_warps=4,
            **pdl(),
        )
    return o
