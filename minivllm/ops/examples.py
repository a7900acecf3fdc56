"""Example inputs that several ops share: slices of one wide row, as a merged projection makes them.

gate, up = columns(generator, dtype, rows, (width,), (width,))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# tokens a batch; none is a multiple of a kernel's block
TOKENS = (1, 3, 65)


def columns(
    generator: torch.Generator, dtype: torch.dtype, rows: int, *shapes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Random `[rows, *shape]` for each shape, side by side in rows that are wider than their sum.

    The last columns belong to nobody and are NaN.
    """
    widths = [math.prod(shape) for shape in shapes]
    mixed = torch.randn(rows, sum(widths), generator=generator)
    mixed = torch.cat([mixed, torch.full((rows, 16), torch.nan)], dim=-1).to(dtype)
    parts = mixed.split([*widths, 16], dim=-1)[:-1]
    return tuple(x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True))


def vector(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """A random contiguous parameter."""
    return torch.randn(shape, generator=generator).to(dtype)


def scattered_slots(generator: torch.Generator, sequences: int, slots: int) -> Tensor:
    """A slot for each sequence, all different, none of them 0; `[N]` int64."""
    return torch.randperm(slots - 1, generator=generator)[:sequences] + 1


def pool(used: Tensor, slots: Tensor, size: int) -> Tensor:
    """A state pool of `size` slots that holds `used[n]` at `slots[n]` and NaN elsewhere."""
    state = used.new_full((size, *used.shape[1:]), torch.nan)
    state[slots] = used
    return state
