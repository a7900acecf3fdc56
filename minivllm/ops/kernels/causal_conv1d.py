"""Kernels of `ops/causal_conv1d_slots.py`: the convolution on a pool of states.

A state may be read by other threads than those that write it, so a barrier stands between.
"""
# mypy: disable-error-code="no-untyped-def, assignment, misc"

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
PREFILL_BLOCK_C = 128  # four channels a thread
PREFILL_RUN = 16  # tokens a program
PREFILL_AHEAD = 4  # tokens loaded at once
PREFILL_WARPS = 1


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
def _keep_state(x, x_row, old, target, end, live, C: tl.constexpr, W: tl.constexpr,
                BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr):  # fmt: skip
    """Write the state behind the first `end` tokens of x; of `old` the first `live` channels."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = tl.arange(0, BLOCK_W)
    at = end - W + w  # the token that becomes input w of the state
    cells = (c < C)[:, None] & (w < W)[None, :]
    inside = cells & (at >= 0)[None, :]
    recent = x + at.to(tl.int64)[None, :] * x_row + c[:, None]
    inputs = tl.load(recent, mask=inside, other=0.0)
    carried = old + c[:, None] * W + (W + at)[None, :]
    carried = tl.load(carried, mask=cells & ~inside & (c < live)[:, None], other=0.0)
    inputs = tl.where(inside, inputs, carried)
    tl.debug_barrier()
    tl.store(target + c[:, None] * W + w[None, :], inputs, mask=cells)


@triton.jit
def _prefill_kernel(
    x,
    weight,
    state,
    slots,
    num_computed_tokens,
    cu_seqlens,
    chunk_indices,
    chunk_slots,
    y,
    x_row,
    state_slot,
    C: tl.constexpr,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RUN: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A run of tokens of one chunk; the program of a chunk's first run also keeps its states.

    A program goes from token to token with the last inputs of its channels in registers, so that
    each is loaded and widened once. `AHEAD` tokens are loaded before any of them is stored.

    Only the program of a sequence's first run touches its slot: later ones find their history in
    x, and the last W inputs are in x too, or in the state that the first run has read.
    """
    tl.static_assert((W <= RUN + 1) & (W <= CHUNK) & (CHUNK % RUN == 0) & (RUN % AHEAD == 0))
    RUNS: tl.constexpr = CHUNK // RUN
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.program_id(1) // RUNS
    n = tl.load(chunk_indices + row * 2)
    first = tl.load(chunk_indices + row * 2 + 1) * CHUNK
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1) - start.to(tl.int32)
    t = first + tl.program_id(1) % RUNS * RUN
    x += start * x_row
    y += start * C
    old = state + tl.load(slots + n).to(tl.int64) * state_slot
    # bounds of channels: Triton 3.9's interpreter takes no mask that was combined with a scalar
    here = tl.where(t < length, C, 0)
    live = tl.where((tl.load(num_computed_tokens + n) > 0) & (t < length), C, 0)

    taps = ()
    for w in tl.static_range(W):
        taps += (tl.load(weight + c * W + w, mask=c < C, other=0.0).to(tl.float32),)
    inputs = ()  # the W - 1 tokens before t, then those loaded ahead
    for w in tl.static_range(W - 1):
        at = t - (W - 1) + w
        inside = tl.where(at >= 0, here, 0)
        carried = tl.where(at >= 0, 0, live)
        value = tl.load(x + at.to(tl.int64) * x_row + c, mask=c < inside, other=0.0)
        value += tl.load(old + c * W + (W + at), mask=c < carried, other=0.0)
        inputs += (value.to(tl.float32),)
    for step in range(0, RUN, AHEAD):
        for i in tl.static_range(AHEAD):
            at = t + step + i
            inside = tl.where(at < length, C, 0)
            value = tl.load(x + at.to(tl.int64) * x_row + c, mask=c < inside, other=0.0)
            inputs += (value.to(tl.float32),)
        for i in tl.static_range(AHEAD):
            at = t + step + i
            inside = tl.where(at < length, C, 0)
            total = inputs[i] * taps[0]
            for w in tl.static_range(1, W):
                total += inputs[i + w] * taps[w]
            target = y + at.to(tl.int64) * C + c
            tl.store(target, silu(total).to(y.dtype.element_ty), mask=c < inside)
        inputs = inputs[AHEAD:]

    if (t == first) & (first < length):
        if chunk_slots is not None:
            entry = tl.load(chunk_slots + row).to(tl.int64)
            if entry > 0:
                end = tl.minimum(first + CHUNK, length)
                target = state + entry * state_slot
                _keep_state(x, x_row, old, target, end, live, C, W, BLOCK_C, BLOCK_W)
        if first == 0:
            _keep_state(x, x_row, old, old, length, live, C, W, BLOCK_C, BLOCK_W)


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
    chunk_slots: Tensor | None = None,
) -> Tensor:
    """As `ops.causal_conv1d_slots.define_prefill_slots`; a slot of the pool is contiguous."""
    channels, taps = weight.shape
    assert state[0].is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    runs = chunk_indices.shape[0] * (CHUNK_SIZE // PREFILL_RUN)
    _prefill_kernel[(triton.cdiv(channels, PREFILL_BLOCK_C), runs)](
        x,
        weight.contiguous(),
        state,
        slots.contiguous(),
        num_computed_tokens.contiguous(),
        cu_seqlens.contiguous(),
        chunk_indices.contiguous(),
        None if chunk_slots is None else chunk_slots.contiguous(),
        y,
        rows_of(x).token,
        state.stride(0),
        C=channels,
        W=taps,
        CHUNK=CHUNK_SIZE,
        BLOCK_C=PREFILL_BLOCK_C,
        RUN=PREFILL_RUN,
        AHEAD=PREFILL_AHEAD,
        BLOCK_W=triton.next_power_of_2(taps),
        num_warps=PREFILL_WARPS,
    )
    return y
