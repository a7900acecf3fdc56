"""The books of state slots."""

from __future__ import annotations

import pytest

from minivllm.runtime.block_manager import IntegrityError
from minivllm.runtime.state_slots import StateSlots


def test_slots_are_distinct_and_never_the_padding_rows():
    slots = StateSlots(5)
    assert (slots.num_free, slots.num_used) == (4, 0)
    taken = [slots.allocate() for _ in range(4)]
    assert sorted(taken) == [1, 2, 3, 4]
    assert (slots.num_free, slots.num_used) == (0, 4)
    with pytest.raises(IndexError):
        slots.allocate()
    slots.free(taken[2])
    assert (slots.num_free, slots.num_used) == (1, 3)
    assert slots.allocate() == taken[2]


@pytest.mark.parametrize("slot", [0, 2, 9])
def test_only_a_slot_in_use_is_freed(slot):
    slots = StateSlots(4)
    assert slots.allocate() == 1
    with pytest.raises(AssertionError, match=f"slot {slot} is freed but not in use"):
        slots.free(slot)
    slots.free(1)
    with pytest.raises(AssertionError, match="slot 1"):
        slots.free(1)


def test_one_slot_at_least_beside_the_padding_rows():
    with pytest.raises(AssertionError, match="1 slots"):
        StateSlots(1)


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([1], r"slots \[2\]: owned and not in use, or in use and not owned"),
        ([1, 2, 3], r"slots \[3\]"),
        ([1, 2, 2], "slot 2 has 2 owners"),
        ([0, 1, 2], r"slots \[0\]"),
    ],
)
def test_the_check_names_what_is_wrong(owned, message):
    slots = StateSlots(5)
    slots.allocate(), slots.allocate()
    slots.check_integrity([2, 1])
    with pytest.raises(IntegrityError, match=message):
        slots.check_integrity(owned)


def test_the_check_sees_a_lost_slot():
    slots = StateSlots(5)
    slots._free.pop()
    with pytest.raises(IntegrityError, match="not all slots"):
        slots.check_integrity([])
