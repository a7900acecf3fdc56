"""Arguments of the kernel that carries states from chunk to chunk, and what it must give."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.chunks import CHUNK_SIZE, chunk_tensors, max_chunks, padded_chunk_lists


class Arguments(NamedTuple):
    """Of `kernels.chunk_states.chunk_states`, in order."""

    k: Tensor
    u: Tensor
    w: Tensor
    decay: Tensor
    state: Tensor
    slots: Tensor
    num_computed_tokens: Tensor
    cu_seqlens: Tensor
    chunk_offsets: Tensor
    num_chunks: int
    chunk_slots: Tensor


def arguments(
    lengths: Sequence[int],
    computed: Sequence[int],
    *,
    kept: Mapping[int, int],
    entries: int,
    heads: int = 4,
    key_heads: int = 2,
    K: int = 16,
    V: int = 24,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Arguments:
    """Random ones; slots 1, 2, ... of a pool whose other entries are NaN, and so is the slot of a
    sequence that starts.

    Args:
        kept: chunk to the entry that keeps the state behind it.
    """
    tokens, seqs = sum(lengths), len(lengths)
    chunks = max_chunks(tokens, seqs)
    cu_seqlens, chunk_indices = chunk_tensors(*padded_chunk_lists(lengths, tokens, seqs, chunks))
    offsets = torch.full((seqs,), 2**30, dtype=torch.int32)
    for row, (n, chunk) in reversed(list(enumerate(chunk_indices.tolist()))):
        if chunk == 0 and lengths[n]:
            offsets[n] = row
    log_decay = -torch.rand(tokens, heads)
    decay = torch.empty_like(log_decay)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        for at in range(start, end, CHUNK_SIZE):
            part = slice(at, min(at + CHUNK_SIZE, end))
            decay[part] = log_decay[part].cumsum(0)
    state = torch.full((entries, heads, V, K), torch.nan)
    slots = torch.arange(1, seqs + 1)
    state[slots] = torch.randn(seqs, heads, V, K)
    started = torch.tensor(computed, dtype=torch.int32)
    state[slots[started == 0]] = torch.nan
    chunk_slots = torch.zeros(chunks, dtype=torch.int32)
    for chunk, entry in kept.items():
        chunk_slots[chunk] = entry
    rows = (
        F.normalize(torch.randn(tokens, key_heads, K), dim=-1).to(dtype),
        torch.randn(tokens, heads, V).to(dtype),
        (0.5 * F.normalize(torch.randn(tokens, heads, K), dim=-1)).to(dtype),
        decay,
        state,
        slots,
        started,
        cu_seqlens,
        offsets,
    )
    return Arguments(*(x.to(device) for x in rows), chunks, chunk_slots.to(device))


def expected(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """States before each chunk, corrections and the pool after it; NaN where nothing is written."""
    k, u, w, decay = (x.double() for x in (a.k, a.u, a.w, a.decay))
    k = k.repeat_interleave(u.shape[1] // k.shape[1], dim=1)
    state = a.state.double()
    before = state.new_full((a.num_chunks, *state.shape[1:]), torch.nan)
    corrections = torch.full_like(u, torch.nan)
    for n, (start, end) in enumerate(itertools.pairwise(a.cu_seqlens.tolist())):
        slot = a.slots[n]
        s = state[slot] if a.num_computed_tokens[n] > 0 else torch.zeros_like(state[slot])
        for i, at in enumerate(range(start, end, CHUNK_SIZE)):
            part = slice(at, min(at + CHUNK_SIZE, end))
            row = int(a.chunk_offsets[n]) + i
            before[row] = s
            c = u[part] - torch.einsum("hvk,thk->thv", s, w[part])
            corrections[part] = c
            last = decay[part][-1]
            c = c * (last - decay[part]).exp2()[..., None]
            s = s * last.exp2()[:, None, None] + torch.einsum("thv,thk->hvk", c, k[part])
            if entry := int(a.chunk_slots[row]):
                state[entry] = s
        if end > start:
            state[slot] = s
    return before.transpose(2, 3), corrections, state
