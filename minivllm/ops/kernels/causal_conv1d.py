"""Kernels of `ops/causal_conv1d_slots.py`: the convolution on a pool of states.

A state may be read by other threads than those that write it, so a barrier stands between.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.fla import CHUNK_SIZE
from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rows_of, silu

DECODE_BLOCK_C = 128  # channels a program
DECODE_WARPS = 4
PREFILL_BLOCK_C = 64  # times CHUNK_SIZE tokens: 16 elements a thread, whole 128-byte lines
PREFILL_WARPS = 8


@triton.jit
def _decode_kernel(
    x,
    weight,
    state,
    slots,
    y,
    x_row,
    state_slot,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.program_id(1).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    exists = c < C
    mask = exists[:, None] & (w < W)[None, :]
    cell = c[:, None] * W + w[None, :]
    base = state + tl.load(slots + n).to(tl.int64) * state_slot
    # the state moves one place to the left, and x comes in at its end
    last = (w == W - 1)[None, :]
    inputs = tl.load(base + cell + 1, mask=mask & ~last, other=0.0)
    token = tl.load(x + n * x_row + c, mask=exists, other=0.0)
    inputs = tl.where(last, token[:, None], inputs)
    tl.debug_barrier()
    tl.store(base + cell, inputs, mask=mask)
    taps = tl.load(weight + cell, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(inputs.to(tl.float32) * taps, axis=1)
    tl.store(y + n * C + c, silu(total).to(y.dtype.element_ty), mask=exists)


@triton.jit
def _prefill_kernel(
    x,
    weight,
    state,
    slots,
    num_computed_tokens,
    cu_seqlens,
    chunk_indices,
    y,
    x_row,
    state_slot,
    C: tl.constexpr,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One chunk of one sequence; the program of its first chunk also keeps its state.

    No other program touches that slot: later chunks find their history in x, and the last W
    inputs are in x too, or in the state that the first chunk has read.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.load(chunk_indices + tl.program_id(1) * 2)
    chunk = tl.load(chunk_indices + tl.program_id(1) * 2 + 1)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1) - start.to(tl.int32)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = c < C
    x += start * x_row
    base = state + tl.load(slots + n).to(tl.int64) * state_slot
    has_history = (chunk == 0) & (tl.load(num_computed_tokens + n) > 0)

    total = tl.zeros([CHUNK, BLOCK_C], dtype=tl.float32)
    for back in tl.static_range(W - 1, -1, -1):
        taps = tl.load(weight + c * W + (W - 1 - back), mask=exists, other=0.0).to(tl.float32)
        source = t - back
        mask = ((source >= 0) & (source < length))[:, None] & exists[None, :]
        place = x + source.to(tl.int64)[:, None] * x_row + c[None, :]
        values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if has_history:
            before = (source < 0)[:, None] & exists[None, :]
            place = base + c[None, :] * W + (W + source)[:, None]
            values += tl.load(place, mask=before, other=0.0).to(tl.float32)
        total += values * taps[None, :]
    place = y + (start + t)[:, None] * C + c[None, :]
    mask = (t < length)[:, None] & exists[None, :]
    tl.store(place, silu(total).to(y.dtype.element_ty), mask=mask)

    if (chunk == 0) & (length > 0):
        w = tl.arange(0, BLOCK_W)
        at = length - W + w  # the token that becomes input w of the state
        cells = exists[:, None] & (w < W)[None, :]
        inside = cells & (at >= 0)[None, :]
        recent = x + at.to(tl.int64)[None, :] * x_row + c[:, None]
        inputs = tl.load(recent, mask=inside, other=0.0)
        carried = base + c[:, None] * W + (W + at)[None, :]
        # a bound: Triton 3.9's interpreter takes no mask that was combined with a scalar
        live = tl.where(has_history, C, 0)
        carried = tl.load(carried, mask=cells & ~inside & (c < live)[:, None], other=0.0)
        inputs = tl.where(inside, inputs, carried)
        tl.debug_barrier()
        tl.store(base + c[:, None] * W + w[None, :], inputs, mask=cells)


def causal_conv1d_decode_slots(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """As `ops.causal_conv1d_slots.define_decode_slots`; a slot of the pool is contiguous."""
    sequences, channels = x.shape
    taps = weight.shape[1]
    assert state[0].is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _decode_kernel[(triton.cdiv(channels, DECODE_BLOCK_C), sequences)](
        x,
        weight.contiguous(),
        state,
        slots.contiguous(),
        y,
        rows_of(x).token,
        state.stride(0),
        C=channels,
        W=taps,
        BLOCK_C=DECODE_BLOCK_C,
        BLOCK_W=triton.next_power_of_2(taps),
        num_warps=DECODE_WARPS,
        **pdl(),
    )
    return y


def causal_conv1d_prefill_slots(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> Tensor:
    """As `ops.causal_conv1d_slots.define_prefill_slots`; a slot of the pool is contiguous."""
    channels, taps = weight.shape
    assert state[0].is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _prefill_kernel[(triton.cdiv(channels, PREFILL_BLOCK_C), chunk_indices.shape[0])](
        x,
        weight.contiguous(),
        state,
        slots.contiguous(),
        num_computed_tokens.contiguous(),
        cu_seqlens.contiguous(),
        chunk_indices.contiguous(),
        y,
        rows_of(x).token,
        state.stride(0),
        C=channels,
        W=taps,
        CHUNK=CHUNK_SIZE,
        BLOCK_C=PREFILL_BLOCK_C,
        BLOCK_W=triton.next_power_of_2(taps),
        num_warps=PREFILL_WARPS,
    )
    return y
