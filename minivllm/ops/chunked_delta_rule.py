"""The chunked delta rule, kernel by kernel, over indices that stay on the device.

FLA's own entry copies `cu_seqlens` to the host, and derives offsets from it with a handful of
launches a layer. Here three kernels of our own are launched one after the other on buffers sized by
shapes alone: nothing waits for the device, so a prefill can be captured in a CUDA Graph and
replayed with other sequences of other lengths. They solve the system of each chunk
(`kernels/chunk_wy.py`), carry the state from chunk to chunk, read from a pool and written to it
(`kernels/chunk_states.py`), and make the output (`kernels/chunk_output.py`). Does not own these,
nor the indices (`chunks.padded_chunk_lists`).

    o = chunked_delta_rule_triton(q, k, v, a, b, A_log, dt_bias, state, slots, num_computed_tokens,
                                  cu_seqlens, chunk_indices, chunk_slots)

What the kernels need of the indices, and do not check:

1. Every row of `chunk_indices` names a sequence in `[0, N)` and a chunk that is not negative.
2. Each chunk of each sequence has exactly one row. Rows of one sequence stand side by side, its
   chunks in order: `chunk_states` numbers a sequence's chunks on from its first row,
   `chunk_output` reads the state under its own row.
3. A surplus row names a chunk past its sequence's end (its number of chunks is one). Every kernel
   masks or leaves such a row, so it writes nothing at all. Repeating a chunk would not do: two
   programs would write that chunk's output, one of them from a state that nobody has computed.
4. Tokens past the last sequence are left as they are, uninitialised. So whoever pads tokens gives
   them to a sequence of their own.

A sequence without tokens needs no row: its slot is left alone.

Shapes as in `gated_delta_rule`; C rows of `chunk_indices`.
"""

from __future__ import annotations

from torch import Tensor

from minivllm.ops.kernels import kernel

unit_rows = kernel("unit_rows", "unit_rows")
chunk_wy = kernel("chunk_wy", "chunk_wy")
chunk_states = kernel("chunk_states", "chunk_states")
chunk_output = kernel("chunk_output", "chunk_output")


def launches(normalized: bool) -> int:
    """Kernels of a call of `chunked_delta_rule_triton`."""
    return 3 if normalized else 4


def chunked_delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
    normalized: bool = False,
) -> Tensor:
    """Packed sequences from raw projections.

    Args:
        q, k: `[T, HK, K]`; v: `[T, HV, V]`; a, b: `[T, HV]`; A_log, dt_bias: `[HV]`.
        state: `[S, HV, V, K]`; changed at the slots of sequences that have tokens.
        slots: `[N]` int64; num_computed_tokens: `[N]` int32; 0: the slot's content is not read.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[C, 2]`, int32, as the module says.
        chunk_slots: `[C]` int32: the pool's entry that keeps the state behind a chunk; 0: none.
        normalized: each row of q and k is of length 1 already.

    Returns:
        o `[T, HV, V]` in v's dtype.
    """
    cu_seqlens, chunk_indices = cu_seqlens.contiguous(), chunk_indices.contiguous()
    if normalized:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    else:
        q, k, v = unit_rows(q, k, v)
    wy = chunk_wy(k, v, a, b, A_log, dt_bias, cu_seqlens, chunk_indices)
    before, corrections = chunk_states(
        k, wy.u, wy.w, wy.decay, state, slots, num_computed_tokens,
        cu_seqlens, wy.chunk_offsets, chunk_indices.shape[0], chunk_slots,
    )  # fmt: skip
    return chunk_output(q, k, corrections, before, wy.decay, cu_seqlens, chunk_indices)
