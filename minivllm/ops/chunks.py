"""Chunks of 64 tokens: how packed sequences are shared out among the programs of a kernel.

Owns the indices, exact and padded. Does not own the kernels (`chunked_delta_rule` says what they
need of the indices).

    cu_seqlens, chunk_indices = chunk_metadata([130, 3])       # three chunks and one
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_SIZE = 64


def chunk_metadata(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` `[N + 1]` and `chunk_indices` `[chunks, 2]` (sequence, chunk), int32, on CPU.

    A sequence of length L has ceil(L / 64) chunks; an empty one has none.
    """
    return chunk_tensors(*chunk_lists(lengths))


def chunk_lists(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """`chunk_metadata` as lists, the pairs of `chunk_indices` one behind the other."""
    starts = [0]
    chunks: list[int] = []
    for n, length in enumerate(lengths):
        starts.append(starts[-1] + length)
        for c in range(-(-length // CHUNK_SIZE)):
            chunks += (n, c)
    return starts, chunks


def chunk_tensors(starts: list[int], chunks: list[int]) -> tuple[Tensor, Tensor]:
    """What `chunk_lists` or `padded_chunk_lists` give, as `chunk_metadata` gives it."""
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    return cu_seqlens, torch.tensor(chunks, dtype=torch.int32).view(-1, 2)


def max_chunks(tokens: int, seqs: int) -> int:
    """The most chunks that `seqs` sequences of together `tokens` tokens can have."""
    # ceil(L / 64) is at most (L + 63) / 64
    return min(tokens, (tokens + (CHUNK_SIZE - 1) * seqs) // CHUNK_SIZE)


def padded_chunk_lists(
    lengths: Sequence[int], tokens: int, seqs: int, chunks: int
) -> tuple[list[int], list[int]]:
    """`chunk_lists` of the given sizes: as long whatever the lengths are.

    The surplus tokens belong to the last sequence, the padding sequence; those between it and the
    given ones are empty. A surplus pair names the chunk behind the last sequence's last one, which
    every kernel skips (`chunked_delta_rule`): no index is negative, and no chunk is computed twice.

    Args:
        lengths: tokens of each sequence.
        tokens: at least their sum.
        seqs: sequences; more than there are lengths if there are surplus tokens.
        chunks: pairs; `max_chunks(tokens, seqs)` do for any lengths.
    """
    surplus, empty = tokens - sum(lengths), seqs - len(lengths)
    assert seqs > 0 and surplus >= 0 and empty >= (surplus > 0), (lengths, tokens, seqs)
    padded = [*lengths, *[0] * empty]
    padded[-1] += surplus
    starts, rows = chunk_lists(padded)
    missing = chunks - len(rows) // 2
    assert missing >= 0, f"{lengths} with {surplus} surplus tokens are {len(rows) // 2} chunks"
    return starts, rows + [seqs - 1, -(-padded[-1] // CHUNK_SIZE)] * missing
