"""FLA's chunked delta rule, kernel by kernel, over indices that stay on the device.

FLA's own entry copies `cu_seqlens` to the host, and derives offsets from it with a handful of
launches a layer. Here its four kernels are launched one after the other on buffers sized by shapes
alone: nothing waits for the device, so a prefill can be captured in a CUDA Graph and replayed with
other sequences of other lengths. Does not own what comes before the kernels
(`kernels/fla_inputs.py`) nor the indices (`fla.padded_chunk_metadata`).

    o, final_state = delta_rule_by_chunks(q, k, v, a, b, A_log, dt_bias, initial_state,
                                          cu_seqlens, chunk_indices)

What the kernels need of the indices, and do not check:

1. Every row of `chunk_indices` names a sequence in `[0, N)` and a chunk that is not negative.
2. Each chunk of each sequence has exactly one row. Rows of one sequence stand side by side, its
   chunks in order: `state` numbers a sequence's chunks on from its first row, `output` reads the
   state under its own row.
3. A surplus row names a chunk past its sequence's end (its number of chunks is one). Every kernel
   masks or leaves such a row, so it writes nothing at all. Repeating a chunk would not do: two
   programs would write that chunk's output, one of them from a state that nobody has computed.
4. Tokens past the last sequence are left as they are, uninitialised. So whoever pads tokens gives
   them to a sequence of their own.

A sequence without tokens needs no row: its final state is its initial one.

Shapes as in `gated_delta_rule`; C rows of `chunk_indices`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.ops.fla import CHUNK_SIZE, SOLVE_BLOCK
from minivllm.ops.kernels import kernel

COLUMNS = 64  # of keys and values at a time in `write`, as FLA calls it

fla_inputs = kernel("fla_inputs", "fla_inputs")


class Stages(NamedTuple):
    """FLA's kernels, in the order they run.

    Attributes:
        solve: k, decay, beta to the inverse of each chunk's triangular system.
        write: from that, the corrections without a state (u) and what a state adds to them (w).
        state: chunk after chunk, the state before each and the corrections with it.
        output: o, from the state before each chunk and the chunk's own tokens.
    """

    solve: Any
    write: Any
    state: Any
    output: Any


@functools.cache
def stages() -> Stages:
    """The kernels of the installed FLA (0.6), imported on first use."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_kernel_h_blockdim64
    from fla.ops.common.chunk_o import chunk_fwd_kernel_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel

    return Stages(
        chunk_gated_delta_rule_fwd_kkt_solve_kernel,
        recompute_w_u_fwd_kernel,
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64,
        chunk_fwd_kernel_o,
    )


def delta_rule_by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Packed sequences from raw projections; beta is not rounded to its dtype.

    Args:
        q, k: `[T, HK, K]`; v: `[T, HV, V]`; a, b: `[T, HV]`; A_log, dt_bias: `[HV]`.
        initial_state: `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]`, int32; chunk_indices: `[C, 2]`, int32, as the module says.

    Returns:
        o `[T, HV, V]` in v's dtype and the states after the last token, `[N, HV, V, K]` float32.
    """
    (key_heads, key_dim), (tokens, heads, value_dim) = q.shape[1:], v.shape
    sequences, chunks = initial_state.shape[0], chunk_indices.shape[0]
    assert key_dim <= 256, "FLA's state kernel holds keys of up to 256"
    indices = {"cu_seqlens": cu_seqlens.contiguous(), "chunk_indices": chunk_indices.contiguous()}
    sizes = {"T": tokens, "H": key_heads, "HV": heads, "K": key_dim, "BT": CHUNK_SIZE}
    x = fla_inputs(q, k, v, a, b, A_log, dt_bias, *indices.values())

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    def blocks(meta: dict[str, int]) -> int:  # FLA's tuner picks how many columns a program has
        return -(-value_dim // meta["BV"])

    stage = stages()
    stage.solve[chunks, heads](
        k=x.k, g=x.decay, beta=x.beta, A=x.inverse, BC=SOLVE_BLOCK, **indices, **sizes
    )
    w = empty(tokens, heads, key_dim, dtype=k.dtype)
    u = empty(tokens, heads, value_dim, dtype=v.dtype)
    stage.write[chunks, heads](
        k=x.k, v=x.v, beta=x.beta, w=w, u=u, A=x.inverse, g=x.decay,
        V=value_dim, BK=COLUMNS, BV=COLUMNS, **indices, **sizes,
    )  # fmt: skip
    before = empty(chunks, heads, value_dim, key_dim, dtype=k.dtype)
    corrected = empty(tokens, heads, value_dim, dtype=v.dtype)
    final_state = empty(sequences, heads, value_dim, key_dim, dtype=torch.float32)
    stage.state[lambda meta: (blocks(meta) * sequences * heads,)](
        k=x.k, v=u, w=w, v_new=corrected, g=x.decay, gk=None, h=before,
        h0=initial_state.contiguous(), ht=final_state,
        cu_seqlens=indices["cu_seqlens"], chunk_offsets=x.chunk_offsets,
        V=value_dim, STATE_V_FIRST=True, **sizes,
    )  # fmt: skip
    o = empty(tokens, heads, value_dim, dtype=v.dtype)
    stage.output[lambda meta: (blocks(meta) * chunks, heads)](
        q=x.q, k=x.k, v=corrected, h=before, g=x.decay, g_gamma=None, o=o,
        scale=key_dim**-0.5, V=value_dim, STATE_V_FIRST=True, **indices, **sizes,
    )  # fmt: skip
    return o, final_state
