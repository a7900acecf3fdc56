"""Gather from and scatter to a state pool, around kernels that know no slots (FLA's)."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements a program
NUM_WARPS = 4


@triton.jit
def _gather_kernel(
    state, slots, num_computed_tokens, y, state_slot, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1).to(tl.int64)
    source = state + tl.load(slots + n).to(tl.int64) * state_slot + i
    # a sequence that starts reads nothing (a bound: Triton 3.9's interpreter takes no mask that
    # was combined with a scalar)
    live = tl.where(tl.load(num_computed_tokens + n) == 0, 0, SIZE)
    values = tl.load(source, mask=i < live, other=0.0)
    tl.store(y + n * SIZE + i, values.to(tl.float32), mask=i < SIZE)


@triton.jit
def _scatter_kernel(
    x, state, slots, cu_seqlens, state_slot, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1).to(tl.int64)
    live = tl.where(tl.load(cu_seqlens + n + 1) > tl.load(cu_seqlens + n), SIZE, 0)
    mask = i < live
    values = tl.load(x + n * SIZE + i, mask=mask, other=0.0)
    target = state + tl.load(slots + n).to(tl.int64) * state_slot + i
    tl.store(target, values.to(state.dtype.element_ty), mask=mask)


def gather_states(state: Tensor, slots: Tensor, num_computed_tokens: Tensor) -> Tensor:
    """As `ops.slots.initial_states`, in float32; a slot of the pool is contiguous."""
    assert state[0].is_contiguous()
    y = torch.empty((slots.shape[0], *state.shape[1:]), dtype=torch.float32, device=state.device)
    size = state[0].numel()
    _gather_kernel[(triton.cdiv(size, BLOCK), slots.shape[0])](
        state,
        slots.contiguous(),
        num_computed_tokens.contiguous(),
        y,
        state.stride(0),
        SIZE=size,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return y


def scatter_states(final: Tensor, state: Tensor, slots: Tensor, cu_seqlens: Tensor) -> None:
    """As `ops.slots.keep_final_states`; a slot of the pool is contiguous."""
    assert state[0].is_contiguous()
    size = state[0].numel()
    _scatter_kernel[(triton.cdiv(size, BLOCK), slots.shape[0])](
        final.contiguous(),
        state,
        slots.contiguous(),
        cu_seqlens.contiguous(),
        state.stride(0),
        SIZE=size,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
