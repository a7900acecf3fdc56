"""The one door to flash-linear-attention: its entry points, imported on first use.

Owns the workaround that FLA needs. FLA memoises chunk indices and chunk offsets by the identity
of `cu_seqlens`; a buffer that is filled anew for the next batch would silently get the previous
batch's. Its memo is switched off here, and chunk indices are graph inputs.

    o, state = fla.chunk_gated_delta_rule()(q, k, v, g, beta, ...)

Nor are FLA's layers and models imported, which take its ops along with transformers, pandas and
scikit-learn to several seconds: without them the package is complete (`fla-core`), and says so.

Also owns the indices of packed sequences by chunks of 64 tokens, exact and padded.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_SIZE = 64
EXTENSIONS = ("fla.layers", "fla.models")  # which `import fla` does without if they are missing


_importing = threading.Lock()


def prepare() -> None:
    """Import FLA without its extensions and its memo; before any of its modules is imported."""
    with _importing:  # kernels are built in threads
        _prepare()


@functools.cache
def _prepare() -> None:
    first = "fla" not in sys.modules
    hidden = [name for name in EXTENSIONS if first and name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import fla.utils
    finally:
        for name in hidden:
            del sys.modules[name]  # whoever wants it imports it by its own name

    fla.utils.FLA_DISABLE_TENSOR_CACHE = True


@functools.cache
def causal_conv1d() -> Callable[..., Any]:
    """FLA's causal convolution over packed sequences."""
    prepare()
    from fla.modules.causal_conv1d import causal_conv1d as function

    return function


@functools.cache
def causal_conv1d_update() -> Callable[..., Any]:
    """FLA's one-token convolution; it changes the state it is given."""
    prepare()
    from fla.modules.causal_conv1d import causal_conv1d_update as function

    return function


@functools.cache
def chunk_gated_delta_rule() -> Callable[..., Any]:
    """FLA's chunked delta rule over packed sequences."""
    prepare()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function

    return function


@functools.cache
def fused_recurrent_gated_delta_rule() -> Callable[..., Any]:
    """FLA's token-by-token delta rule."""
    prepare()
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function

    return function


def chunk_metadata(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` `[N + 1]` and `chunk_indices` `[chunks, 2]` (sequence, chunk), int32, on CPU.

    A sequence of length L has ceil(L / 64) chunks; an empty one has none.
    """
    return _tensors(*chunk_lists(lengths))


def chunk_lists(lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """`chunk_metadata` as lists, the pairs of `chunk_indices` one behind the other."""
    starts = [0]
    chunks: list[int] = []
    for n, length in enumerate(lengths):
        starts.append(starts[-1] + length)
        for c in range(-(-length // CHUNK_SIZE)):
            chunks += (n, c)
    return starts, chunks


def _tensors(starts: list[int], chunks: list[int]) -> tuple[Tensor, Tensor]:
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    return cu_seqlens, torch.tensor(chunks, dtype=torch.int32).view(-1, 2)


def max_chunks(tokens: int, seqs: int) -> int:
    """The most chunks that `seqs` sequences of together `tokens` tokens can have."""
    # ceil(L / 64) is at most (L + 63) / 64
    return min(tokens, (tokens + (CHUNK_SIZE - 1) * seqs) // CHUNK_SIZE)


def padded_chunk_metadata(
    lengths: Sequence[int], tokens: int, seqs: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """`chunk_metadata` of the given sizes: whatever the lengths, tensors of the same shapes.

    The surplus tokens belong to the last sequence, the padding sequence; those between it and the
    given ones are empty. A surplus row of `chunk_indices` names the chunk behind the last
    sequence's last one, which every kernel skips (`chunked_delta_rule`): no index is
    negative, and no chunk is computed twice.

    Args:
        lengths: tokens of each sequence.
        tokens: at least their sum.
        seqs: sequences; more than there are lengths if there are surplus tokens.
        chunks: rows; `max_chunks(tokens, seqs)` do for any lengths.

    Returns:
        `cu_seqlens` `[seqs + 1]` and `chunk_indices` `[chunks, 2]`, int32, on CPU.
    """
    return _tensors(*padded_chunk_lists(lengths, tokens, seqs, chunks))


def padded_chunk_lists(
    lengths: Sequence[int], tokens: int, seqs: int, chunks: int
) -> tuple[list[int], list[int]]:
    """`padded_chunk_metadata` as lists, as of `chunk_lists`."""
    surplus, empty = tokens - sum(lengths), seqs - len(lengths)
    assert seqs > 0 and surplus >= 0 and empty >= (surplus > 0), (lengths, tokens, seqs)
    padded = [*lengths, *[0] * empty]
    padded[-1] += surplus
    starts, rows = chunk_lists(padded)
    missing = chunks - len(rows) // 2
    assert missing >= 0, f"{lengths} with {surplus} surplus tokens are {len(rows) // 2} chunks"
    return starts, rows + [seqs - 1, -(-padded[-1] // CHUNK_SIZE)] * missing
