"""The Triton kernels of a decode step, interpreted: attention, its blocks, tokens and inputs.

Run by `test_decode_interpreted.py`, in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import test_ops
import torch
import torch.nn.functional as F
from interpreted_kernels import (
    DTYPES,
    FAR,
    KERNELS,
    tolerant,
)
from torch import Tensor

from minivllm.ops import OPS
from minivllm.ops.kernels import kernel
from minivllm.ops.paged_attention import BLOCK_SIZE, MAX_SPLITS

pytest_plugins = ["interpreted_fixtures"]


def test_far_blocks(far: Any) -> None:
    k_cache, v_cache = (far(FAR + 1, 4, 2, 24) for _ in range(2))
    k, v = torch.randn(2, 3, 2, 24).bfloat16()
    places = torch.tensor([4 * FAR + 1, 7, 4 * FAR - 2])
    KERNELS["paged_kv_write"].call(k_cache, v_cache, k, v, places)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[places // 4, places % 4], rows)


def pool_of_blocks(
    counts: Sequence[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Caches of one layer of three, as views of a pool of bytes, and each sequence's blocks.

    Everything is NaN so far; block 0 and one more are nobody's.
    """
    shape = (block_size, kv_heads, dim)
    size = dtype.itemsize * block_size * kv_heads * dim
    pool = torch.full((sum(counts) + 2, 6 * size), 0xFF, dtype=torch.uint8)
    caches = [pool[:, i * size : (i + 1) * size].view(dtype).unflatten(-1, shape) for i in (2, 3)]
    assert all(c.isnan().all() and c.stride(0) == 6 * block_size * kv_heads * dim for c in caches)
    order = (torch.randperm(sum(counts) + 1)[:-1] + 1).to(torch.int32)
    return caches[0], caches[1], list(order.split(list(counts)))


def decode_args(
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """A decode batch: NaN in unused places, foreign blocks behind each sequence's own."""
    torch.manual_seed(0)
    counts = [-(-length // block_size) for length in lengths]
    k_cache, v_cache, blocks = pool_of_blocks(counts, heads[1], dim, block_size, dtype)
    for length, own in zip(lengths, blocks, strict=True):
        place = own[torch.arange(length) // block_size].long(), torch.arange(length) % block_size
        k_cache[place] = torch.randn(length, heads[1], dim).to(dtype)
        v_cache[place] = torch.randn(length, heads[1], dim).to(dtype)
    foreign = [n for n in range(k_cache.shape[0]) if not any(n in own for own in blocks)][-1]
    table = torch.full((len(lengths), max(counts) + 2), foreign, dtype=torch.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    q = torch.randn(len(lengths), 2, heads[0], dim).to(dtype)[:, 1]
    return q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32), dim**-0.5


def assert_decodes(args: tuple[Any, ...]) -> Tensor:
    """The decode kernel's result, which is the definition's in float32."""
    op = tolerant("paged_attention_decode")
    actual = KERNELS[op.name].call(*args)
    expected = op.definition(*test_ops.floats(lambda x: x.float(), args))
    assert actual.dtype == args[0].dtype and actual.is_contiguous()
    test_ops.assert_near(actual, expected, op.tolerance[args[0].dtype])
    assert expected.isfinite().all()
    return actual


def set_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    from minivllm.ops.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "num_splits", lambda *shape: splits)


LENGTHS = (1, 63, 0, 64, 65, 127, 128, 129, 130, 300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_decode_head_dims(dim: int, dtype: str) -> None:
    assert_decodes(decode_args(LENGTHS, dim=dim, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 17])
def test_decode_groups(group: int, dtype: str) -> None:
    for kv_heads in (1, 3):
        heads = group * kv_heads, kv_heads
        assert_decodes(decode_args((65, 0, 300), heads=heads, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 7, MAX_SPLITS])
def test_decode_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as blocks, fewer, and more; shares that are whole, partial, and none."""
    set_splits(monkeypatch, splits)
    for dtype in (torch.float32, torch.bfloat16):
        assert_decodes(decode_args(LENGTHS, dtype=dtype))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decode_block_sizes(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for splits in (1, 3):
        set_splits(monkeypatch, splits)
        assert_decodes(decode_args((15, 16, 17, 129, 0, 300), block_size=block_size))


@pytest.mark.parametrize("place", [0, 130, 299])
def test_decode_large_scores(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of some hundreds, the largest in one share: the others weigh nothing."""
    set_splits(monkeypatch, 5)
    args = decode_args((300, 300))
    q, k_cache, _, table, *_ = args
    q.mul_(40)
    for n in range(2):
        block = table[n, place // BLOCK_SIZE]
        k_cache[block, place % BLOCK_SIZE] = q[n].unflatten(0, (2, 2)).sum(1) / 10
    assert_decodes(args)


def test_decode_padding_rows_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even their block table."""
    for splits in (1, 4):
        set_splits(monkeypatch, splits)
        args = decode_args((0, 130, 0, 1))
        args[3][[0, 2]] = 2**31 - 1
        o = KERNELS["paged_attention_decode"].call(*args)
        assert torch.equal(o[[0, 2]], torch.zeros(2, 4, 32))
        args[3][[0, 2]] = 0
        assert torch.equal(o, assert_decodes(args))


def test_decode_far_blocks(far: Any) -> None:
    args = list(decode_args((200, 65), dtype=torch.bfloat16))
    expected = assert_decodes(tuple(args))
    used = [args[3][0, :4], args[3][1, :2]]
    table = torch.full_like(args[3], FAR - 7)
    table[0, :4] = torch.arange(FAR, FAR - 4, -1)
    table[1, :2] = torch.tensor([3, FAR - 5])
    for i in (1, 2):
        near = args[i]
        args[i] = far(FAR + 1, *near.shape[1:])
        for row, own in zip(table, used, strict=True):
            args[i][row[: len(own)].long()] = near[own.long()]
    args[3] = table
    assert torch.equal(KERNELS["paged_attention_decode"].call(*args), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (1, 80), (3, 16), (2, 256)])
def test_gathered_blocks(heads: int, dim: int, dtype: str) -> None:
    """Side by side, zeros past each sequence's end and in what is nobody's."""
    torch.manual_seed(0)
    lengths, counts = (65, 0, 1, 64, 0, 130), (2, 0, 1, 3, 1, 3)  # some have more than they need
    k_cache, v_cache, blocks = pool_of_blocks(counts, heads, dim, BLOCK_SIZE, DTYPES[dtype])
    expected = torch.zeros(2, sum(counts) + 2, BLOCK_SIZE, heads, dim)
    first = 0
    for length, count, own in zip(lengths, counts, blocks, strict=True):
        rows = torch.randn(2, length, heads, dim).to(DTYPES[dtype])
        place = own[torch.arange(length) // BLOCK_SIZE].long(), torch.arange(length) % BLOCK_SIZE
        k_cache[place], v_cache[place] = rows
        expected[:, first : first + count].flatten(1, 2)[:, :length] = rows
        first += count
    kv_indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    kv_indices = F.pad(torch.cat(blocks), (0, 2))  # two that are nobody's
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    gather = kernel("paged_attention", "gather_blocks")
    gathered = gather(k_cache, v_cache, kv_indptr, kv_indices, seq_lens)
    for actual, wanted in zip(gathered, expected, strict=True):
        assert actual.is_contiguous() and torch.equal(actual.float(), wanted.flatten(0, 1))


def test_blocks_of_many_sequences() -> None:
    """More than one load of `kv_indptr` holds, many of them empty."""
    torch.manual_seed(0)
    counts = torch.randint(0, 2, (300,))
    counts[[0, -1]] = 1
    total = int(counts.sum())
    k_cache = torch.randn(total, 16, 1, 8)
    kv_indptr = F.pad(counts.cumsum(0), (1, 0)).int()
    kv_indices = torch.randperm(total).int()
    seq_lens = (counts * torch.randint(1, 17, (300,))).int()
    gather = kernel("paged_attention", "gather_blocks")
    k, v = gather(k_cache, -k_cache, kv_indptr, kv_indices, seq_lens)
    expected = k_cache[kv_indices.long()]
    expected[torch.arange(16)[None] >= seq_lens[counts > 0][:, None]] = 0
    assert torch.equal(k, expected.flatten(0, 1)) and torch.equal(v, -k)


def test_no_blocks_to_gather() -> None:
    empty, zeros = torch.zeros(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    cache = torch.full((2, 16, 2, 8), torch.nan)
    k, v = kernel("paged_attention", "gather_blocks")(cache, cache, zeros, empty, zeros[:2])
    assert k.shape == v.shape == (0, 2, 8)


def test_far_blocks_are_gathered(far: Any) -> None:
    k_cache, v_cache = (far(FAR + 1, 16, 2, 24) for _ in range(2))
    rows = torch.randn(2, 2, 16, 2, 24).bfloat16()
    for cache, values in zip((k_cache, v_cache), rows, strict=True):
        cache[FAR], cache[FAR - 3] = values
    kv_indptr, seq_lens = torch.tensor([0, 2]).int(), torch.tensor([32]).int()
    gathered = kernel("paged_attention", "gather_blocks")(
        k_cache, v_cache, kv_indptr, torch.tensor([FAR, FAR - 3]).int(), seq_lens
    )
    for actual, values in zip(gathered, rows, strict=True):
        assert torch.equal(actual, values.flatten(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [1, 15, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_tokens_of_several_parts(
    rows: int, limit: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one block and of several; the lowest of equals wherever they lie."""
    from minivllm.ops.kernels import decode_step

    monkeypatch.setattr(decode_step, "GREEDY_BLOCK", 16)
    monkeypatch.setattr(decode_step, "GREEDY_PROGRAMS", 12)
    torch.manual_seed(limit)
    # few values: the highest is there many times
    logits = torch.randint(-3, 4, (rows, limit + 5)).to(DTYPES[dtype])
    logits[:, limit:] = 50.0
    slots = torch.randperm(7)[:rows]
    greedy, tokens = torch.full((rows,), 77), torch.arange(100, 107)
    KERNELS["greedy_tokens"].call(logits, slots, limit, greedy, tokens)
    for n, row in enumerate(logits[:, :limit].tolist()):
        lowest = row.index(max(row))
        assert greedy[n] == lowest
        assert tokens[slots[n]] == (lowest if slots[n] else 0)
    untouched = sorted(set(range(7)) - set(slots.tolist()))
    assert tokens[untouched].tolist() == [100 + s for s in untouched]


@pytest.mark.parametrize("place", [0, 40, 89])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_token_of_logits_that_are_not_finite(
    value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN beats every number, whatever comes before or behind it in its lane."""
    from minivllm.ops.kernels import decode_step

    monkeypatch.setattr(decode_step, "GREEDY_BLOCK", 16)
    monkeypatch.setattr(decode_step, "GREEDY_PROGRAMS", 4)
    logits = torch.randn(2, 90)
    logits[0, place] = value
    logits[1, 3] = -value
    greedy, tokens = torch.zeros(2, dtype=torch.int64), torch.full((3,), 77)
    KERNELS["greedy_tokens"].call(logits, torch.tensor([2, 1]), 90, greedy, tokens)
    second = -1 if value != value else int(logits[1].argmax())
    assert greedy.tolist() == [-1, second]
    assert tokens.tolist() == [77, max(second, 0), 0]


def test_decode_inputs_of_long_tables() -> None:
    """More blocks than a program loads at once; behind a row's position lie zeros."""
    tables = torch.randint(1, 2**31 - 1, (4, 700), dtype=torch.int32)
    rows = torch.tensor([[64 * 256, 64 * 699 + 63, 64 * 255 + 63, 0], [3, 1, 2, 0]])
    tokens = torch.tensor([0, 11, 12, 13])
    found = KERNELS["decode_inputs"].call(*rows, tokens, tables)
    expected = OPS["decode_inputs"].definition(*rows, tokens, tables)
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)
    assert found[1].count_nonzero(1).tolist() == [257, 700, 256, 1]
