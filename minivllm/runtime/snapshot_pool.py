"""Snapshots of the recurrent state: which entries hold which prefix, on the device and on the host.

Owns the index from digest to entry, both pools' order of eviction and the counters. Does not own
the memory (the runner executes the copies) or when a snapshot is taken (`prefix_cache`). No torch.

    pool = SnapshotPool(num_snapshots=64, num_host=256)
    index = pool.take(copies)  # may append the copy that spills an older entry to the host
    pool.publish(index, digest)
    place = pool.restore(digest)  # ("snapshot", index) or ("host", index)

An entry is free, taken (someone is filling it) or published. Copies run in the order of the list
they stand in, and every overwrite of an entry is appended after the reads that were planned before
it: so a restore that is planned in a step stays right whatever the same step evicts later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

from minivllm.runtime.block_manager import IntegrityError
from minivllm.runtime.step import Copy, StateCopy

Place = tuple[str, int]


class SnapshotPool:
    """`num_snapshots` entries on the device, and `num_host` that they are spilled to.

    Attributes:
        kept: snapshots published.
        dropped: snapshots lost for want of room: not taken, or evicted from the last pool.
        restored: reads of a snapshot into a slot.
        spilled: snapshots moved to the host.
    """

    def __init__(self, num_snapshots: int, num_host: int = 0) -> None:
        self.num_snapshots = num_snapshots
        self.num_host = num_host
        self.kept = self.dropped = self.restored = self.spilled = 0
        self._free = deque(range(num_snapshots))
        self._free_host = deque(range(num_host))
        self._device: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._host: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_published(self) -> int:
        """Snapshots that a digest finds, on the device or the host."""
        return len(self._device) + len(self._host)

    def find(self, digest: bytes) -> Place | None:
        """Where the snapshot of this prefix is; its place in the order of eviction stays."""
        if digest in self._device:
            return "snapshot", self._device[digest]
        if digest in self._host:
            return "host", self._host[digest]
        return None

    def deepest(self, digests: Sequence[bytes]) -> int:
        """How many blocks the deepest snapshot of a digest chain covers."""
        device, host = self._device, self._host
        for depth in range(len(digests), 0, -1):
            digest = digests[depth - 1]
            if digest in device or digest in host:
                return depth
        return 0

    def take(self, copies: list[Copy]) -> int | None:
        """An entry to fill: a free one, else the least recently used published one's.

        Args:
            copies: gets the copy that spills what the entry held to the host, if there is one.

        Returns:
            None: all entries are being filled or there are none; counted as dropped.
        """
        if self._free:
            return self._free.popleft()
        if not self._device:
            self.dropped += 1
            return None
        digest, index = self._device.popitem(last=False)
        if self.num_host:
            host = self._take_host()
            self._host[digest] = host
            self.spilled += 1
            copies.append(StateCopy(("snapshot", index), ("host", host)))
        else:
            self.dropped += 1
        return index

    def _take_host(self) -> int:
        if self._free_host:
            return self._free_host.popleft()
        self.dropped += 1
        return self._host.popitem(last=False)[1]

    def publish(self, index: int, digest: bytes) -> None:
        """A taken entry now holds this prefix's state; if another one does, this one is free."""
        if digest in self._device:
            self._device.move_to_end(digest)
            self._free.append(index)
            return
        if digest in self._host:
            self._free_host.append(self._host.pop(digest))
        self._device[digest] = index
        self.kept += 1

    def release(self, index: int) -> None:
        """A taken entry goes back unused."""
        self._free.append(index)

    def touch(self, digest: bytes) -> None:
        """Count the snapshot of this prefix as just used."""
        (self._device if digest in self._device else self._host).move_to_end(digest)

    def restore(self, digest: bytes) -> Place:
        """Where to copy the state from; from the host it goes into the slot directly."""
        place = self.find(digest)
        assert place is not None, "a restore of a snapshot that was not found"
        self.touch(digest)
        self.restored += 1
        return place

    def forget(self, digest: bytes) -> None:
        """Nobody finds the snapshot of this prefix any more, if there is one."""
        if digest in self._device:
            self._free.append(self._device.pop(digest))
        elif digest in self._host:
            self._free_host.append(self._host.pop(digest))

    def reset(self) -> None:
        """Forget all that is published; taken entries stay taken."""
        self._free.extend(self._device.values())
        self._free_host.extend(self._host.values())
        self._device.clear()
        self._host.clear()

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Raise unless free, published and these taken entries are all entries, each once.

        Raises:
            IntegrityError: naming the pool that is wrong.
        """
        entries = Counter([*self._free, *self._device.values(), *taken])
        if entries != Counter(range(self.num_snapshots)):
            raise IntegrityError(f"snapshots: free + published + taken are {sorted(entries)}")
        entries = Counter([*self._free_host, *self._host.values()])
        if entries != Counter(range(self.num_host)):
            raise IntegrityError(f"host snapshots: free + published are {sorted(entries)}")
        if both := self._device.keys() & self._host.keys():
            raise IntegrityError(f"{len(both)} digests are on the device and on the host")
