"""Causal depthwise convolution over the tokens of each sequence, followed by SiLU.

Owns the three forms of one operation: a whole sequence (the plain model), packed sequences with
state (prefill), one token a sequence with state (decode). Does not own where states live.

    y = torch.ops.minivllm.causal_conv1d(x, weight)

Shapes: T tokens, N sequences, C channels, W taps. The state of a sequence holds its last W
inputs, `[C, W]`, oldest first (W and not W - 1, as FLA's update kernel indexes it).
`y[t, c] = silu(sum_w weight[c, w] * x[t - W + 1 + w, c])`, accumulated in float32, cast last.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops import fla
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.op import HALF_DTYPES, Implementation, define_op


def define_varlen(
    x: Tensor, weight: Tensor, initial_state: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """The packed form, one sequence after another.

    Args:
        x: `[T, C]`, sequences packed one behind the other.
        weight: `[C, W]`.
        initial_state: `[N, C, W]`, in x's dtype.
        cu_seqlens: `[N + 1]`, int32: where each sequence starts; the last entry is T.
        chunk_indices: `[chunks, 2]`, int32 (sequence, chunk of 64 in it); FLA's kernel needs it.

    Returns:
        y `[T, C]` and the states after the last token `[N, C, W]`, both in x's dtype.
    """
    taps = weight.shape[1]
    outputs, states = [], []
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        history = torch.cat([initial_state[n].T, x[start:end]])
        windows = history[1:].unfold(0, taps, 1) if end > start else history[:0].unsqueeze(-1)
        outputs.append(F.silu((windows.float() * weight.float()).sum(-1)))
        states.append(history[-taps:].T)
    return torch.cat(outputs).to(x.dtype), torch.stack(states)


def _varlen(
    x: Tensor, weight: Tensor, initial_state: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """All sequences at once by gathers: no loop over sequences and nothing read by the host."""
    tokens, taps = x.shape[0], weight.shape[1]
    row = torch.arange(tokens, device=x.device)
    starts = cu_seqlens[:-1].long()
    sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)
    local = row - starts[sequence]
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for back in range(taps):
        inside = (local >= back)[:, None]
        before = initial_state[sequence, :, (taps + local - back).clamp(max=taps - 1)]
        value = torch.where(inside, x[(row - back).clamp(min=0)], before)
        y += value.float() * weight[:, taps - 1 - back].float()
    lengths = cu_seqlens[1:].long() - starts
    position = lengths[:, None] + torch.arange(-taps, 0, device=x.device)
    carried = initial_state.gather(
        2, (taps + position).clamp(0, taps - 1)[:, None].expand_as(initial_state)
    )
    if tokens == 0:
        return y.to(x.dtype), carried
    recent = x[(starts[:, None] + position).clamp(0, tokens - 1)].transpose(1, 2)
    final_state = torch.where((position >= 0)[:, None], recent, carried)
    return F.silu(y).to(x.dtype), final_state.contiguous()


def _varlen_fla(
    x: Tensor, weight: Tensor, initial_state: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> tuple[Tensor, Tensor]:
    y, final_state = fla.causal_conv1d()(
        x[None],
        weight=weight,
        initial_state=initial_state,
        output_final_state=True,
        activation="silu",
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices,
    )
    return y[0], final_state


def _varlen_fake(
    x: Tensor, weight: Tensor, initial_state: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), initial_state.new_empty(initial_state.shape)


def define_update(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One more token for each sequence.

    Args:
        x: `[N, C]`, one token a sequence.
        weight: `[C, W]`.
        state: `[N, C, W]`, in x's dtype; not changed.

    Returns:
        y `[N, C]` and the new states `[N, C, W]`, both in x's dtype.
    """
    new_state = torch.cat([state[:, :, 1:], x[:, :, None]], dim=-1)
    y = F.silu((new_state.float() * weight.float()).sum(-1))
    return y.to(x.dtype), new_state


def _update_fla(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return fla.causal_conv1d_update()(x, state.clone(), weight=weight, activation="silu")


def _update_fake(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


def define_sequence(x: Tensor, weight: Tensor) -> Tensor:
    """A whole sequence from an empty history: x `[T, C]`, weight `[C, W]` to y `[T, C]`."""
    taps = weight.shape[1]
    windows = F.pad(x, (0, 0, taps - 1, 0)).unfold(0, taps, 1)
    return F.silu((windows.float() * weight.float()).sum(-1)).to(x.dtype)


def _sequence_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _weights(generator: torch.Generator, dtype: torch.dtype, channels: int, taps: int) -> Tensor:
    return torch.randn(channels, taps, generator=generator).to(dtype)


def _sequence_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [
        (
            torch.randn(tokens, 2 * channels, generator=generator).to(dtype)[:, :channels],
            _weights(generator, dtype, channels, 4),
        )
        for tokens, channels in ((1, 24), (3, 40), (65, 24))
    ]


def _varlen_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    examples: list[tuple[Tensor, ...]] = []
    for lengths in ((1,), (7, 1, 64), (3, 0, 65, 2)):
        channels = 40
        x = torch.randn(sum(lengths), 2 * channels, generator=generator).to(dtype)[:, :channels]
        state = torch.randn(len(lengths), channels, 4, generator=generator).to(dtype)
        weight = _weights(generator, dtype, channels, 4)
        examples.append((x, weight, state, *chunk_metadata(lengths)))
    return examples


def _update_examples(generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [
        (
            torch.randn(n, 2 * 40, generator=generator).to(dtype)[:, :40],
            _weights(generator, dtype, 40, 4),
            torch.randn(n, 40, 4, generator=generator).to(dtype),
        )
        for n in (1, 5)
    ]


# float32: four products and a SiLU, a few ulps. Half precision: the output's own rounding.
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}

CAUSAL_CONV1D = define_op(
    "causal_conv1d(Tensor x, Tensor weight) -> Tensor",
    definition=define_sequence,
    fake=_sequence_fake,
    implementations=(Implementation("torch", define_sequence),),
    examples=_sequence_examples,
    tolerance=_TOLERANCE,
)

CAUSAL_CONV1D_PREFILL = define_op(
    "causal_conv1d_prefill(Tensor x, Tensor weight, Tensor initial_state, Tensor cu_seqlens, "
    "Tensor chunk_indices) -> (Tensor, Tensor)",
    definition=define_varlen,
    fake=_varlen_fake,
    implementations=(
        Implementation("torch", _varlen, capturable=False),
        Implementation("fla", _varlen_fla, ("cuda",), HALF_DTYPES, "fla", capturable=False),
    ),
    examples=_varlen_examples,
    tolerance=_TOLERANCE,
)

CAUSAL_CONV1D_DECODE = define_op(
    "causal_conv1d_decode(Tensor x, Tensor weight, Tensor state) -> (Tensor, Tensor)",
    definition=define_update,
    fake=_update_fake,
    implementations=(
        Implementation("torch", define_update),
        Implementation("fla", _update_fla, ("cuda",), HALF_DTYPES, "fla", capturable=False),
    ),
    examples=_update_examples,
    tolerance=_TOLERANCE,
)
