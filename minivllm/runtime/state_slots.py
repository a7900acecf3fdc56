"""State slots: which of the pools' rows are free.

Owns ids only; the states themselves are the runner's. Slot 0 belongs to padding rows. No torch.

    slots = StateSlots(num_slots=257)
    slot = slots.allocate()
    slots.free(slot)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from minivllm.runtime.block_manager import IntegrityError


class StateSlots:
    """`num_slots` slots, slot 0 among them."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 1, f"{num_slots} slots leave none beside the padding rows' slot 0"
        self.num_slots = num_slots
        self._free = deque(range(1, num_slots))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """A slot; what it holds is another request's, so the first chunk must not read it."""
        slot = self._free.popleft()
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        assert slot in self._used, f"slot {slot} is freed but not in use"
        self._used.remove(slot)
        self._free.append(slot)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise unless exactly these slots are in use, each by one owner.

        Raises:
            IntegrityError: naming the first thing that is wrong.
        """
        counts = Counter(owned)
        for slot, owners in counts.items():
            if owners > 1:
                raise IntegrityError(f"slot {slot} has {owners} owners")
        if set(counts) != self._used:
            wrong = sorted(set(counts) ^ self._used)
            raise IntegrityError(f"slots {wrong}: owned and not in use, or in use and not owned")
        if Counter(self._free) + Counter(self._used) != Counter(range(1, self.num_slots)):
            raise IntegrityError("free and used slots are not all slots, each once")
