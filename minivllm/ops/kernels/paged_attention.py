"""Kernels of `ops/paged_attention.py`: decode over the paged cache, and the copy before a prefill.

A decode program takes the query heads of one key/value head (16 of them at most) over its share
of one sequence's blocks; a second kernel combines the shares. Both find from the length, by the
same arithmetic, which programs have a share, so a short sequence costs little whatever the number
of splits, and one that fits into a single share is written by the first kernel itself.

A tile of 32 places keeps two tiles of keys and values on their way to shared memory (a whole block
of 64), and three programs on a multiprocessor at D = 256. Float32 has products without TF32, on
tiles half as large.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rows_of
from minivllm.ops.paged_attention import MAX_SPLITS, num_splits

LOG2_E = math.log2(math.e)  # exp(x) is exp2(x * LOG2_E), and a GPU has exp2
BLOCK_GROUP = 16  # query heads a program: the rows of the smallest matrix product
TILE, EXACT_TILE = 32, 16  # places of a block, in half precision and in float32
COMBINE_BLOCK_D = 32  # with MAX_SPLITS rows: 32 registers a thread, whole 128-byte lines
FEW_SPLITS, FEW_BLOCK_D = 8, 256  # of large batches: a head a program
GATHER_ELEMENTS = 8192  # a program copies


@triton.jit(do_not_specialize=["table_row", "splits"])
def _paged_decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
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
    table_row,
    splits,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores are in units of log 2; `sums` holds a share's largest score and its sum of weights."""
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (GROUP + BLOCK_GROUP - 1) // BLOCK_GROUP
    kv_head = tl.program_id(1) // parts
    split = tl.program_id(2)
    length = tl.load(seq_lens + n)
    blocks = tl.cdiv(length, BLOCK_SIZE)
    share = tl.cdiv(blocks, splits)
    start = split * share * BLOCK_SIZE
    end = tl.minimum(start + share * BLOCK_SIZE, length)
    # the first split of a padding row has nothing to read, and zeros to write
    if (start < end) | (split + length == 0):
        g = tl.program_id(1) % parts * BLOCK_GROUP + tl.arange(0, BLOCK_GROUP)
        d = tl.arange(0, BLOCK_D)
        in_group, in_head = (g < GROUP)[:, None], (d < D)[None, :]
        head = kv_head * GROUP + g
        place = q + n * q_token + head[:, None] * q_head + d[None, :]
        queries = tl.load(place, mask=in_group & in_head, other=0.0)
        k_cache += kv_head * k_head
        v_cache += kv_head * v_head
        block_table += n * table_row
        largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_GROUP], tl.float32)
        acc = tl.zeros([BLOCK_GROUP, BLOCK_D], tl.float32)
        t = tl.arange(0, TILE)
        block = tl.load(block_table + start // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)
        for tile in range(start, end, TILE):
            # read a tile before it is needed: loads that wait for it could not be pipelined
            following = tl.load(block_table + tl.minimum(tile + TILE, end - 1) // BLOCK_SIZE)
            position = (tile % BLOCK_SIZE + t)[:, None]
            exists = tile + t < length
            # places past the end may hold NaN, which a weight of 0 does not silence
            mask = exists[:, None] & in_head
            source = k_cache + block * k_block + position * k_position + d[None, :]
            keys = tl.load(source, mask=mask, other=0.0)
            source = v_cache + block * v_block + position * v_position + d[None, :]
            values = tl.load(source, mask=mask, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(exists[None, :], scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - larger[:, None])
            decay = tl.exp2(largest - larger)
            total = total * decay + tl.sum(weights, axis=1)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
            largest = larger
            block = following.to(tl.int64)
        row = (n * KV_HEADS * GROUP + head)[:, None]
        if share < blocks:
            row = row * splits + split
            tl.store(partial + row * D + d[None, :], acc, mask=in_group & in_head)
            tl.store(sums + row * 2, largest[:, None], mask=in_group)
            tl.store(sums + row * 2 + 1, total[:, None], mask=in_group)
        else:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            result = result.to(o.dtype.element_ty)
            tl.store(o + row * D + d[None, :], result, mask=in_group & in_head)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial,
    sums,
    seq_lens,
    o,
    splits,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head: every share at once, each by the weight of its largest score."""
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    row = n * HEADS + tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(tl.load(seq_lens + n), BLOCK_SIZE)
    share = tl.cdiv(blocks, splits)
    if share < blocks:
        split = tl.arange(0, BLOCK_SPLITS)
        exists = split < tl.cdiv(blocks, share)
        source = row * splits + split
        largest = tl.load(sums + source * 2, mask=exists, other=float("-inf"))
        total = tl.load(sums + source * 2 + 1, mask=exists, other=0.0)
        mask = exists[:, None] & (d < D)[None, :]
        parts = tl.load(partial + source[:, None] * D + d[None, :], mask=mask, other=0.0)
        weights = tl.exp2(largest - tl.max(largest, axis=0))
        result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
        tl.store(o + row * D + d, result.to(o.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["sequences"])
def _gather_blocks_kernel(
    k_cache,
    v_cache,
    kv_indptr,
    kv_indices,
    seq_lens,
    k,
    v,
    k_block,
    k_position,
    k_head,
    v_block,
    v_position,
    v_head,
    sequences,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
):
    """Some rows (a position's head) of one block of keys or of values."""
    index = tl.program_id(0)
    # its sequence: as many as end before it stand before it
    n = 0
    i = tl.arange(0, BLOCK_SEQUENCES)
    for first in range(0, sequences, BLOCK_SEQUENCES):
        ends = tl.load(kv_indptr + 1 + first + i, mask=first + i < sequences, other=2147483647)
        n += tl.sum((ends <= index).to(tl.int32), axis=0)
    length = tl.load(seq_lens + n, mask=n < sequences, other=0)
    filled = length - (index - tl.load(kv_indptr + n)) * BLOCK_SIZE
    block = tl.load(kv_indices + index).to(tl.int64)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)[None, :]
    position, head = row // HEADS, row % HEADS
    mask = (row < BLOCK_SIZE * HEADS)[:, None] & (d < D)
    live = (position < filled)[:, None] & mask
    target = (index.to(tl.int64) * (BLOCK_SIZE * HEADS) + row)[:, None] * D + d
    if tl.program_id(1) == 0:
        source = k_cache + block * k_block + (position * k_position + head * k_head)[:, None] + d
        tl.store(k + target, tl.load(source, mask=live, other=0.0), mask=mask)
    else:
        source = v_cache + block * v_block + (position * v_position + head * v_head)[:, None] + d
        tl.store(v + target, tl.load(source, mask=live, other=0.0), mask=mask)


def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """As `ops.paged_attention.define_decode`; a block has a power of two of tokens, 16 or more."""
    sequences, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    assert block_size >= 16 and block_size & (block_size - 1) == 0
    assert k_cache.stride(-1) == 1 and v_cache.stride(-1) == 1
    block_table, seq_lens = block_table.contiguous(), seq_lens.contiguous()
    splits = num_splits(sequences, kv_heads, block_table.shape[1])
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shares = splits if splits > 1 else 0  # one share is written by the first kernel itself
    scratch = (sequences, heads, shares)
    partial, sums = (
        torch.empty((*scratch, size), dtype=torch.float32, device=q.device) for size in (dim, 2)
    )
    rows = rows_of(q)
    exact = q.dtype == torch.float32
    group = heads // kv_heads
    _paged_decode_kernel[(sequences, kv_heads * triton.cdiv(group, BLOCK_GROUP), splits)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        o,
        partial,
        sums,
        rows.token,
        rows.head,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.shape[1],
        splits,
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        BLOCK_SIZE=block_size,
        TILE=min(EXACT_TILE if exact else TILE, block_size),
        BLOCK_GROUP=BLOCK_GROUP,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
        num_stages=3,
        **pdl(),
    )
    if splits > 1:
        few = splits <= FEW_SPLITS
        block_d = FEW_BLOCK_D if few else COMBINE_BLOCK_D
        _combine_kernel[(sequences, heads, triton.cdiv(dim, block_d))](
            partial,
            sums,
            seq_lens,
            o,
            splits,
            HEADS=heads,
            D=dim,
            BLOCK_SIZE=block_size,
            BLOCK_SPLITS=FEW_SPLITS if few else MAX_SPLITS,
            BLOCK_D=block_d,
            num_warps=4,
            **pdl(),
        )
    return o


def gather_blocks(
    k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, kv_indices: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """The blocks of `kv_indices` side by side, zeros where a block holds nobody's token.

    Args:
        k_cache, v_cache: `[num_blocks, block_size, HK, D]`.
        kv_indptr, kv_indices, seq_lens: as of `ops.paged_attention.define_prefill`.

    Returns:
        Keys and values, each `[len(kv_indices) * block_size, HK, D]` and contiguous.
    """
    _, block_size, heads, dim = k_cache.shape
    assert k_cache.stride(-1) == 1 and v_cache.stride(-1) == 1
    count = kv_indices.shape[0]
    shape = (count * block_size, heads, dim)
    k, v = (torch.empty(shape, dtype=c.dtype, device=c.device) for c in (k_cache, v_cache))
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(
        1, min(GATHER_ELEMENTS // block_dim, triton.next_power_of_2(block_size * heads))
    )
    _gather_blocks_kernel[(count, 2, triton.cdiv(block_size * heads, block_rows))](
        k_cache,
        v_cache,
        kv_indptr.contiguous(),
        kv_indices.contiguous(),
        seq_lens.contiguous(),
        k,
        v,
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        seq_lens.shape[0],
        BLOCK_SIZE=block_size,
        HEADS=heads,
        D=dim,
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_dim,
        BLOCK_SEQUENCES=128,
        num_warps=4,
    )
    return k, v
