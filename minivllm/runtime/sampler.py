"""From logits to token ids: greedy, temperature, top_k, top_p and min_p.

Owns the choice of one token a row. Does not own where parameters, seeds and positions come from
(`sampling_batch`), the edits of logits (`penalties`), the numbers that tell of a choice
(`logprobs`), nor when a request ends (`stop`).

    batch = SamplingBatch.build(params, seeds, positions, histories, eos_ids, device, vocab_limit)
    sampled = sample(logits, batch)            # sampled.token_ids, sampled.valid, sampled.logprobs

Order, as in vLLM: logprobs are of the raw logits; then the mask of `min_tokens`, `logit_bias`, the
penalties for repetition, frequency and presence (these move greedy rows too); then temperature,
top_k, top_p (of what top_k left), min_p. vLLM applies min_p before top_k and top_p; here it comes
last, as in transformers, so top_p counts a mass that min_p has not yet cut.

A row's draw depends on its logits, its parameters, its tokens so far, its seed and its position,
and on nothing else: not on the batch, its order or its size, nor on rows whose logits are broken.
The uniform number is a hash of (seed, position); every sum over the vocabulary is of integers,
whose value no order of summation can change. Nothing here waits for the device.

Shapes: N rows (sequences), D of them drawn, V vocabulary entries of the model's head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.runtime.exact import leading, units
from minivllm.runtime.logprobs import TokenLogprobs, token_logprobs
from minivllm.runtime.sampling_batch import Group, SamplingBatch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Sampled:
    """What was drawn, on the device of the logits.

    Attributes:
        token_ids: [N] int64; 0 where not valid.
        valid: [N] bool; False for a row whose logits below `vocab_limit` hold NaN or +inf, or, raw
            or edited, nothing above -inf.
        logprobs: of the rows `batch.logprob_rows`, in their order; without meaning where not
            valid. None where no row asked.
    """

    token_ids: Tensor
    valid: Tensor
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class OnItsWay:
    """Drawn tokens whose copy to the host has been started.

    Attributes:
        logprobs: of the rows that asked for them, on the device still.
    """

    logprobs: TokenLogprobs | None
    _host: Tensor
    _copied: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """The tokens, -1 where not valid, as soon as the copy has arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


def on_its_way(token_ids: Tensor, logprobs: TokenLogprobs | None = None) -> OnItsWay:
    """Start the copy of tokens, -1 where not valid, to the host; later work does not delay it."""
    if token_ids.device.type != "cuda":
        return OnItsWay(logprobs, token_ids.clone(), None)
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    host.copy_(token_ids, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(token_ids.device))
    return OnItsWay(logprobs, host, copied)


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """One token a row; among equal logits the lowest id comes first, in greedy rows too.

    Args:
        logits: [N, V], any float dtype, on the batch's device; left as they are.
        batch: of the same N rows.
    """
    assert logits.ndim == 2 and len(logits) == batch.size, (logits.shape, batch.size)
    assert batch.vocab_limit <= logits.shape[1], (logits.shape, batch.vocab_limit)
    logits = logits[:, : batch.vocab_limit]
    highest, ids = logits.max(dim=-1) if batch.size else (logits[:, 0], batch.rows)
    valid = highest.isfinite()
    edited, edited_highest = logits, highest
    if batch.edits is not None:
        edited = batch.edits.apply(logits)
        edited_highest, edited_ids = edited.max(dim=-1)
        rows = batch.edits.rows
        ids.index_copy_(0, rows, edited_ids)
        # A mask may hide a raw NaN: both must be finite.
        edited_valid = edited_highest.isfinite() & valid.index_select(0, rows)
        valid.index_copy_(0, rows, edited_valid)
    if batch.groups:
        shares = uniforms(batch.seeds, batch.positions)
        for group in batch.groups:
            source = (edited, edited_highest) if group.edited else (logits, highest)
            scaled = _scaled(*source, valid, batch, group)
            rows = batch.rows[group.start : group.stop]
            draw = _draw_plain if group.kind == "plain" else _draw_ranked
            ids.index_copy_(0, rows, draw(scaled, batch, group, _column(shares, group)))
    ids.masked_fill_(~valid, 0)
    logprobs = None
    if batch.logprob_rows:
        rows = batch.logprob_index
        asking = logits if len(rows) == batch.size else logits.index_select(0, rows)
        logprobs = token_logprobs(
            asking, ids.index_select(0, rows), batch.num_logprobs, batch.vocab_limit
        )
    return Sampled(ids, valid, logprobs)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, that is a function of its arguments alone.

    Two rounds of SplitMix64 (Steele, Lea and Flood 2014): the seed picks the stream, the position
    the place in it. The definition of `uniforms`, in plain Python.
    """
    return (_mix(_mix(seed & _MASK) + position & _MASK) >> 11) * 2.0**-53


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """[D] float64: `uniform` of int64 [D] seeds and positions, bit for bit, on their device."""
    return _shifted(_mix_tensor(_mix_tensor(seeds) + positions), 11).double() * 2.0**-53


def _mix(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * _MULTIPLIERS[0] & _MASK
    z = (z ^ (z >> 27)) * _MULTIPLIERS[1] & _MASK
    return z ^ (z >> 31)


def _mix_tensor(state: Tensor) -> Tensor:
    """`_mix` in int64, whose sums and products wrap around to the same 64 bits."""
    z = state + (_GOLDEN - 2**64)
    z = (z ^ _shifted(z, 30)) * (_MULTIPLIERS[0] - 2**64)
    z = (z ^ _shifted(z, 27)) * (_MULTIPLIERS[1] - 2**64)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, count: int) -> Tensor:
    """Shifted right with zeros coming in: int64's own shift brings copies of the sign."""
    return (z >> count) & (2 ** (64 - count) - 1)


def _scaled(
    logits: Tensor, highest: Tensor, valid: Tensor, batch: SamplingBatch, group: Group
) -> Tensor:
    """[n, V] float32, new: the group's logits, the highest at 0, by its temperatures."""
    if group.first is not None:
        stop = group.first + group.stop - group.start
        logits, highest = logits[group.first : stop], highest[group.first : stop]
    else:
        sources = batch.sources[group.start : group.stop]
        logits, highest = logits.index_select(0, sources), highest.index_select(0, sources)
    # With the highest logit at 0, a small temperature overflows to -inf at worst.
    scaled = logits.float() - highest.float().unsqueeze(-1)
    scaled /= _column(batch.temperature, group).float()
    # Broken rows must not lead an index out of its range.
    broken = ~valid.index_select(0, batch.rows[group.start : group.stop])
    return scaled.masked_fill_(broken.unsqueeze(-1), 0.0)


def _draw_plain(scaled: Tensor, batch: SamplingBatch, group: Group, shares: Tensor) -> Tensor:
    """[n] ids from scaled logits [n, V] (highest 0) and shares [n, 1], in the order of ids."""
    weights = scaled.exp_()
    counted = units(weights)
    if group.min_p:
        counted *= weights >= _column(batch.min_p, group).float()
    cumulative = counted.cumsum(-1)
    return _invert(cumulative, cumulative[:, -1:], shares).squeeze(-1)


def _draw_ranked(scaled: Tensor, batch: SamplingBatch, group: Group, shares: Tensor) -> Tensor:
    """As `_draw_plain`, most probable first: each filter keeps a prefix, and the shortest wins."""
    if group.kind == "short":
        ordered, order = leading(scaled, group.count)  # as the sort's first: they are all it needs
    else:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    weights = ordered.exp()
    counted = units(weights)
    cumulative = counted.cumsum(-1)
    kept = _column(batch.top_k, group)
    mass = cumulative.gather(-1, kept - 1).double() * _column(batch.top_p, group)
    before = (cumulative - counted).double()
    kept = kept.minimum((before < mass).sum(-1, keepdim=True))
    above = weights >= _column(batch.min_p, group).float()
    kept = kept.minimum(above.sum(-1, keepdim=True))
    rank = _invert(cumulative, cumulative.gather(-1, kept - 1), shares)
    return order.gather(-1, rank).squeeze(-1)


def _invert(cumulative: Tensor, total: Tensor, shares: Tensor) -> Tensor:
    """[n, 1] first index whose cumulative weight exceeds its share of `total` [n, 1]."""
    target = (shares * total.double()).long().minimum(total - 1)
    return torch.searchsorted(cumulative, target, right=True)


def _column(values: Tensor, group: Group) -> Tensor:
    """[n, 1] of the group's part of values [D]."""
    return values[group.start : group.stop].unsqueeze(-1)
