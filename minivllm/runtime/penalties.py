"""What changes logits before the draw: `min_tokens`, `logit_bias` and the three penalties.

Owns the counting of tokens and the sparse edit of logits. Does not own who asks for it
(`sampling_batch`).

    counts = TokenCounts(prompt_ids + output_ids, len(prompt_ids)); counts.update(token_id)
    edited = edits.apply(logits)               # [E, V] float32, the rows that have any edit

Only the entries that change are touched, so an edit costs one copy of its row and little else.
Counts follow from the tokens alone: a request that is computed again gets the same.

Shapes: N rows, E of them edited, V vocabulary entries; a place is edited row * V + id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class TokenCounts:
    """The distinct tokens of one sequence, and how often each is in its output.

    Attributes:
        num_tokens: counted so far, prompt and output.

    Args:
        token_ids: prompt, then output.
        num_prompt_tokens: how many of them are the prompt.
    """

    def __init__(self, token_ids: Sequence[int] = (), num_prompt_tokens: int = 0) -> None:
        assert 0 <= num_prompt_tokens <= len(token_ids), (num_prompt_tokens, len(token_ids))
        prompt = dict.fromkeys(token_ids[:num_prompt_tokens])
        self.num_tokens = num_prompt_tokens
        self._places = {token_id: place for place, token_id in enumerate(prompt)}
        self._highest = max(prompt, default=-1)
        self._ids = array("q", prompt)
        self._counts = array("q", bytes(8 * len(prompt)))
        for token_id in token_ids[num_prompt_tokens:]:
            self.update(token_id)

    def update(self, token_id: int) -> None:
        """Takes the next token of the output."""
        self.num_tokens += 1
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._highest = max(self._highest, token_id)
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += 1

    def tensors(self, vocab_limit: int) -> tuple[Tensor, Tensor]:
        """[C] ids below `vocab_limit`, [C] their counts in the output; int64, on the host."""
        if not self._ids:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        # an array cannot grow while a tensor looks at it: copies are given away
        ids = torch.frombuffer(self._ids, dtype=torch.int64)
        counts = torch.frombuffer(self._counts, dtype=torch.int64)
        if self._highest < vocab_limit:
            return ids.clone(), counts.clone()
        kept = ids < vocab_limit
        return ids[kept], counts[kept]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenCounts):
            return NotImplemented
        return (self.num_tokens, self._ids, self._counts) == (
            other.num_tokens,
            other._ids,
            other._counts,
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class History:
    """What a row has said so far; read only where its parameters ask for it.

    Attributes:
        token_ids: prompt, then output.
        num_prompt_tokens: how many of them are the prompt.
        counts: those of `token_ids`, if the caller keeps them; None: counted anew.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    counts: TokenCounts | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def count(self) -> TokenCounts:
        """The caller's counts, or new ones."""
        if self.counts is None:
            return TokenCounts(self.token_ids, self.num_prompt_tokens)
        assert self.counts.num_tokens == len(self.token_ids), "the counts are of other tokens"
        return self.counts


@dataclass(frozen=True)
class LogitEdits:
    """The edits of a batch, on the device; int64 unless said otherwise. Within each of the three
    lists of places all are different.

    Attributes:
        rows: [E] places of the edited rows among those of the batch.
        masked: places that become -inf.
        biased, biases: places, and what is added there (float64).
        seen, counts: places of the tokens of prompt and output, and how often the output has each.
        repetition, frequency, presence: [E] float64, the edited rows' penalties.
    """

    rows: Tensor
    masked: Tensor
    biased: Tensor
    biases: Tensor
    seen: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """[E, V] float32, new: the edited rows of `logits` [N, V], in vLLM's order: the mask of
        `min_tokens`, `logit_bias`, then the penalties for repetition, frequency and presence."""
        edited = logits.index_select(0, self.rows).float()
        flat = edited.view(-1)
        if self.masked.numel():
            flat.index_fill_(0, self.masked, -torch.inf)
        if self.biased.numel():
            flat.index_add_(0, self.biased, self.biases.float())
        if self.seen.numel():
            row = self.seen.div(logits.shape[1], rounding_mode="floor")
            repetition, frequency, presence = (
                penalty.float().index_select(0, row)
                for penalty in (self.repetition, self.frequency, self.presence)
            )
            x = flat.index_select(0, self.seen)
            x = torch.where(x > 0, x / repetition, x * repetition)
            x = x - frequency * self.counts - presence * (self.counts > 0)
            flat.index_copy_(0, self.seen, x)
        return edited
