"""What the model thought of tokens: logprob, rank and the most probable ones.

Owns numbers on the device and their way into `Logprob`. Does not own which rows ask for them.

    found = token_logprobs(logits, drawn_ids, count=5, vocab_limit=248077)       # on the device
    dicts = found.dicts(ids, counts=[5] * len(ids), decode=tokenizer.token)      # waits for it

Numbers are of the raw logits, before any penalty, bias or temperature, as in vLLM. A row's numbers
depend on its logits alone, to the bit.

Shapes: R rows, V vocabulary entries of the model's head, K most probable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.runtime.exact import WEIGHT_UNITS, key_ids, order_keys, units
from minivllm.runtime.outputs import Logprob

ROWS_AT_ONCE = 64  # bounds the float32 and int64 copies: 64 rows of 248,320 are 64 and 127 MB


@dataclass(frozen=True)
class TokenLogprobs:
    """Of R tokens, on one device.

    Attributes:
        logprobs: [R] float32, of the token itself.
        ranks: [R] int64, of the token itself: 1 for the most probable.
        top_ids: [R, K] int64, the most probable ids, equal ones by id.
        top_logprobs: [R, K] float32.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def cpu(self) -> TokenLogprobs:
        """The same on the host, for which it waits."""
        parts = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return TokenLogprobs(*(part.cpu() for part in parts))

    def dicts(
        self,
        token_ids: Sequence[int],
        counts: Sequence[int],
        decode: Callable[[int], str | None] = lambda token_id: None,
    ) -> list[dict[int, Logprob]]:
        """One mapping a row: the token itself, then the most probable ones in order.

        Args:
            token_ids: R, the tokens themselves.
            counts: R, how many of the most probable ones each row gets; at most K.
            decode: an id's text alone.
        """
        assert len(token_ids) == len(counts) == len(self.logprobs), len(self.logprobs)
        assert max(counts, default=0) <= self.top_ids.shape[1], (counts, self.top_ids.shape)
        host = self.cpu()
        own = zip(host.logprobs.tolist(), host.ranks.tolist(), strict=True)
        tops = zip(host.top_ids.tolist(), host.top_logprobs.tolist(), strict=True)
        found = []
        for token, count, (logprob, rank), top in zip(token_ids, counts, own, tops, strict=True):
            row = {token: Logprob(logprob, rank, decode(token))}
            for place in range(count):
                token_id = top[0][place]
                if token_id != token:
                    row[token_id] = Logprob(top[1][place], place + 1, decode(token_id))
            found.append(row)
        return found


def token_logprobs(
    logits: Tensor, token_ids: Tensor, count: int, vocab_limit: int
) -> TokenLogprobs:
    """Logprobs of one token a row; no op waits for the device.

    The sum under the logarithm is of integers and the logarithm in float64, so the error is that
    of one float32 `exp`: not above float32 `log_softmax`'s.

    Args:
        logits: [R, V], any float dtype; rows with NaN or +inf give numbers without meaning.
        token_ids: [R] int64 on the same device. An id from `vocab_limit` on has logprob -inf and
            the rank behind all others.
        count: how many of the most probable ones; fewer where the vocabulary has fewer.
        vocab_limit: ids from here on (a padded head's) have no share in the probability.
    """
    assert logits.ndim == 2 and token_ids.shape == logits.shape[:1], (logits.shape, token_ids.shape)
    logits = logits[:, :vocab_limit]
    count = min(count, logits.shape[1])
    chunks = zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True)
    parts = [_of_rows(rows.float(), ids, count) for rows, ids in chunks]
    return TokenLogprobs(
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


def prompt_logprobs(
    logits: Tensor, next_ids: Sequence[int], count: int, vocab_limit: int
) -> TokenLogprobs:
    """Logprobs of a prompt's tokens from the logits at the positions before each.

    Args:
        logits: [R, V], of positions p … p + R - 1.
        next_ids: R, the prompt's ids at p + 1 … p + R.
        count, vocab_limit: as in `token_logprobs`.
    """
    ids = torch.tensor(next_ids, dtype=torch.int64, pin_memory=logits.is_cuda)
    return token_logprobs(logits, ids.to(logits.device, non_blocking=True), count, vocab_limit)


def _of_rows(logits: Tensor, token_ids: Tensor, count: int) -> TokenLogprobs:
    size = logits.shape[1]
    highest = logits.max(dim=-1, keepdim=True).values
    total = units((logits - highest).exp_()).sum(-1, keepdim=True)
    norm = highest.double() + (total.double() / WEIGHT_UNITS).log()

    def logprobs(ids: Tensor) -> Tensor:
        return (logits.gather(-1, ids).double() - norm).float()

    known = token_ids < size
    own = token_ids.clamp(max=size - 1).unsqueeze(-1)
    keys = order_keys(logits)
    ranks = (keys > keys.gather(-1, own)).sum(-1) + 1
    top_ids = key_ids(keys.topk(count, dim=-1).values, size)
    return TokenLogprobs(
        logprobs=logprobs(own).squeeze(-1).masked_fill(~known, -torch.inf),
        ranks=ranks.masked_fill(~known, size + 1),
        top_ids=top_ids,
        top_logprobs=logprobs(top_ids),
    )
