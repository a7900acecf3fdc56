"""KV blocks: which are free, how often each is owned, and which of them the cache can find.

Owns ids, reference counts, the map from digest to block and the order of eviction. Does not own
the memory behind a block (`model_runner`) or how digests are made (`prefix_cache`). No torch.

    blocks = BlockManager(num_blocks=1024, block_size=64)
    table = blocks.allocate(3)
    blocks.publish(table[0], digest)
    blocks.free(table)
    blocks.match([digest])  # [table[0]], until its place is needed

A block is owned (its count is above zero), evictable (not owned, but found by its digest) or blank.
Block 0 belongs to padding rows and is never handed out. Everything is O(1) a block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence


class IntegrityError(AssertionError):
    """A book of the runtime does not add up; the message says which."""


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens, block 0 among them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 1, f"{num_blocks} blocks leave none beside the padding rows' block 0"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self._refs = [0] * num_blocks
        self._blank = deque(range(1, num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: blank and evictable ones."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a digest finds, owned or not."""
        return len(self._block_of)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each owned once; cached ones are given up only when no blank is left."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        blank, refs = self._blank, self._refs
        blocks = [blank.popleft() for _ in range(min(count, len(blank)))]
        while len(blocks) < count:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
            self.evictions += 1
            blocks.append(block)
        for block in blocks:
            refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each: blocks that `match` found, or that another request owns."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._evictable[block]
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """One owner less for each; the tail first, so that a chain is evicted from its tail."""
        refs, digests = self._refs, self._digest_of
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} is freed more often than it was owned"
            refs[block] -= 1
            if refs[block] == 0:
                if block in digests:
                    self._evictable[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, digest: bytes) -> bool:
        """Make an owned block findable; False: another block has that digest already."""
        assert self._refs[block] > 0, f"block {block} is published without an owner"
        known = self._block_of.setdefault(digest, block)
        if known != block:
            return False
        assert self._digest_of.setdefault(block, digest) == digest, f"block {block}: two digests"
        return True

    def unpublish(self, block: int) -> None:
        """Nobody finds this block any more; its owners keep it."""
        if block in self._digest_of:
            self._forget(block)
            if self._refs[block] == 0:
                del self._evictable[block]
                self._blank.append(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a digest chain; nothing changes."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of these count as free now, and would not once they are shared."""
        return sum(self._refs[block] == 0 for block in blocks)

    def reset(self) -> None:
        """Forget every digest; owners keep their blocks."""
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._digest_of.clear()

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise unless the books agree with the owners' block lists.

        Raises:
            IntegrityError: naming the first thing that is wrong.
        """
        counts = Counter(block for blocks in owned for block in blocks)
        if counts[0] or self._refs[0]:
            raise IntegrityError("block 0, the padding rows', is owned")
        for block in range(1, self.num_blocks):
            if self._refs[block] != counts[block]:
                raise IntegrityError(
                    f"block {block}: {self._refs[block]} references, {counts[block]} owners"
                )
        free = Counter(self._blank)
        free.update(self._evictable.keys())
        for block, times in free.items():
            if times > 1:
                raise IntegrityError(f"block {block} is free {times} times")
            if block == 0 or counts[block]:
                raise IntegrityError(f"block {block} is both free and used")
        used = sum(count > 0 for count in counts.values())
        if len(free) + used != self.num_blocks - 1:
            raise IntegrityError(f"{len(free)} free + {used} used of {self.num_blocks - 1} blocks")
        if {block: digest for digest, block in self._block_of.items()} != self._digest_of:
            raise IntegrityError("the maps of digests and of blocks disagree")
        for block in self._evictable:
            if block not in self._digest_of:
                raise IntegrityError(f"block {block} is evictable but has no digest")
        for block in self._blank:
            if block in self._digest_of:
                raise IntegrityError(f"block {block} is blank but has a digest")
