"""Sums and orders over the vocabulary that no batch, device or order of work can change.

Owns the two tricks behind it: sums are of integers, and sort keys are all different. Does not own
what is summed or sorted (`sampler`, `logprobs`).

    total = units(weights).sum(-1)             # int64, the same whatever the order of summation
    values, ids = leading(logits, 20)          # equal values: the lowest id first

Shapes: N rows, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Weights exp(logit - max) <= 1 become integers in units of 2**-44: 2**18 of them fit in int64,
# and what rounds to zero is, all together, less than 2**-26 of the most probable token.
WEIGHT_UNITS = 2.0**44
_LOW = 2**32 - 1


def units(weights: Tensor) -> Tensor:
    """[N, V] int64 from weights in [0, 1]."""
    return weights.double().mul_(WEIGHT_UNITS).round_().long()


def order_keys(values: Tensor) -> Tensor:
    """[N, V] int64 from float32: all different in a row, greater for a greater value, and among
    equal values for a lower id."""
    bits = (values + 0.0).view(torch.int32)  # + 0: both zeros become one
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    size = values.shape[-1]
    last_first = torch.arange(size - 1, -1, -1, dtype=torch.int64, device=values.device)
    return ascending.long().mul_(2**32).add_(last_first)


def key_ids(keys: Tensor, size: int) -> Tensor:
    """The ids of `order_keys` of a row of `size`."""
    return size - 1 - (keys & _LOW)


def leading(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row of float32 [N, V] and their ids, greatest first."""
    keys = order_keys(values).topk(count, dim=-1).values
    ids = key_ids(keys, values.shape[-1])
    return values.gather(-1, ids), ids
