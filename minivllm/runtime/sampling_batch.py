"""The parameters of a step's rows, sorted by what must be done with them, on the device.

Owns the host's part of sampling: which rows are drawn and how, which logits are edited, and the one
copy that brings all of it to the device. Does not own the draw (`sampler`).

    batch = SamplingBatch.build(params, seeds, positions, histories, eos_ids, device, vocab_limit)
    sampled = sample(logits, batch)

Shapes: N rows, D of them drawn (not greedy), V = `vocab_limit`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.runtime.penalties import History, LogitEdits
from minivllm.runtime.sampling_params import SamplingParams

ROWS_AT_ONCE = 64  # bounds the float64 and int64 copies of a draw: 127 MB each at 248,320 ids
SHORT = 256  # a top_k up to here is found without sorting the row


@dataclass(frozen=True)
class Group:
    """At most `ROWS_AT_ONCE` drawn rows that are treated alike.

    Attributes:
        kind: "plain": drawn in the order of ids; "short": among the `count` most probable;
            "sorted": the whole row in order.
        edited: its logits are the edited ones.
        start, stop: its place among the drawn rows.
        first: where in its source (all rows, or the edited ones) it begins, if it lies in one
            piece there; else None.
        count: the greatest top_k; 0 unless "short".
        min_p: whether any row has one.
    """

    kind: str
    edited: bool
    start: int
    stop: int
    first: int | None
    count: int
    min_p: bool


@dataclass(frozen=True)
class SamplingBatch:
    """What `sample` needs beside the logits.

    Attributes:
        size: N.
        vocab_limit: ids from here on are never chosen.
        groups: of the drawn rows, in their order.
        edits: None where no row has any.
        logprob_rows: the rows, ascending, that asked for logprobs.
        num_logprobs: the most that any of them asked for.
        buffer: [B] int64 on the device: everything below and in `edits` is a view of it.
        rows, sources: [D] int64, each drawn row's place in the batch, and in its group's source.
        seeds, positions: [D] int64, in which seeds from 2**63 on are negative.
        temperature, top_p, min_p: [D] float64.
        top_k: [D] int64, V where there is none.
        logprob_index: [L] int64, `logprob_rows`.
    """

    size: int
    vocab_limit: int
    groups: tuple[Group, ...]
    edits: LogitEdits | None
    logprob_rows: tuple[int, ...]
    num_logprobs: int
    buffer: Tensor
    rows: Tensor
    sources: Tensor
    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    logprob_index: Tensor

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        histories: Sequence[History | None] | None,
        eos_token_ids: Collection[int],
        device: torch.device | str,
        vocab_limit: int,
    ) -> SamplingBatch:
        """The batch of N rows; one copy to the device, for which nothing waits.

        Args:
            params: N, one a row.
            seeds: N, modulo 2**64; those of greedy rows are not used.
            positions: N, of the token to be drawn in its sequence; greedy rows' are not used.
            histories: N; needed for rows with penalties or `min_tokens`. None: no row has any.
            eos_token_ids: which `min_tokens` holds off, `ignore_eos` or not, as in vLLM.
            device: of the logits.
            vocab_limit: ids from here on (a padded head's) are never chosen; at most the width of
                the logits. Edits of such ids are left out.
        """
        histories = [None] * len(params) if histories is None else histories
        assert vocab_limit > 0, vocab_limit
        assert len(params) == len(seeds) == len(positions) == len(histories), len(params)
        edited = [
            row
            for row, (p, history) in enumerate(zip(params, histories, strict=True))
            if p.penalized or p.logit_bias or _held_off(p, history)
        ]
        drawn, groups = _groups(params, edited, vocab_limit)
        chosen = [params[row] for row in drawn]
        place = {row: place for place, row in enumerate(edited)}
        logprob_rows = tuple(row for row, p in enumerate(params) if p.logprobs is not None)
        columns = {
            "rows": _integers(drawn),
            "sources": _integers([place.get(row, row) for row in drawn]),
            "seeds": _integers([_signed(seeds[row]) for row in drawn]),
            "positions": _integers([positions[row] for row in drawn]),
            "temperature": _floats([p.temperature for p in chosen]),
            "top_p": _floats([p.top_p for p in chosen]),
            "min_p": _floats([p.min_p for p in chosen]),
            "top_k": _integers([_top_k(p, vocab_limit) or vocab_limit for p in chosen]),
            "logprob_index": _integers(logprob_rows),
        }
        edits = _edits(edited, params, histories, vocab_limit, eos_token_ids) if edited else {}
        buffer, there = _send([*columns.values(), *edits.values()], torch.device(device))
        return cls(
            size=len(params),
            vocab_limit=vocab_limit,
            groups=groups,
            edits=LogitEdits(**dict(zip(edits, there[len(columns) :], strict=True)))
            if edits
            else None,
            logprob_rows=logprob_rows,
            num_logprobs=max((params[row].logprobs or 0 for row in logprob_rows), default=0),
            buffer=buffer,
            **dict(zip(columns, there, strict=False)),
        )


def _groups(
    params: Sequence[SamplingParams], edited: Sequence[int], vocab_limit: int
) -> tuple[list[int], tuple[Group, ...]]:
    """The drawn rows in the order of their groups, and the groups."""
    place = {row: place for place, row in enumerate(edited)}
    alike: dict[tuple[str, bool], list[int]] = {}
    for row, p in enumerate(params):
        if not p.greedy:
            alike.setdefault((_kind(p, vocab_limit), row in place), []).append(row)
    drawn: list[int] = []
    groups = []
    for (kind, is_edited), all_rows in alike.items():
        for begin in range(0, len(all_rows), ROWS_AT_ONCE):
            rows = all_rows[begin : begin + ROWS_AT_ONCE]
            sources = [place[row] for row in rows] if is_edited else rows
            in_one_piece = sources[-1] - sources[0] == len(rows) - 1  # they ascend
            groups.append(
                Group(
                    kind=kind,
                    edited=is_edited,
                    start=len(drawn),
                    stop=len(drawn) + len(rows),
                    first=sources[0] if in_one_piece else None,
                    count=max(params[row].top_k for row in rows) if kind == "short" else 0,
                    min_p=any(params[row].min_p > 0 for row in rows),
                )
            )
            drawn += rows
    return drawn, tuple(groups)


def _kind(params: SamplingParams, vocab_limit: int) -> str:
    top_k = _top_k(params, vocab_limit)
    if 0 < top_k <= SHORT:
        return "short"
    return "sorted" if top_k or params.top_p < 1.0 else "plain"  # min_p alone needs no order


def _top_k(params: SamplingParams, vocab_limit: int) -> int:
    """0 where it leaves every token."""
    return params.top_k if 0 < params.top_k < vocab_limit else 0


def _held_off(params: SamplingParams, history: History | None) -> bool:
    """Whether the row may not end yet."""
    if not params.min_tokens:
        return False
    assert history is not None, "min_tokens counts the row's output"
    return history.num_output_tokens < params.min_tokens


def _edits(
    edited: Sequence[int],
    params: Sequence[SamplingParams],
    histories: Sequence[History | None],
    vocab_limit: int,
    eos_token_ids: Collection[int],
) -> dict[str, Tensor]:
    """The fields of `LogitEdits`, on the host."""
    masked: list[int] = []
    biased: list[int] = []
    biases: list[float] = []
    seen = [_integers([])]
    counts = [_integers([])]
    for place, row in enumerate(edited):
        p, history, offset = params[row], histories[row], place * vocab_limit
        if _held_off(p, history):
            ends = {*eos_token_ids, *(p.stop_token_ids or ())}
            masked += [offset + token_id for token_id in sorted(ends) if token_id < vocab_limit]
        for token_id, bias in (p.logit_bias or {}).items():
            if token_id < vocab_limit:
                biased.append(offset + token_id)
                biases.append(bias)
        if p.penalized:
            assert history is not None, "penalties are for what the row has said"
            ids, times = history.count().tensors(vocab_limit)
            seen.append(ids + offset)
            counts.append(times)
    chosen = [params[row] for row in edited]
    return {
        "rows": _integers(edited),
        "masked": _integers(masked),
        "biased": _integers(biased),
        "biases": _floats(biases),
        "seen": torch.cat(seen),
        "counts": torch.cat(counts),
        "repetition": _floats([p.repetition_penalty for p in chosen]),
        "frequency": _floats([p.frequency_penalty for p in chosen]),
        "presence": _floats([p.presence_penalty for p in chosen]),
    }


def _send(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """All parts in one buffer on the device, and each as a view of it in its own dtype."""
    sizes = [len(part) for part in parts]
    buffer = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for target, part in zip(buffer.split(sizes), parts, strict=True):
        target.copy_(part.view(torch.int64))
    buffer = buffer.to(device, non_blocking=True)
    views = zip(buffer.split(sizes), parts, strict=True)
    return buffer, [view.view(part.dtype) for view, part in views]


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _signed(seed: int) -> int:
    """The int64 of the same 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
