"""FLA's chunked delta rule, kernel by kernel, over indices that stay on the device.

FLA's own entry copies `cu_seqlens` to the host, and derives offsets from it with a handful of
launches a layer. Here the kernels are launched one after the other on buffers sized by shapes
alone: nothing waits for the device, so a prefill can be captured in a CUDA Graph and replayed with
other sequences of other lengths. Three are FLA's; the one that carries the state from chunk to
chunk is our own (`kernels/chunk_states.py`), as it reads and writes a pool. Does not own what
comes before them (`kernels/fla_inputs.py`) nor the indices (`fla.padded_chunk_metadata`).

    o = delta_rule_by_chunks(q, k, v, a, b, A_log, dt_bias, state, slots, num_computed_tokens,
                             cu_seqlens, chunk_indices, chunk_slots)

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

A sequence without tokens needs no row: its slot is left alone.

Shapes as in `gated_delta_rule`; C rows of `chunk_indices`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.ops.fla import CHUNK_SIZE, SOLVE_BLOCK, prepare
from minivllm.ops.kernels import kernel

COLUMNS = 64  # of keys and values at a time in `write`, as FLA calls it

fla_inputs = kernel("fla_inputs", "fla_inputs")
chunk_states = kernel("chunk_states", "chunk_states")


class Stages(NamedTuple):
    """FLA's kernels in the order they run, or what launches them: `stage[grid](...)`.

    Attributes:
        solve: k, decay, beta to the inverse of each chunk's triangular system.
        write: from that, the corrections without a state (u) and what a state adds to them (w).
        output: o, from the state before each chunk and the chunk's own tokens.
    """

    solve: Any
    write: Any
    output: Any


class Pinned:
    """A kernel of FLA's as its tuner left it, without the tuner.

    Args:
        kernel: with its heuristics around its tuner around itself.
        options: blocks, `num_warps` and `num_stages`.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        heuristics = importlib.import_module("triton.runtime.autotuner").Heuristics
        self.kernel = heuristics(kernel.fn.fn, kernel.arg_names, kernel.values)
        self.options = options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **self.options)


@functools.cache
def tuned_stages() -> Stages:
    """What FLA's tuner chose on an H200 for K = V = 128; at every start that takes it 45 s."""
    stage = stages()
    return Stages(
        Pinned(stage.solve, BK=64, num_warps=1, num_stages=3),
        Pinned(stage.write, num_warps=4, num_stages=3),
        Pinned(stage.output, BK=64, BV=64, num_warps=4, num_stages=3),
    )


def stages_for(key_dim: int, value_dim: int) -> Stages:
    """The kernels for these head dims; FLA tunes those that are not known."""
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return tuned_stages() if key_dim == value_dim == 128 and hopper else stages()


@functools.cache
def stages() -> Stages:
    """The kernels of the installed FLA (0.6) with its tuner, imported on first use."""
    prepare()
    from fla.ops.common.chunk_o import chunk_fwd_kernel_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel

    return Stages(
        chunk_gated_delta_rule_fwd_kkt_solve_kernel,
        recompute_w_u_fwd_kernel,
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
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None = None,
    normalized: bool = False,
) -> Tensor:
    """Packed sequences from raw projections; beta is not rounded to its dtype.

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
    (key_heads, key_dim), (tokens, heads, value_dim) = q.shape[1:], v.shape
    chunks = chunk_indices.shape[0]
    indices = {"cu_seqlens": cu_seqlens.contiguous(), "chunk_indices": chunk_indices.contiguous()}
    sizes = {"T": tokens, "H": key_heads, "HV": heads, "K": key_dim, "BT": CHUNK_SIZE}
    x = fla_inputs(q, k, v, a, b, A_log, dt_bias, *indices.values(), normalized)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=v.dtype, device=v.device)

    def blocks(meta: dict[str, int]) -> int:  # FLA's tuner picks how many columns a program has
        return -(-value_dim // meta["BV"])

    stage = stages_for(key_dim, value_dim)
    stage.solve[chunks, heads](
        k=x.k, g=x.decay, beta=x.beta, A=x.inverse, BC=SOLVE_BLOCK, **indices, **sizes
    )
    w, u = empty(tokens, heads, key_dim), empty(tokens, heads, value_dim)
    stage.write[chunks, heads](
        k=x.k, v=x.v, beta=x.beta, w=w, u=u, A=x.inverse, g=x.decay,
        V=value_dim, BK=COLUMNS, BV=COLUMNS, **indices, **sizes,
    )  # fmt: skip
    before, corrections = chunk_states(
        x.k, u, w, x.decay, state, slots, num_computed_tokens,
        indices["cu_seqlens"], x.chunk_offsets, chunks, chunk_slots,
    )  # fmt: skip
    o = empty(tokens, heads, value_dim)
    stage.output[lambda meta: (blocks(meta) * chunks, heads)](
        q=x.q, k=x.k, v=corrections, h=before, g=x.decay, g_gamma=None, o=o,
        scale=key_dim**-0.5, V=value_dim, STATE_V_FIRST=False, **indices, **sizes,
    )  # fmt: skip
    return o
