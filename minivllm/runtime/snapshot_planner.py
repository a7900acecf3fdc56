"""Where requests leave snapshots of their state, and who is about to leave which.

Owns a prefill's targets, the rolling snapshots of decode, and the list of what is in flight. Does
not own the entries (`snapshot_pool`) or K/V (`prefix_cache`). No torch.

    planner.start(request, reused=0, matched=128)
    planner.plan_chunk(request, end, before, after)  # while a step is put together
    planner.advance(request)                         # after it ran
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from minivllm.runtime.block_manager import IntegrityError
from minivllm.runtime.digests import BLOCK_SIZE, known_digests
from minivllm.runtime.request import Request
from minivllm.runtime.snapshot_pool import SnapshotPool
from minivllm.runtime.step import Copy, StateCopy


class SnapshotPlanner:
    """Plans copies from slots to entries of the pool, and publishes them once they ran.

    Args:
        pool: of the snapshots.
        interval: tokens between the snapshots of a long prompt or output; 0: none.
        on_the_way: the prefill graph leaves snapshots within a chunk; without it a chunk ends
            wherever one is wanted, and the state is copied then.
    """

    def __init__(self, pool: SnapshotPool, interval: int, on_the_way: bool = False) -> None:
        self.pool = pool
        self.interval = interval
        self.on_the_way = on_the_way
        self._in_flight: dict[bytes, list[Request]] = {}  # what running prefills will leave
        self._num_rolling = 0

    def start(self, request: Request, reused: int, matched: int) -> None:
        """Set and announce an admitted request's targets: the token counts above its hit.

        They are the last boundary that an equal prompt can reuse, the last one that a longer
        prompt can, every interval, where the caller asked, and the junction: up to where another
        prompt is equal to this one, so likely a prefix that a third will share.

        Args:
            reused: tokens of the hit.
            matched: tokens whose K/V was cached.
        """
        length = len(request.token_ids)
        wanted = {(length - 1) // BLOCK_SIZE, length // BLOCK_SIZE, matched // BLOCK_SIZE}
        wanted.update(count // BLOCK_SIZE for count in request.cache.snapshot_at)
        if self.interval:
            step = self.interval // BLOCK_SIZE
            wanted.update(range(step, length // BLOCK_SIZE + 1, step))
        request.targets = sorted(
            count * BLOCK_SIZE for count in wanted if reused < count * BLOCK_SIZE <= length
        )
        self._announce(request)

    def _announce(self, request: Request) -> None:
        for target in request.targets:
            digest = known_digests(request, target // BLOCK_SIZE)[target // BLOCK_SIZE - 1]
            self._in_flight.setdefault(digest, []).append(request)

    def _withdraw(self, request: Request) -> None:
        for target in request.targets:
            digest = request.block_digests[target // BLOCK_SIZE - 1]
            producers = self._in_flight.get(digest, [])
            if request in producers:
                producers.remove(request)
                if not producers:
                    del self._in_flight[digest]

    def in_flight(self, digest: bytes | None) -> bool:
        """Whether a running prefill will leave this prefix's snapshot."""
        return digest in self._in_flight

    def deepest_in_flight(self, digests: Sequence[bytes]) -> bytes | None:
        """The last of these that a running prefill will leave."""
        if self._in_flight:
            for digest in reversed(digests):
                if digest in self._in_flight:
                    return digest
        return None

    def _leaves_on_the_way(self, start: int) -> bool:
        """The graph counts its chunks of 64 tokens from where it starts, snapshots from zero."""
        return self.on_the_way and start % BLOCK_SIZE == 0

    def next_stop(self, request: Request) -> int | None:
        """Where the next chunk has to end for a snapshot; None: nowhere."""
        if self._leaves_on_the_way(request.num_computed_tokens) or not request.targets:
            return None
        return request.targets[0]

    def plan_chunk(
        self, request: Request, end: int, before: list[Copy], after: list[Copy]
    ) -> tuple[tuple[int, int], ...]:
        """Plan the snapshots of the next chunk's targets that have none yet.

        The deepest first: it saves most, and a small pool may have no entry for the others.

        Returns:
            Those that the prefill graph leaves: token counts and entries.
        """
        on_the_way = self._leaves_on_the_way(request.num_computed_tokens)
        left = []
        for target in reversed(request.targets[: bisect_right(request.targets, end)]):
            digest = request.block_digests[target // BLOCK_SIZE - 1]
            if self.pool.find(digest) is not None:
                self.pool.touch(digest)
            elif (index := self.pool.take(before)) is not None:
                request.pending_snapshots[target] = index
                if on_the_way:
                    left.append((target, index))
                else:
                    after.append(StateCopy(("slot", request.state_slot), ("snapshot", index)))
        return tuple(sorted(left))

    def plan_decode(self, request: Request, before: list[Copy], after: list[Copy]) -> None:
        """Plan the copy to the rolling snapshot behind a token that fills a block.

        Rolling snapshots take at most half of the pool, or many long outputs would leave no room
        for any prompt's.
        """
        if request.rolling_snapshot is None:
            if self._num_rolling >= self.pool.num_snapshots // 2:
                self.pool.dropped += 1
                return
            request.rolling_snapshot = self.pool.take(before)
            if request.rolling_snapshot is None:
                return
            self._num_rolling += 1
        request.rolling_blocks = 0  # what it holds is overwritten from here on
        after.append(
            StateCopy(("slot", request.state_slot), ("snapshot", request.rolling_snapshot))
        )

    def advance(self, request: Request, boundary: int) -> None:
        """Publish what the copies at a block boundary, a token count, have filled."""
        while request.targets and request.targets[0] <= boundary:
            target = request.targets.pop(0)
            digest = request.block_digests[target // BLOCK_SIZE - 1]
            self._in_flight.pop(digest, None)
            if target in request.pending_snapshots:
                self.pool.publish(request.pending_snapshots.pop(target), digest)
        if request.rolling_snapshot is not None:
            request.rolling_blocks = boundary // BLOCK_SIZE
            if self.interval and boundary % self.interval == 0:
                self._end_rolling(request)

    def _end_rolling(self, request: Request) -> None:
        """Publish the rolling snapshot if there is a state in it; its entry is the pool's again."""
        if request.rolling_snapshot is None:
            return
        if request.rolling_blocks:
            digest = request.block_digests[request.rolling_blocks - 1]
            self.pool.publish(request.rolling_snapshot, digest)
        else:
            self.pool.release(request.rolling_snapshot)
        self._num_rolling -= 1
        request.rolling_snapshot = None
        request.rolling_blocks = 0

    def drop(self, request: Request) -> None:
        """The request stops running: what was to come is withdrawn, its newest state published."""
        self._withdraw(request)
        request.targets = []
        while request.pending_snapshots:
            self.pool.release(request.pending_snapshots.popitem()[1])
        self._end_rolling(request)

    def hand_over(self, request: Request, heir: Request) -> None:
        """The heir, whose tokens and digests are the same, goes on with a prefill under way."""
        self._withdraw(request)
        heir.targets, request.targets = request.targets, []
        heir.pending_snapshots, request.pending_snapshots = request.pending_snapshots, {}
        self._announce(heir)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Raise unless taken entries and announcements are those of the running requests.

        Raises:
            IntegrityError: naming what is wrong.
        """
        rolling = [r.rolling_snapshot for r in running if r.rolling_snapshot is not None]
        pending = [index for r in running for index in r.pending_snapshots.values()]
        self.pool.check_integrity([*rolling, *pending])
        if len(rolling) != self._num_rolling:
            raise IntegrityError(f"{self._num_rolling} rolling snapshots, {len(rolling)} owners")
        for digest, producers in self._in_flight.items():
            for request in producers:
                left = {request.block_digests[t // BLOCK_SIZE - 1] for t in request.targets}
                if request not in running or digest not in left:
                    raise IntegrityError(
                        f"request {request.request_id} is announced for a snapshot that it "
                        "will not leave"
                    )
