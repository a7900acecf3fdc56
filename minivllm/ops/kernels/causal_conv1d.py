"""Kernels of `ops/causal_conv1d_slots.py`: the convolution on a pool of states.

A state may be read by other threads than those that write it, so a barrier stands between.

Shapes: T tokens, C channels, W taps; of a delta rule's q, k, v: HK key heads, HV value heads, K and
V head dims.
"""
# mypy: disable-error-code="no-untyped-def, assignment, misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.chunks import CHUNK_SIZE
from minivllm.ops.kernels.launch import let_next_start, pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rows_of
from minivllm.ops.kernels.unit_rows import unit

MINUS_LOG2_E = tl.constexpr(-math.log2(math.e))
DECODE_BLOCK_C = 128  # channels a program
DECODE_WARPS = 4
PREFILL_BLOCK_C = 128  # four channels a thread
PREFILL_RUN = 16  # tokens a program
PREFILL_AHEAD = 4  # tokens loaded at once
PREFILL_WARPS = 1
# with q, k, v apart: 16 bytes a thread, 256 channels of two bytes
QKV_BLOCK_C, QKV_RUN, QKV_AHEAD, QKV_WARPS = 256, 16, 4, 1
WARP_BYTES = 32 * 16


@triton.jit
def _silu(x):
    """x / (1 + exp(-x)): `exp` and a division would take twice the instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * MINUS_LOG2_E))
    return x * (root * root)


@triton.jit
def _widened(x):
    """x in float32; bfloat16 by its bits, which lets ptxas round two elements at once before."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


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
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.program_id(1).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    exists = c < C
    mask = exists[:, None] & (w < W)[None, :]
    cell = c[:, None] * W + w[None, :]
    if EARLY:
        let_next_start(PDL)
    else:
        wait_for_inputs(PDL)
    taps = tl.load(weight + cell, mask=mask, other=0.0).to(tl.float32)
    base = state + tl.load(slots + n).to(tl.int64) * state_slot
    # the state moves one place to the left, and x comes in at its end
    last = (w == W - 1)[None, :]
    inputs = tl.load(base + cell + 1, mask=mask & ~last, other=0.0)
    if EARLY:
        wait_for_inputs(PDL)
    token = tl.load(x + n * x_row + c, mask=exists, other=0.0)
    inputs = tl.where(last, token[:, None], inputs)
    tl.debug_barrier()
    tl.store(base + cell, inputs, mask=mask)
    total = tl.sum(inputs.to(tl.float32) * taps, axis=1)
    tl.store(y + n * C + c, _silu(total).to(y.dtype.element_ty), mask=exists)


@triton.jit
def _keep_state(x, x_row, old, target, end, live, c, C: tl.constexpr, W: tl.constexpr,
                BLOCK_W: tl.constexpr):  # fmt: skip
    """Write the state behind the first `end` tokens of x; of `old` the first `live` channels."""
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
def _convolve(
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
    c,
    C: tl.constexpr,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A run of tokens of one chunk; the program of a chunk's first run also keeps its states.

    `c` are the program's channels among the C behind x, weight and state; y has no others. If
    `HEADS` is not 0, they are those of so many heads, whose rows are brought to length 1.

    A program goes from token to token with the last inputs of its channels in registers, so that
    each is loaded and widened once. `AHEAD` tokens are loaded before any of them is stored.

    Only the program of a sequence's first run touches its slot: later ones find their history in
    x, and the last W inputs are in x too, or in the state that the first run has read.
    """
    tl.static_assert((W <= RUN + 1) & (W <= CHUNK) & (CHUNK % RUN == 0) & (RUN % AHEAD == 0))
    RUNS: tl.constexpr = CHUNK // RUN
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

    # a channel's taps are loaded at once; one by one they would be most of a program's loads
    column = tl.arange(0, BLOCK_W)[None, :]
    mask = (c < C)[:, None] & (column < W)
    tile = tl.load(weight + c[:, None] * W + column, mask=mask, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        taps += (tl.sum(tl.where(column == w, tile, 0.0), axis=1),)
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
            value = _silu(total).to(y.dtype.element_ty)
            if HEADS > 0:
                rows = tl.reshape(_widened(value), (HEADS, value.shape[0] // HEADS))
                value = tl.reshape(unit(rows), value.shape).to(y.dtype.element_ty)
            tl.store(y + at.to(tl.int64) * C + c, value, mask=c < inside)
        inputs = inputs[AHEAD:]

    if (t == first) & (first < length):
        if chunk_slots is not None:
            entry = tl.load(chunk_slots + row).to(tl.int64)
            if entry > 0:
                end = tl.minimum(first + CHUNK, length)
                target = state + entry * state_slot
                _keep_state(x, x_row, old, target, end, live, c, C, W, BLOCK_W)
        if first == 0:
            _keep_state(x, x_row, old, old, length, live, c, C, W, BLOCK_W)


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
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    _convolve(
        x, weight, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots, y,
        x_row, state_slot, c, C, W, CHUNK, RUN, AHEAD, BLOCK_W, 0,
    )  # fmt: skip


@triton.jit
def _qkv_prefill_kernel(
    x,
    weight,
    state,
    slots,
    num_computed_tokens,
    cu_seqlens,
    chunk_indices,
    chunk_slots,
    q,
    k,
    v,
    x_row,
    state_slot,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    VALUES: tl.constexpr,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RUN: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs of q come first, those of k, those of v; none has channels of two of them."""
    wait_for_inputs(PDL)
    BLOCKS: tl.constexpr = (KEY_HEADS + HEADS - 1) // HEADS  # of q, and of k
    KEYS: tl.constexpr = KEY_HEADS * K
    block = tl.program_id(0)
    i = tl.arange(0, HEADS * BLOCK_K)
    if block < 2 * BLOCKS:
        part = block // BLOCKS
        channel = (block % BLOCKS * HEADS + i // BLOCK_K) * K + i % BLOCK_K
        if K < BLOCK_K:  # a head's last columns belong to nobody
            channel = tl.where(i % BLOCK_K < K, channel, KEYS)
        y = q
        if part == 1:
            y = k
        _convolve(
            x + part * KEYS, weight + part * KEYS * W, state + part * KEYS * W, slots,
            num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots, y,
            x_row, state_slot, channel, KEYS, W, CHUNK, RUN, AHEAD, BLOCK_W, HEADS,
        )  # fmt: skip
    else:
        _convolve(
            x + 2 * KEYS, weight + 2 * KEYS * W, state + 2 * KEYS * W, slots,
            num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots, v,
            x_row, state_slot, (block - 2 * BLOCKS) * (HEADS * BLOCK_K) + i, VALUES, W, CHUNK, RUN,
            AHEAD, BLOCK_W, 0,
        )  # fmt: skip


def causal_conv1d_decode_slots(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, early: bool = False
) -> Tensor:
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
        EARLY=early,
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


def causal_conv1d_qkv_prefill_slots(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    chunk_slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.causal_conv1d_slots.define_qkv_prefill_slots`; a slot of the pool is contiguous."""
    tokens, (channels, taps) = x.shape[0], weight.shape
    assert state[0].is_contiguous()
    values = channels - 2 * key_heads * key_dim

    def empty(heads: int, dim: int) -> Tensor:
        return torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)

    q, k = empty(key_heads, key_dim), empty(key_heads, key_dim)
    v = empty(values // value_dim, value_dim)
    block_k = triton.next_power_of_2(key_dim)
    heads = max(1, QKV_BLOCK_C * 2 // x.element_size() // block_k)  # of keys a program
    block = heads * block_k
    blocks = 2 * triton.cdiv(key_heads, heads) + triton.cdiv(values, block)
    runs = chunk_indices.shape[0] * (CHUNK_SIZE // QKV_RUN)
    _qkv_prefill_kernel[(blocks, runs)](
        x,
        weight.contiguous(),
        state,
        slots.contiguous(),
        num_computed_tokens.contiguous(),
        cu_seqlens.contiguous(),
        chunk_indices.contiguous(),
        None if chunk_slots is None else chunk_slots.contiguous(),
        q,
        k,
        v,
        rows_of(x).token,
        state.stride(0),
        KEY_HEADS=key_heads,
        K=key_dim,
        VALUES=values,
        W=taps,
        CHUNK=CHUNK_SIZE,
        HEADS=heads,
        BLOCK_K=block_k,
        RUN=QKV_RUN,
        AHEAD=QKV_AHEAD,
        BLOCK_W=triton.next_power_of_2(taps),
        num_warps=max(QKV_WARPS, block * x.element_size() // WARP_BYTES),
        **pdl(),
    )
    return q, k, v
