"""From logits to token ids: greedy, temperature, top_k, top_p and min_p.

Owns the choice of one token a row. Does not own where seeds and positions come from (the engine)
nor when a request ends (`stop`).

    ids = sample(logits, params, seeds=[7, 8], positions=[12, 40], vocab_limit=248077)

A row's draw depends on its logits, its parameters, its seed and its position, and on nothing else:
not on the batch, its order or its size. The uniform number is a hash of (seed, position); every
sum over the vocabulary is of integers, whose value no order of summation can change.

Shapes: N rows (sequences), V vocabulary entries of the model's head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.runtime.sampling_params import SamplingParams

# Weights exp(logit - max) <= 1 become integers in units of 2**-44: 2**18 of them fit in int64,
# and what rounds to zero is, all together, less than 2**-26 of the most probable token.
_WEIGHT_UNITS = 2.0**44
_MASK = 2**64 - 1


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_limit: int,
) -> Tensor:
    """One token id a row.

    Filters apply in the order temperature, top_k, top_p (of what top_k left), min_p; among equal
    logits the lowest id comes first, in greedy rows too.

    Args:
        logits: [N, V], any float dtype and device.
        params: N, one a row.
        seeds: N; those of greedy rows are not used.
        positions: N, of the token to be drawn in its sequence; greedy rows' are not used.
        vocab_limit: ids from here on (a padded head's) are never chosen.

    Returns:
        [N] int64 on the device of the logits.

    Raises:
        RuntimeError: a row below `vocab_limit` holds NaN or +inf, or nothing above -inf.
    """
    assert logits.ndim == 2 and vocab_limit > 0, (logits.shape, vocab_limit)
    assert len(params) == len(seeds) == len(positions) == logits.shape[0], logits.shape
    logits = logits[:, :vocab_limit]
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    highest, ids = logits.max(dim=-1)
    finite = highest.isfinite()
    if not bool(finite.all()):
        rows = (~finite).nonzero().flatten().tolist()
        raise RuntimeError(
            f"the logits of rows {rows} of {len(params)} hold NaN or +inf, or nothing above -inf: "
            f"highest values {highest[rows].tolist()}"
        )
    plain: list[int] = []
    ranked: list[int] = []
    for row, p in enumerate(params):
        if not p.greedy:
            (ranked if _limits_rank(p, logits.shape[1]) else plain).append(row)
    for rows, draw in ((plain, _draw_plain), (ranked, _draw_ranked)):
        if rows:
            chosen = [params[row] for row in rows]
            uniforms = [uniform(seeds[row], positions[row]) for row in rows]
            # With the highest logit at 0, a small temperature overflows to -inf at worst.
            scaled = logits[rows].float() - highest[rows].float().unsqueeze(-1)
            scaled /= _column(scaled, [p.temperature for p in chosen])
            ids[rows] = draw(scaled, chosen, _column(scaled, uniforms, torch.float64))
    return ids


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, that is a function of its arguments alone.

    Two rounds of SplitMix64 (Steele, Lea and Flood 2014): the seed picks the stream, the position
    the place in it.
    """
    return (_mix(_mix(seed & _MASK) + position & _MASK) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _limits_rank(params: SamplingParams, size: int) -> bool:
    """Whether the row must be sorted: min_p alone needs no order."""
    return 0 < params.top_k < size or params.top_p < 1.0


def _draw_plain(scaled: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """[N] ids from scaled logits [N, V] (highest 0) and uniforms [N, 1], in the order of ids."""
    weights = scaled.exp()
    kept = weights >= _column(weights, [p.min_p for p in params])
    cumulative = _units(weights).mul_(kept).cumsum(-1)
    return _invert(cumulative, cumulative[:, -1:], uniforms).squeeze(-1)


def _draw_ranked(scaled: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """As `_draw_plain`, most probable first: each filter keeps a prefix, and the shortest wins."""
    size = scaled.shape[1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    weights = ordered.exp()
    units = _units(weights)
    cumulative = units.cumsum(-1)
    top_k = [min(p.top_k, size) if p.top_k > 0 else size for p in params]
    kept = _column(order, top_k, torch.int64)
    mass = cumulative.gather(-1, kept - 1).double()
    mass *= _column(mass, [p.top_p for p in params])
    before = (cumulative - units).double()
    kept = kept.minimum((before < mass).sum(-1, keepdim=True))
    above = weights >= _column(weights, [p.min_p for p in params])
    kept = kept.minimum(above.sum(-1, keepdim=True))
    rank = _invert(cumulative, cumulative.gather(-1, kept - 1), uniforms)
    return order.gather(-1, rank).squeeze(-1)


def _units(weights: Tensor) -> Tensor:
    return (weights.double() * _WEIGHT_UNITS).round_().long()


def _invert(cumulative: Tensor, total: Tensor, uniforms: Tensor) -> Tensor:
    """[N, 1] first index whose cumulative weight exceeds the share `uniforms` of `total` [N, 1]."""
    target = (uniforms * total.double()).long().minimum(total - 1)
    return torch.searchsorted(cumulative, target, right=True)


def _column(like: Tensor, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """[N, 1] of `values`, on the device of `like` and, unless given, in its dtype."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(-1)
