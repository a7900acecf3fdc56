"""The newest token of the sequence in each slot, on the device: where the next step finds it.

Owns the tokens, the choice of a row's most probable one, and the ids that are never chosen. Does
not own who is in which slot (`state_slots`), the steps that choose (`prefill_runner`,
`decode_runner`) nor any other way of sampling (`sampler`).

    newest = NewestTokens(num_slots=257, device=device)
    newest.choose(logits, slots, greedy)         # the last thing in every step
    newest.store([3], torch.tensor([5]))         # of a row that is sampled in another way

Shapes: R rows of logits, V vocabulary, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm.ops.decode_step import GREEDY_TOKENS


class NewestTokens:
    """One token a slot; slot 0 is nobody's.

    Args:
        num_slots: S, slot 0 included.
        device: of the tokens and of all logits.
        vocab_limit: ids from here on (a padded head's) are never chosen; None: there are none.
        implementations: op name to the implementation forced on it.

    Attributes:
        tokens: `[S]` int64.
        implementations: of the op that chooses, by name.
    """

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        vocab_limit: int | None = None,
        implementations: Mapping[str, str] | None = None,
    ) -> None:
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._vocab_limit = vocab_limit
        forced = (implementations or {}).get(GREEDY_TOKENS.name)
        # it copies and compares, the same in every dtype
        self._choose, _ = GREEDY_TOKENS.choose(device, torch.float32, forced)
        self.implementations = {GREEDY_TOKENS.name: self._choose.name}

    def choose(self, logits: Tensor, slots: Tensor, greedy: Tensor) -> None:
        """Take each row's most probable token as its slot's newest.

        Args:
            logits: `[R, V]`.
            slots: `[R]` int64; 0: nobody goes on from this row. No other slot stands there twice.
            greedy: `[R]` int64; set to the tokens, to -1 where the logits hold NaN or infinity.
        """
        vocab_limit = logits.shape[1] if self._vocab_limit is None else self._vocab_limit
        self._choose.call(logits, slots, vocab_limit, greedy, self.tokens)

    @torch.inference_mode()
    def store(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Let the sequences in these slots go on with these tokens, `[len(slots)]` int64."""
        device = self.tokens.device
        index = torch.tensor(slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.tokens.index_copy_(
            0, index.to(device, non_blocking=True), token_ids.to(device, non_blocking=True)
        )
