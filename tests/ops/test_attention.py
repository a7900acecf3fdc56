"""Attention, over one sequence and over a paged cache, against a softmax in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.paged_attention import MAX_SPLITS, num_splits

ops = torch.ops.minivllm

DIM = 16
SCALE = 0.3
TOLERANCE = 1e-5  # of the largest expected value


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float = SCALE) -> Tensor:
    """The queries at the last positions of one sequence, query by query, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    history, group = k.shape[0] - q.shape[0], q.shape[1] // k.shape[1]
    o = torch.zeros_like(q)
    for t in range(q.shape[0]):
        seen = history + t + 1
        for h in range(q.shape[1]):
            scores = scale * (k[:seen, h // group] @ q[t, h])
            weights = (scores - scores.max()).exp()
            o[t, h] = (weights / weights.sum()) @ v[:seen, h // group]
    return o


def assert_near(actual: Tensor, expected: Tensor) -> None:
    atol = TOLERANCE * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


class Cache:
    """Sequences with their keys and values in scattered blocks; NaN wherever nothing belongs."""

    def __init__(
        self, lengths: Sequence[int], block_size: int, kv_heads: int = 2, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.k = [randn(n, kv_heads, DIM, seed=10 * i + seed) for i, n in enumerate(lengths)]
        self.v = [randn(n, kv_heads, DIM, seed=10 * i + 5 + seed) for i, n in enumerate(lengths)]
        counts = [-(-n // block_size) for n in lengths]
        spare = 2  # blocks beside block 0 that belong to nobody
        free = torch.randperm(sum(counts) + spare, generator=generator) + 1
        shape = (sum(counts) + spare + 1, block_size, kv_heads, DIM)
        self.k_cache, self.v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        # the rest of a row names a block of nobody's, as a recycled table would
        self.table = torch.full((len(lengths), max([*counts, 1]) + 1), int(free[-1]))
        self.table = self.table.to(torch.int32)
        self.places: list[Tensor] = []
        taken = 0
        for n, length in enumerate(lengths):
            self.table[n, : counts[n]] = free[taken : taken + counts[n]]
            taken += counts[n]
            position = torch.arange(length)
            block = self.table[n, position // block_size].long()
            self.places.append(block * block_size + position % block_size)

    def packed(self, lengths: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """kv_indptr and kv_indices; the blocks that `lengths` (all tokens) need, and one more."""
        lengths = [len(k) for k in self.k] if lengths is None else lengths
        counts = [-(-n // self.k_cache.shape[1]) for n in lengths]
        blocks = [row[:count] for row, count in zip(self.table, counts, strict=True)]
        return starts(counts), torch.cat([*blocks, self.table[0, -1:]])

    def write(self, start: Sequence[int], end: Sequence[int]) -> None:
        """Write each sequence's tokens from `start` to `end`, all in one call."""
        rows = range(len(self.k))
        ops.paged_kv_write(
            self.k_cache,
            self.v_cache,
            torch.cat([self.k[n][start[n] : end[n]] for n in rows]),
            torch.cat([self.v[n][start[n] : end[n]] for n in rows]),
            torch.cat([self.places[n][start[n] : end[n]] for n in rows]),
        )


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def starts(lengths: Sequence[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 1), (6, 3)])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_one_sequence(tokens: int, heads: tuple[int, int]) -> None:
    q = randn(tokens, heads[0], DIM)
    k, v = randn(tokens, heads[1], DIM, seed=1), randn(tokens, heads[1], DIM, seed=2)
    assert_near(ops.attention(q, k, v, SCALE), formula(q, k, v))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
def test_the_last_queries_of_a_longer_sequence(tokens: int) -> None:
    q, k, v = randn(tokens, 4, DIM), randn(8, 2, DIM, seed=1), randn(8, 2, DIM, seed=2)
    assert_near(ops.attention(q, k, v, SCALE), formula(q, k, v))


def test_large_scores_and_none() -> None:
    """Scores of some hundreds: a softmax that forgets the maximum overflows."""
    q, k, v = 40 * randn(9, 2, DIM), randn(9, 1, DIM, seed=1), randn(9, 1, DIM, seed=2)
    assert_near(ops.attention(q, k, v, 1.0), formula(q, k, v, 1.0))
    o = ops.attention(torch.zeros_like(q), k, v, SCALE)  # every key weighs the same
    means = v.double().cumsum(0) / torch.arange(1, 10)[:, None, None]
    assert_near(o, means.expand(9, 2, DIM))


def test_the_future_is_not_seen() -> None:
    q, k, v = randn(6, 4, DIM), randn(6, 2, DIM, seed=1), randn(6, 2, DIM, seed=2)
    expected = ops.attention(q, k, v, SCALE)[:4]
    k[4:], v[4:] = 100.0, -100.0
    assert_near(ops.attention(q, k, v, SCALE)[:4], expected.double())


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_prefill_over_pages(block_size: int, heads: tuple[int, int]) -> None:
    """New sequences and sequences with history, ends on and off block edges."""
    new, history = (5, 1, 16, 3, 20), (0, 4, 32, 45, 0)
    lengths = [a + b for a, b in zip(new, history, strict=True)]
    cache = Cache(lengths, block_size, kv_heads=heads[1])
    cache.write([0] * 5, history)
    cache.write(history, lengths)
    q = randn(sum(new), heads[0], DIM, seed=99)
    o = ops.paged_attention_prefill(
        q, cache.k_cache, cache.v_cache, *cache.packed(), starts(new), int32(lengths), SCALE
    )
    expected = [
        formula(rows, k, v) for rows, k, v in zip(q.split(list(new)), cache.k, cache.v, strict=True)
    ]
    assert_near(o, torch.cat(expected))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_decode_over_pages(block_size: int) -> None:
    lengths = [1, 2, 16, 17, 48]
    cache = Cache(lengths, block_size)
    cache.write([0] * 5, lengths)
    q = randn(5, 4, DIM, seed=99)
    o = ops.paged_attention_decode(
        q, cache.k_cache, cache.v_cache, cache.table, int32(lengths), SCALE
    )
    expected = [formula(q[n : n + 1], cache.k[n], cache.v[n]) for n in range(5)]
    assert_near(o, torch.cat(expected))


def test_paged_is_unpaged() -> None:
    """The same numbers, whatever the block size and wherever the blocks lie."""
    q, lengths = randn(30, 4, DIM, seed=99), [30]
    results = []
    for block_size, seed in ((1, 0), (7, 0), (16, 0), (16, 3)):
        cache = Cache(lengths, block_size, seed=seed)
        cache.k, cache.v = [randn(30, 2, DIM, seed=1)], [randn(30, 2, DIM, seed=2)]
        cache.write([0], lengths)
        results.append(
            ops.paged_attention_prefill(
                q, cache.k_cache, cache.v_cache, *cache.packed(), starts([30]), int32([30]), SCALE
            )
        )
    plain = ops.attention(q, cache.k[0], cache.v[0], SCALE)
    for o in results:
        assert torch.equal(o, plain)


def test_padding_rows_give_zeros() -> None:
    cache = Cache([4, 0, 2], 3)
    cache.table[1] = 0
    cache.write([0, 0, 0], [4, 0, 2])
    q = randn(3, 4, DIM, seed=99)
    o = ops.paged_attention_decode(
        q, cache.k_cache, cache.v_cache, cache.table, int32([4, 0, 2]), SCALE
    )
    assert torch.equal(o[1], torch.zeros(4, DIM))
    assert_near(o[2:], formula(q[2:], cache.k[2], cache.v[2]))
    q = randn(5, 4, DIM, seed=99)
    o = ops.paged_attention_prefill(
        q, cache.k_cache, cache.v_cache, *cache.packed(), starts([3, 0, 2]), int32([4, 0, 2]), SCALE
    )
    assert_near(o[:3], formula(q[:3], cache.k[0], cache.v[0]))
    assert_near(o[3:], formula(q[3:], cache.k[2], cache.v[2]))


def test_padding_rows_may_have_tokens() -> None:
    """In a batch padded to a fixed size, a row of length 0 may still own rows of q."""
    cache = Cache([2, 0], 16)
    cache.write([0, 0], [2, 0])
    q = randn(5, 4, DIM, seed=99)
    o = ops.paged_attention_prefill(
        q, cache.k_cache, cache.v_cache, *cache.packed(), starts([2, 3]), int32([2, 0]), SCALE
    )
    assert_near(o[:2], formula(q[:2], cache.k[0], cache.v[0]))
    assert torch.equal(o[2:], torch.zeros(3, 4, DIM))


def test_a_sequence_may_have_more_blocks_than_it_needs() -> None:
    """Blocks past a sequence's length, within its part of the list and behind the last one's."""
    cache = Cache([3, 6], 4)
    cache.write([0, 0], [3, 6])
    spare = int(cache.table[0, -1])
    blocks = [*cache.table[0, :1].tolist(), spare, spare, *cache.table[1, :2].tolist(), spare]
    q = randn(4, 4, DIM, seed=99)
    o = ops.paged_attention_prefill(
        q, cache.k_cache, cache.v_cache, int32([0, 3, 5]), int32(blocks), starts([3, 1]),
        int32([3, 6]), SCALE,
    )  # fmt: skip
    assert_near(o[:3], formula(q[:3], cache.k[0], cache.v[0]))
    assert_near(o[3:], formula(q[3:], cache.k[1], cache.v[1]))


def test_the_number_of_splits() -> None:
    """Every multiprocessor has work at batch 1; a large batch, or a short row, is not split."""
    assert num_splits(1, 2, 4096) == MAX_SPLITS
    assert num_splits(1, 2, 64) == 64
    assert num_splits(32, 2, 4096) == 6
    assert [num_splits(n, 2, 4096) for n in (99, 100, 256)] == [2, 1, 1]
    assert num_splits(1, 2, 1) == num_splits(1, 2, 0) == num_splits(0, 2, 0) == 1


def test_a_write_touches_its_places_alone() -> None:
    cache = Cache([5, 3], 4)
    cache.write([0, 0], [5, 3])
    for pool, sequences in ((cache.k_cache, cache.k), (cache.v_cache, cache.v)):
        rows = pool.flatten(0, 1)
        written = torch.zeros(rows.shape[0], dtype=torch.bool)
        for places, values in zip(cache.places, sequences, strict=True):
            assert torch.equal(rows[places], values)
            written[places] = True
        assert rows[~written].isnan().all()
        assert written.sum() == 8


def test_a_write_reaches_a_cache_that_is_a_view() -> None:
    """Keys and values of a block may lie side by side in one pool."""
    pool = torch.full((3, 2, 4, 2, DIM), torch.nan)
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    k, v = randn(2, 2, DIM, seed=1), randn(2, 2, DIM, seed=2)
    ops.paged_kv_write(k_cache, v_cache, k, v, torch.tensor([7, 8]))
    assert torch.equal(pool[1, 0, 3], k[0]) and torch.equal(pool[2, 0, 0], k[1])
    assert torch.equal(pool[1, 1, 3], v[0]) and torch.equal(pool[2, 1, 0], v[1])
    assert int(pool.isnan().sum()) == pool.numel() - 4 * 2 * DIM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (randn(33, h, DIM, seed=h).to(dtype) for h in (4, 2, 2))
    o = ops.attention(q, k, v, SCALE)
    expected = formula(q, k, v)
    assert o.dtype == dtype
    limit = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=limit)
