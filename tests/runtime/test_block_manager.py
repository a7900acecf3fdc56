"""The books of KV blocks: who owns, what is found, what is evicted first."""

from __future__ import annotations

import random

import pytest

from minivllm.runtime.block_manager import BlockManager, IntegrityError


def names(count: int, chain: str = "a") -> list[bytes]:
    return [f"{chain}{i}".encode() for i in range(count)]


def cached(manager: BlockManager, count: int, chain: str) -> list[int]:
    """A chain of blocks that was published and is owned by nobody."""
    blocks = manager.allocate(count)
    for block, digest in zip(blocks, names(count, chain), strict=True):
        assert manager.publish(block, digest)
    manager.free(blocks)
    return blocks


def test_blocks_are_distinct_and_never_the_padding_rows():
    manager = BlockManager(9, 64)
    first, second = manager.allocate(5), manager.allocate(3)
    assert sorted(first + second) == list(range(1, 9))
    assert (manager.num_free, manager.num_used) == (0, 8)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        manager.allocate(1)
    manager.free(second)
    assert (manager.num_free, manager.num_used) == (3, 5)
    assert sorted(manager.allocate(3)) == sorted(second)


def test_a_block_is_free_when_its_last_owner_has_freed_it():
    manager = BlockManager(3, 64)
    blocks = manager.allocate(2)
    manager.share(blocks)
    manager.free(blocks)
    assert manager.num_free == 0
    manager.check_integrity([blocks])
    manager.free(blocks)
    assert manager.num_free == 2
    manager.check_integrity([])
    with pytest.raises(AssertionError, match="freed more often"):
        manager.free(blocks)


def test_a_freed_block_with_a_digest_is_found_until_its_place_is_needed():
    manager = BlockManager(7, 64)
    blocks = cached(manager, 3, "a")
    assert manager.num_free == 6 and manager.num_cached == 3
    assert manager.match(names(3)) == blocks
    assert set(manager.allocate(3)).isdisjoint(blocks), "blank blocks go first"
    assert manager.evictions == 0 and manager.match(names(3)) == blocks
    assert manager.allocate(1) == [blocks[2]], "the tail of the chain goes first"
    assert manager.evictions == 1 and manager.match(names(3)) == blocks[:2]
    assert manager.allocate(2) == [blocks[1], blocks[0]]
    assert manager.match(names(3)) == [] and manager.num_cached == 0


def test_the_chain_that_was_used_last_is_evicted_last():
    manager = BlockManager(7, 64)
    first, second = cached(manager, 3, "a"), cached(manager, 3, "b")
    manager.share(first[:2])
    manager.free(first[:2])
    order = [manager.allocate(1)[0] for _ in range(6)]
    assert order == [first[2], second[2], second[1], second[0], first[1], first[0]]


def test_a_shared_block_cannot_be_evicted():
    manager = BlockManager(5, 64)
    blocks = cached(manager, 4, "a")
    assert manager.num_unowned(blocks) == 4
    manager.share(blocks[:2])
    assert manager.num_unowned(blocks) == 2 and manager.num_free == 2
    manager.check_integrity([blocks[:2]])
    assert set(manager.allocate(2)) == set(blocks[2:])
    assert manager.match(names(4)) == blocks[:2]


def test_of_two_blocks_of_one_digest_the_first_is_found():
    manager = BlockManager(4, 64)
    first, second = manager.allocate(2)
    assert manager.publish(first, b"x") is True
    assert manager.publish(first, b"x") is True
    assert manager.publish(second, b"x") is False
    assert manager.match([b"x"]) == [first]
    manager.free([second])
    assert manager.num_free == 2 and manager.num_cached == 1
    manager.check_integrity([[first]])


def test_a_match_ends_at_the_first_hole():
    manager = BlockManager(5, 64)
    blocks = manager.allocate(4)
    for block, digest in zip(blocks, names(4), strict=True):
        manager.publish(block, digest)
    manager.unpublish(blocks[1])
    assert manager.match(names(4)) == blocks[:1]
    assert manager.match(names(4)[2:]) == blocks[2:]
    assert manager.match([]) == []


def test_an_unpublished_block_is_blank_at_once_or_stays_with_its_owner():
    manager = BlockManager(4, 64)
    idle = cached(manager, 1, "a")[0]
    owned = manager.allocate(1)[0]
    manager.publish(owned, b"b0")
    for block in (idle, owned, idle):
        manager.unpublish(block)
    assert manager.match([b"a0"]) == manager.match([b"b0"]) == []
    manager.check_integrity([[owned]])
    assert manager.num_free == 2
    assert set(manager.allocate(2)).isdisjoint([owned]) and manager.evictions == 0


def test_reset_forgets_digests_and_takes_nothing_from_owners():
    manager = BlockManager(6, 64)
    cached(manager, 2, "a")
    owned = manager.allocate(2)
    manager.publish(owned[0], b"b0")
    manager.reset()
    assert manager.num_cached == 0 and manager.num_free == 3
    assert manager.match([b"a0"]) == manager.match([b"b0"]) == []
    manager.check_integrity([owned])
    manager.allocate(3)
    assert manager.evictions == 0


def test_a_digest_needs_an_owner_and_a_block_has_one_digest():
    manager = BlockManager(3, 64)
    with pytest.raises(AssertionError, match="without an owner"):
        manager.publish(1, b"x")
    block = manager.allocate(1)[0]
    manager.publish(block, b"x")
    with pytest.raises(AssertionError, match="two digests"):
        manager.publish(block, b"y")


def broken(how: str) -> tuple[BlockManager, list[list[int]]]:
    """Books that are wrong in one place: five blocks, one owned, two cached."""
    manager = BlockManager(6, 64)
    cached(manager, 2, "a")
    owned = manager.allocate(1)
    if how == "an owner forgot to share":
        return manager, [owned, owned]
    if how == "an owner forgot to free":
        return manager, []
    if how == "the padding rows' block":
        return manager, [owned, [0]]
    if how == "free twice":
        manager._blank.append(manager._blank[0])
    if how == "free and used":
        manager._blank.append(owned[0])
    if how == "lost":
        manager._blank.pop()
    if how == "digest without a block":
        manager._block_of[b"z"] = 5
    if how == "blank with a digest":
        block, _ = manager._evictable.popitem()
        manager._blank.append(block)
    if how == "evictable without a digest":
        manager._evictable[manager._blank.pop()] = None
    return manager, [owned]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("an owner forgot to share", "block 3: 1 references, 2 owners"),
        ("an owner forgot to free", "block 3: 1 references, 0 owners"),
        ("the padding rows' block", "block 0"),
        ("free twice", "block 4 is free 2 times"),
        ("free and used", "block 3 is both free and used"),
        ("lost", "3 free . 1 used of 5 blocks"),
        ("digest without a block", "disagree"),
        ("blank with a digest", "is blank but has a digest"),
        ("evictable without a digest", "is evictable but has no digest"),
    ],
)
def test_the_check_names_what_is_wrong(how, message):
    manager, owned = broken(how)
    with pytest.raises(IntegrityError, match=message):
        manager.check_integrity(owned)


def test_the_check_passes_on_right_books():
    manager, owned = broken("not at all")
    manager.check_integrity(owned)


def test_random_use_keeps_the_books():
    rng = random.Random(3)
    manager = BlockManager(20, 64)
    owned: list[list[int]] = []
    for turn in range(4_000):
        action = rng.random()
        digests = names(rng.randrange(1, 7), rng.choice("abc"))
        if action < 0.5:
            found = manager.match(digests)
            new = len(digests) - len(found)
            if new + manager.num_unowned(found) <= manager.num_free:
                manager.share(found)
                blocks = found + manager.allocate(new)
                for block, digest in zip(blocks, digests, strict=True):
                    manager.publish(block, digest)
                owned.append(blocks)
        elif action < 0.95 and owned:
            manager.free(owned.pop(rng.randrange(len(owned))))
        elif action < 0.99 and owned:
            manager.unpublish(rng.choice(rng.choice(owned)))
        elif action > 0.998:
            manager.reset()
        if turn % 5 == 0:
            manager.check_integrity(owned)
    assert manager.evictions > 100, "the pool was too large to test anything"
    for blocks in owned:
        manager.free(blocks)
    manager.check_integrity([])
    assert manager.num_free == 19
