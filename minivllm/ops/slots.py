"""Reading and writing the slots of a state pool, in plain torch, without a host sync.

    initial = initial_states(state, slots, num_computed_tokens)
    keep_final_states(state, slots, cu_seqlens, final)

Shapes: N sequences, S slots; a pool is `[S, ...]`, slots are `[N]` int64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def initial_states(state: Tensor, slots: Tensor, num_computed_tokens: Tensor) -> Tensor:
    """The states of N sequences, `[N, ...]`; zeros for those that start.

    Masked with `where`: a product with zero would keep a NaN of the slot's last owner.
    """
    return torch.where(_per_sequence(num_computed_tokens > 0, state), state[slots], 0.0)


def keep_final_states(state: Tensor, slots: Tensor, cu_seqlens: Tensor, final: Tensor) -> None:
    """Write `final` `[N, ...]` to the slots; a sequence without tokens leaves its slot alone."""
    has_tokens = _per_sequence(cu_seqlens[1:] > cu_seqlens[:-1], state)
    state[slots] = torch.where(has_tokens, final, state[slots])


def _per_sequence(flags: Tensor, state: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (state.dim() - 1))
