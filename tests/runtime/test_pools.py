"""The pools' layout: entries side by side, copied as a whole."""

from __future__ import annotations

import pytest
import torch

from minivllm.compiler.graph import StateSpec
from minivllm.runtime.pools import ALIGNMENT, EntryPool, entry_bytes, of_kind

CPU = torch.device("cpu")
SPECS = {
    "conv": StateSpec("slot", (7, 3), torch.bfloat16),
    "recurrent": StateSpec("slot", (2, 5, 4), torch.float32),
    "k": StateSpec("block", (64, 2, 8), torch.float16),
}
SLOT = of_kind(SPECS, "slot")


def test_kinds_and_bytes() -> None:
    assert list(SLOT) == ["conv", "recurrent"] and list(of_kind(SPECS, "block")) == ["k"]
    assert entry_bytes(SLOT) == ALIGNMENT + ALIGNMENT  # 42 and 160 bytes
    assert entry_bytes(of_kind(SPECS, "block")) == 64 * 2 * 8 * 2
    assert entry_bytes({}) == 0


def test_views_are_typed_aligned_and_apart() -> None:
    pool = EntryPool(SLOT, 4, CPU)
    assert pool.nbytes == 4 * entry_bytes(SLOT)
    assert not pool.storage[0].any(), "what belongs to padding rows"
    pool.storage.zero_()
    for name, spec in SLOT.items():
        view = pool.views[name]
        assert view.shape == (4, *spec.shape) and view.dtype == spec.dtype
        for entry in view:
            assert entry.is_contiguous()
            assert (entry.data_ptr() - pool.storage.data_ptr()) % ALIGNMENT == 0
        assert view.stride(0) * spec.dtype.itemsize == entry_bytes(SLOT)
    pool.views["conv"][2] = 1
    assert not pool.views["recurrent"].any() and not pool.views["conv"][[0, 1, 3]].any()


def test_a_copy_is_the_whole_entry_and_nothing_else() -> None:
    slots, snapshots = EntryPool(SLOT, 4, CPU), EntryPool(SLOT, 2, CPU)
    for n, view in enumerate(slots.views.values()):
        view.copy_(torch.arange(view.numel()).view_as(view) + n)
    before = {name: view.clone() for name, view in slots.views.items()}
    snapshots.copy_(1, slots, 3)
    slots.copy_(0, snapshots, 1)
    for name, view in slots.views.items():
        assert torch.equal(view[0], before[name][3])
        assert torch.equal(view[1:], before[name][1:])
        assert torch.equal(snapshots.views[name][1], before[name][3])
        assert not snapshots.views[name][0].any()
    slots.copy_(2, slots, 2)
    assert torch.equal(slots.views["conv"][2], before["conv"][2])


def test_poison() -> None:
    pool = EntryPool(SLOT, 4, CPU)
    pool.storage.zero_()
    pool.poison([1, 3])
    for view in pool.views.values():
        assert view[[1, 3]].isnan().all() and not view[[0, 2]].any()


@pytest.mark.parametrize("entries", [0, 3])
def test_pools_of_nothing(entries: int) -> None:
    pool = EntryPool({}, entries, CPU)
    assert pool.nbytes == 0 and pool.views == {}
    if entries:
        pool.copy_(0, EntryPool({}, 2, CPU), 1)
        pool.poison([0])
    assert EntryPool(SLOT, 0, CPU).views["conv"].shape == (0, 7, 3)
