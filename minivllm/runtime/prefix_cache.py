"""The prefix cache: what of a prompt is known already, and what a request leaves for later ones.

Owns the length of a hit, who waits for whom, and the statistics. Does not own KV blocks
(`block_manager`), where snapshots are taken (`snapshot_planner`) or kept (`snapshot_pool`), or who
runs (`scheduler`). No torch.

    cache = PrefixCache(blocks, snapshots, snapshot_interval=2048)
    hit = cache.lookup(request)

A prefix is reusable where two things are there: the K/V of all its blocks, and one snapshot of the
recurrent state behind its last block. So a hit is as long as the deepest snapshot within the K/V.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.runtime.block_manager import BlockManager
from minivllm.runtime.digests import BLOCK_SIZE, block_digests, known_digests
from minivllm.runtime.request import Request
from minivllm.runtime.snapshot_planner import SnapshotPlanner
from minivllm.runtime.snapshot_pool import SnapshotPool
from minivllm.runtime.step import BlockCopy, Copy, StateCopy

__all__ = [
    "BLOCK_SIZE",
    "BlockCopy",
    "Hit",
    "PrefixCache",
    "PrefixCacheStats",
    "SnapshotPool",
    "StateCopy",
    "block_digests",
]


@dataclass(frozen=True)
class PrefixCacheStats:
    """Counts since the start.

    Attributes:
        queried_tokens: of requests that looked up, at their first admission.
        kv_matched_tokens: of these, covered by cached K/V.
        state_matched_tokens: of these, up to the deepest snapshot, whether or not its K/V is there.
        reused_tokens: of these, not computed again.
        snapshots_kept, snapshots_dropped, snapshots_restored, snapshots_spilled: `SnapshotPool`'s.
        blocks_evicted: cached blocks that were given up for new ones.
    """

    queried_tokens: int = 0
    kv_matched_tokens: int = 0
    state_matched_tokens: int = 0
    reused_tokens: int = 0
    snapshots_kept: int = 0
    snapshots_dropped: int = 0
    snapshots_restored: int = 0
    snapshots_spilled: int = 0
    blocks_evicted: int = 0


@dataclass(frozen=True)
class Hit:
    """What the cache holds of a request's tokens, in blocks.

    Attributes:
        blocks: the KV blocks to share; the state behind the last one is kept.
        kv: length of the K/V match.
        state: depth of the deepest snapshot, be it within the K/V match or not.
    """

    blocks: list[int] = field(default_factory=list)
    kv: int = 0
    state: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK_SIZE


class PrefixCache:
    """Looks up, keeps and publishes; without a snapshot pool nothing is ever found or left.

    Args:
        blocks: of the KV cache.
        snapshots: of the state; None, or one without entries, turns the cache off.
        snapshot_interval: tokens between the snapshots of a long prompt or output; 0: none.
        snapshots_on_the_way: see `SnapshotPlanner`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        snapshots: SnapshotPool | None,
        snapshot_interval: int = 0,
        snapshots_on_the_way: bool = False,
    ) -> None:
        assert blocks.block_size == BLOCK_SIZE, f"blocks of {blocks.block_size}, not {BLOCK_SIZE}"
        assert snapshot_interval % BLOCK_SIZE == 0, f"interval {snapshot_interval}: no whole blocks"
        self.blocks = blocks
        self.snapshots = snapshots or SnapshotPool(0)
        self.planner = SnapshotPlanner(self.snapshots, snapshot_interval, snapshots_on_the_way)
        self.enabled = self.snapshots.num_snapshots > 0
        self._queried = self._kv_matched = self._state_matched = self._reused = 0

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(
            queried_tokens=self._queried,
            kv_matched_tokens=self._kv_matched,
            state_matched_tokens=self._state_matched,
            reused_tokens=self._reused,
            snapshots_kept=self.snapshots.kept,
            snapshots_dropped=self.snapshots.dropped,
            snapshots_restored=self.snapshots.restored,
            snapshots_spilled=self.snapshots.spilled,
            blocks_evicted=self.blocks.evictions,
        )

    def _may_hit(self, request: Request) -> bool:
        """A prompt whose log-probabilities are asked for runs in full: each needs its logits."""
        return self.enabled and request.cache.enabled and request.params.prompt_logprobs is None

    def _reusable(self, request: Request) -> list[bytes]:
        """The digests of the blocks that a hit may cover: one token is always left to compute."""
        count = (len(request.token_ids) - 1) // BLOCK_SIZE
        return known_digests(request, count)[:count]

    def lookup(self, request: Request) -> Hit:
        """The hit that this request would get now; nothing changes."""
        if not self._may_hit(request):
            return Hit()
        digests = self._reusable(request)
        matched, state = self.blocks.match(digests), self.snapshots.deepest(digests)
        depth = state if state <= len(matched) else self.snapshots.deepest(digests[: len(matched)])
        return Hit(matched[:depth], len(matched), state)

    def still_waits(self, request: Request) -> bool:
        """Whether what `must_wait` found is still to come; one look-up, for many who wait."""
        return self.planner.in_flight(request.waits_for)

    def must_wait(self, request: Request, hit: Hit) -> bool:
        """Whether a running prefill is about to leave a snapshot deeper than this hit."""
        request.waits_for = None
        if self._may_hit(request):
            deeper = self._reusable(request)[len(hit.blocks) :]
            request.waits_for = self.planner.deepest_in_flight(deeper)
        return request.waits_for is not None

    def start(self, request: Request, hit: Hit, before: list[Copy]) -> None:
        """Take the hit for a request whose slot and blocks are there, and plan what it leaves."""
        reused = hit.num_tokens
        if reused:
            place = self.snapshots.restore(request.block_digests[len(hit.blocks) - 1])
            before.append(StateCopy(place, ("slot", request.state_slot)))
        if request.admissions == 1:
            request.num_cached_tokens = reused
            if self._may_hit(request):
                self._queried += len(request.token_ids)
                self._kv_matched += hit.kv * BLOCK_SIZE
                self._state_matched += hit.state * BLOCK_SIZE
                self._reused += reused
        request.num_computed_tokens = reused
        request.num_published_blocks = len(hit.blocks)
        request.publishes = self.enabled and request.cache.enabled
        if request.publishes:
            self.planner.start(request, reused, hit.kv * BLOCK_SIZE)

    def next_stop(self, request: Request) -> int | None:
        """Where a prefill's next chunk has to end for a snapshot; None: nowhere."""
        return self.planner.next_stop(request)

    def plan_chunk(
        self, request: Request, end: int, before: list[Copy], after: list[Copy]
    ) -> tuple[tuple[int, int], ...]:
        """Plan the snapshots of a prefill's next chunk; `Chunk.snapshots`."""
        return self.planner.plan_chunk(request, end, before, after) if request.publishes else ()

    def plan_decode(self, request: Request, before: list[Copy], after: list[Copy]) -> None:
        """Plan the snapshot behind a decode row that fills a block, if one is wanted there."""
        if request.publishes:
            self.planner.plan_decode(request, before, after)

    def advance(self, request: Request) -> None:
        """Publish what a step has filled, `num_computed_tokens` being counted already.

        A block whose last token is in flight has no digest yet: its turn comes a step later.
        """
        full = min(request.num_computed_tokens, len(request.token_ids)) // BLOCK_SIZE
        if not request.publishes or full == request.num_published_blocks:
            return  # no block was filled, so no snapshot's place was reached
        digests = known_digests(request, full)
        for block in range(request.num_published_blocks, full):
            self.blocks.publish(request.blocks[block], digests[block])
        request.num_published_blocks = full
        self.planner.advance(request, full * BLOCK_SIZE)

    def drop(self, request: Request) -> None:
        """The request stops running; its newest state is published."""
        self.advance(request)
        self.planner.drop(request)

    def distrust(self, request: Request) -> None:
        """The request failed: nothing of its tokens is found any more, whoever left it."""
        self.planner.drop(request)
        request.publishes = False
        for block in request.blocks:
            self.blocks.unpublish(block)
        for digest in request.block_digests:
            self.snapshots.forget(digest)

    def hand_over(self, request: Request, heir: Request) -> None:
        """The heir goes on in this request's place, with the same tokens."""
        heir.block_digests = request.block_digests
        heir.num_published_blocks = request.num_published_blocks
        heir.publishes = request.publishes
        self.planner.hand_over(request, heir)

    def reset(self, running: Iterable[Request]) -> None:
        """Nothing that is cached is found any more, and running requests leave nothing."""
        for request in running:
            self.planner.drop(request)
            request.publishes = False
        self.blocks.reset()
        self.snapshots.reset()
