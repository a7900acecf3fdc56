"""Reading and writing the slots of a state pool, in plain torch.

    o = by_segments(run, state, slots, num_computed_tokens, cu_seqlens, chunk_indices, chunk_slots)

Shapes: T tokens, N sequences, C chunks, S slots; a pool is `[S, ...]`, slots are `[N]` int64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.ops.chunks import CHUNK_SIZE, chunk_metadata


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


def by_segments(
    run: Callable[..., tuple[Tensor, Tensor]],
    state: Tensor,
    slots: Tensor,
    num_computed_tokens: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    chunk_slots: Tensor | None,
) -> Tensor:
    """Run packed sequences from and to their slots, and keep the states that are wanted between.

    A sequence is cut behind each chunk whose state is wanted: first the first segments of all
    sequences run, then the second ones from where those ended, and so on.

    Args:
        run: `run(places, initial, cu_seqlens, chunk_indices)` gives the outputs `[T', ...]` of the
            tokens at `places` and the final states `[N', ...]`.
        chunk_slots: `[C]` int32: the entry of the pool for the state behind a chunk; 0: none.

    Returns:
        The outputs of all tokens, `[T, ...]`.
    """
    initial = initial_states(state, slots, num_computed_tokens)
    if chunk_slots is None or not chunk_slots.any():
        o, final = run(slice(None), initial, cu_seqlens, chunk_indices)
        keep_final_states(state, slots, cu_seqlens, final)
        return o
    bounds, device = cu_seqlens.tolist(), state.device
    ends: list[list[tuple[int, int]]] = [[] for _ in slots]  # of segments: token, entry or 0
    for (n, chunk), entry in zip(chunk_indices.tolist(), chunk_slots.tolist(), strict=True):
        if entry:
            ends[n].append((min(bounds[n] + (chunk + 1) * CHUNK_SIZE, bounds[n + 1]), entry))
    for n, cuts in enumerate(ends):
        if not cuts or cuts[-1][0] < bounds[n + 1]:
            cuts.append((bounds[n + 1], 0))
    current, starts = initial.clone(), bounds[:-1]
    output: Tensor | None = None
    for wave in range(max(map(len, ends))):
        running = [n for n, cuts in enumerate(ends) if wave < len(cuts)]
        spans = [(starts[n], ends[n][wave][0]) for n in running]
        places = torch.cat([torch.arange(*span, device=device) for span in spans])
        metadata = (x.to(device) for x in chunk_metadata([end - start for start, end in spans]))
        o, final = run(places, current[running], *metadata)
        if output is None:
            output = o.new_empty((bounds[-1], *o.shape[1:]))
        output[places] = o
        current[running] = final
        for n, (_, end), last in zip(running, spans, final, strict=True):
            starts[n] = end
            if entry := ends[n][wave][1]:
                state[entry] = last
    keep_final_states(state, slots, cu_seqlens, current)
    assert output is not None
    return output
