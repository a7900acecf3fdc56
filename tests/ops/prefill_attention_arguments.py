"""Arguments of `paged_attention_prefill`: scattered blocks, NaN wherever nothing belongs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.ops.paged_attention import BLOCK_SIZE


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def sums(counts: Sequence[int]) -> Tensor:
    return int32([0, *itertools.accumulate(counts)])


def prefill_args(
    new: Sequence[int],
    history: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK_SIZE,
    surplus: int = 0,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Sequences of `new` tokens behind `history`, and a padding sequence with `surplus` tokens.

    Caches are views of a pool of three layers, q is a slice of wider rows. A sequence without new
    tokens is an empty one. Entries of `kv_indices` behind the last sequence's name block 0.
    """
    generator = torch.Generator().manual_seed(seed)
    new = [*new, surplus] if surplus else list(new)
    lengths = [a + b if a else 0 for a, b in zip(new, [*history, 0], strict=False)]
    lengths = [*lengths[:-1], 0] if surplus else lengths
    counts = [-(-n // block_size) for n in lengths]
    pool = torch.full((sum(counts) + 2, 3, 2, block_size, heads[1], dim), torch.nan, dtype=dtype)
    order = torch.randperm(sum(counts), generator=generator) + 1
    caches = pool[:, 1, 0], pool[:, 1, 1]
    for length, own in zip(lengths, order.split(counts), strict=True):
        position = torch.arange(length)
        place = own[position // block_size], position % block_size
        for cache in caches:
            cache[place] = torch.randn(length, heads[1], dim, generator=generator).to(dtype)
    q = torch.randn(sum(new), 2, heads[0], dim, generator=generator).to(dtype)[:, 1]
    kv_indices = int32([*order.tolist(), 0, 0, 0])
    return q, *caches, sums(counts), kv_indices, sums(new), int32(lengths), dim**-0.5


def shared_sequence(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Give the first sequence of `second` the queries, keys and values of that of `first`."""
    end = int(first[5][1])
    blocks = int(first[3][1])
    second[0][:end] = first[0][:end]
    for i in (1, 2):
        second[i][second[4][:blocks].long()] = first[i][first[4][:blocks].long()]
