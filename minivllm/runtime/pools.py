"""The memory behind the graphs' states: slots and snapshots in one pool, KV blocks in another.

Owns storage, its layout and the copies between entries. Does not own who has which entry
(`state_slots`, `block_manager`, `snapshot_pool`).

    pool = EntryPool(specs, entries=257, device=device)
    pool.views["state.layers.0.recurrent"]      # [257, HV, V, K], what the graphs read and write
    pool.copy_(3, snapshots, 7)                 # entry 3 becomes entry 7 of another pool

All tensors of an entry lie side by side, so that taking a snapshot of a sequence's state, or
copying the KV of a block in all layers, is one copy of contiguous bytes. A view's entries are
therefore as far apart as whole entries are. Snapshots are entries behind the slots, so that the
prefill graph can write them as it writes slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.compiler.graph import META, StateSpec

ALIGNMENT = 256  # bytes: of every tensor in an entry, so that kernels may load it in wide words


def entry_bytes(specs: Mapping[str, StateSpec]) -> int:
    """Bytes of one entry that holds all of `specs`, padding between them included."""
    return sum(_aligned(spec.bytes_per_entry) for spec in specs.values())


def of_kind(specs: Mapping[str, StateSpec], kind: str) -> dict[str, StateSpec]:
    """Those of the states that a sequence has once ("slot"), or once a block ("block")."""
    return {name: spec for name, spec in specs.items() if spec.kind == kind}


def meta_views(specs: Mapping[str, StateSpec]) -> dict[str, Tensor]:
    """Pools of two entries without data, strided as those of a run: name to `[2, *shape]`."""
    views: dict[str, Tensor] = {}
    for kind in ("slot", "block"):
        views |= EntryPool(of_kind(specs, kind), 2, META).views
    return views


class EntryPool:
    """Entries of several tensors each.

    Args:
        specs: name to what one entry holds of it.
        entries: how many. Entry 0 starts as zeros, the others as whatever was there: nobody reads
            what no owner has written, and memory that is never used is then never taken.
        device: where.
        pin: page-locked host memory, which a GPU copies from without the host's help.

    Attributes:
        storage: `[entries, entry_bytes]` uint8.
        views: name to `[entries, *shape]`, strided over `storage`.
    """

    def __init__(
        self,
        specs: Mapping[str, StateSpec],
        entries: int,
        device: torch.device,
        pin: bool = False,
    ) -> None:
        self.storage = torch.empty(
            entries, entry_bytes(specs), dtype=torch.uint8, device=device, pin_memory=pin
        )
        self.storage[:1] = 0
        self.views: dict[str, Tensor] = {}
        offset = 0
        for name, spec in specs.items():
            columns = self.storage[:, offset : offset + spec.bytes_per_entry]
            self.views[name] = columns.view(spec.dtype).unflatten(-1, spec.shape)
            offset += _aligned(spec.bytes_per_entry)

    def part(self, start: int, stop: int) -> EntryPool:
        """The entries [start, stop) as a pool over the same memory."""
        part = object.__new__(EntryPool)
        part.storage = self.storage[start:stop]
        part.views = {name: view[start:stop] for name, view in self.views.items()}
        return part

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.storage.numel()

    def copy_(self, target: int, source_pool: EntryPool, source: int) -> None:
        """Let entry `target` hold what entry `source` of a pool of the same layout holds.

        The host does not wait; later work on the same stream sees the copy.
        """
        self.storage[target].copy_(source_pool.storage[source], non_blocking=True)

    def poison(self, entries: list[int]) -> None:
        """Fill entries with NaN (all bits set): whoever reads them without a right to shows it."""
        self.storage[entries] = 0xFF


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
