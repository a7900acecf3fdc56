"""Digests, the snapshot pool and the length of a hit, each on its own."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array

import pytest

from minivllm.runtime.block_manager import BlockManager, IntegrityError
from minivllm.runtime.digests import known_digests
from minivllm.runtime.prefix_cache import (
    Hit,
    PrefixCache,
    SnapshotPool,
    StateCopy,
    block_digests,
)
from minivllm.runtime.request import CacheOptions, Request
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.step import Copy


def test_a_digest_is_the_hash_of_its_parent_and_64_tokens():
    ids = [*range(64), *range(2**40, 2**40 + 64), 5, 6, 7]
    root = hashlib.sha256(b"none").digest()
    first = hashlib.sha256(root + struct.pack("<64q", *ids[:64])).digest()
    second = hashlib.sha256(first + struct.pack("<64q", *ids[64:128])).digest()
    assert block_digests(ids, 2, None) == [first, second]
    assert block_digests(ids, 0, None) == []
    assert block_digests(ids, 2, None, [first]) == [second]


def test_a_chain_is_the_same_however_it_is_extended():
    ids = [random.Random(1).randrange(250_000) for _ in range(64 * 9)]
    whole = block_digests(ids, 9, "s")
    assert block_digests(array("Q", ids), 9, "s") == whole
    for cut in range(1, 9):
        assert whole[:cut] + block_digests(ids, 9, "s", whole[:cut]) == whole
    request = Request("0", ids, len(ids), SamplingParams(), 0, CacheOptions(salt="s"))
    for count in (2, 1, 5, 9, 3):
        assert known_digests(request, count)[:count] == whole[:count]
    assert request.block_digests == whole


def test_any_earlier_token_changes_all_later_digests():
    ids = list(range(64 * 4))
    whole = block_digests(ids, 4, None)
    for position in (0, 63, 64, 150, 255):
        other = block_digests([*ids[:position], -1, *ids[position + 1 :]], 4, None)
        same = [a == b for a, b in zip(whole, other, strict=True)]
        assert same == [block < position // 64 for block in range(4)]


def test_salts_and_their_absence_share_nothing():
    salts = [None, "", "none", "x", "salt", "saltx", "\udce9", "é"]
    roots = {block_digests(range(64), 1, salt)[0] for salt in salts}
    assert len(roots) == len(salts)


def filled(pool: SnapshotPool, *digests: bytes) -> list[int]:
    indices = []
    for digest in digests:
        copies: list[Copy] = []
        index = pool.take(copies)
        assert index is not None and copies == []
        pool.publish(index, digest)
        indices.append(index)
    return indices


def counters(pool: SnapshotPool) -> tuple[int, int, int, int]:
    return pool.kept, pool.dropped, pool.restored, pool.spilled


def test_free_entries_go_first_then_the_one_used_least_recently():
    pool = SnapshotPool(3)
    a, b, c = filled(pool, b"a", b"b", b"c")
    assert {a, b, c} == {0, 1, 2} and counters(pool) == (3, 0, 0, 0)
    pool.touch(b"a")
    assert pool.restore(b"b") == ("snapshot", b)
    copies: list[Copy] = []
    assert pool.take(copies) == c and copies == []
    assert pool.find(b"c") is None and counters(pool) == (3, 1, 1, 0)
    assert pool.take(copies) == a
    assert pool.take(copies) == b
    assert counters(pool) == (3, 3, 1, 0)
    assert pool.take(copies) is None, "all entries are being filled"
    assert counters(pool) == (3, 4, 1, 0)
    pool.check_integrity([a, b, c])
    pool.release(b)
    assert pool.take(copies) == b


def test_looking_does_not_count_as_use():
    pool = SnapshotPool(2)
    oldest, _ = filled(pool, b"a", b"b")
    assert pool.find(b"a") == ("snapshot", oldest)
    assert pool.take([]) == oldest


def test_a_second_snapshot_of_a_prefix_goes_back():
    pool = SnapshotPool(3)
    a, _ = filled(pool, b"a", b"b")
    index = pool.take([])
    assert index is not None
    pool.publish(index, b"a")
    assert pool.find(b"a") == ("snapshot", a) and counters(pool) == (2, 0, 0, 0)
    pool.check_integrity([])
    assert pool.take([]) == index, "it is free again"
    assert pool.find(b"b") is not None
    pool.take([])
    assert pool.find(b"a") is not None and pool.find(b"b") is None, "publishing counts as use"


def test_an_evicted_snapshot_moves_to_the_host_and_is_read_from_there():
    pool = SnapshotPool(1, num_host=2)
    copies: list[Copy] = []
    filled(pool, b"a")
    for number, digest in enumerate([b"b", b"c"]):
        index = pool.take(copies)
        assert index == 0
        pool.publish(index, digest)
        assert copies[number:] == [StateCopy(("snapshot", 0), ("host", number))]
    assert pool.restore(b"a") == ("host", 0)
    assert pool.restore(b"b") == ("host", 1)
    assert pool.restore(b"a") == ("host", 0)
    assert counters(pool) == (3, 0, 3, 2)
    index = pool.take(copies)
    assert copies[2:] == [StateCopy(("snapshot", 0), ("host", 1))], "b was used before a"
    assert pool.find(b"b") is None and pool.find(b"c") == ("host", 1)
    assert counters(pool) == (3, 1, 3, 3)
    pool.check_integrity([0])
    assert index == 0
    pool.publish(index, b"c")
    assert pool.find(b"c") == ("snapshot", 0) and pool.num_published == 2, "not in both pools"
    pool.check_integrity([])


def run(copies: list[Copy], pools: dict[str, list[str]]) -> None:
    for copy in copies:
        assert isinstance(copy, StateCopy)
        (source, i), (target, j) = copy.source, copy.target
        pools[target][j] = pools[source][i]


def test_a_restore_stays_right_whatever_the_same_step_evicts_later():
    pool = SnapshotPool(2, num_host=1)
    a, b = filled(pool, b"a", b"b")
    index = pool.take([])  # a moves to the host
    assert index == a
    pool.publish(index, b"c")
    pools = {"snapshot": ["c", "b"], "host": ["a"], "slot": ["-"] * 4}
    before: list[Copy] = [StateCopy(pool.restore(b"a"), ("slot", 1))]
    assert pool.take(before) == b  # b moves over a
    before.append(StateCopy(pool.restore(b"b"), ("slot", 2)))
    before.append(StateCopy(pool.restore(b"c"), ("slot", 3)))
    assert pool.take(before) == a  # c moves over b
    assert pool.find(b"a") is pool.find(b"b") is None and pool.find(b"c") == ("host", 0)
    run(before, pools)
    assert pools["slot"] == ["-", "a", "b", "c"] and pools["host"] == ["c"]
    assert [copy.source[0] for copy in before] == [
        "host", "snapshot", "host", "snapshot", "snapshot",
    ]  # fmt: skip
    pool.check_integrity([a, b])


def test_forgetting_frees_the_entry_on_either_side():
    pool = SnapshotPool(1, num_host=1)
    filled(pool, b"a")
    index = pool.take([])
    assert index is not None
    pool.publish(index, b"b")
    for digest in (b"a", b"b", b"never"):
        pool.forget(digest)
        assert pool.find(digest) is None
    pool.check_integrity([])
    assert pool.num_published == 0


def test_reset_forgets_both_sides_and_leaves_what_is_being_filled():
    pool = SnapshotPool(2, num_host=1)
    filled(pool, b"a", b"b")
    index = pool.take([])
    assert index is not None
    pool.reset()
    assert pool.num_published == 0 and pool.find(b"a") is None and pool.find(b"b") is None
    pool.check_integrity([index])
    pool.publish(index, b"c")
    pool.check_integrity([])
    assert pool.find(b"c") == ("snapshot", index)


@pytest.mark.parametrize(
    ("spoil", "taken", "message"),
    [
        (lambda pool: None, [0], "snapshots: free . published . taken"),
        (lambda pool: pool.take([]), [], "snapshots: free . published . taken"),
        (lambda pool: pool._free_host.pop(), [], "host snapshots"),
        (lambda pool: pool._host.update({b"a": pool._free_host.pop()}), [], "1 digests"),
    ],
)
def test_the_check_names_what_is_wrong(spoil, taken, message):
    pool = SnapshotPool(3, num_host=2)
    filled(pool, b"a", b"b")
    pool.check_integrity([])
    spoil(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity(taken)


class Prefix:
    """A cache of which single blocks and snapshots of one prompt's chain are filled by hand."""

    def __init__(self, tokens: int, kv: int, states: tuple[int, ...], **fields: object) -> None:
        ids = list(range(tokens))
        self.blocks, self.snapshots = BlockManager(40, 64), SnapshotPool(16)
        self.cache = PrefixCache(self.blocks, self.snapshots)
        params = SamplingParams(prompt_logprobs=fields.pop("prompt_logprobs", None))
        options = CacheOptions(**fields)
        self.request = Request("0", ids, tokens, params, 0, options)
        chain = block_digests(range(1_000), 15, options.salt)
        self.table = self.blocks.allocate(kv)
        for block, digest in zip(self.table, chain, strict=False):
            self.blocks.publish(block, digest)
        filled(self.snapshots, *(chain[depth - 1] for depth in states))

    def hit(self) -> Hit:
        return self.cache.lookup(self.request)


@pytest.mark.parametrize(
    ("tokens", "kv", "states", "expected"),  # expected: blocks of the hit, the K/V, the state
    [
        (640, 0, (), (0, 0, 0)),
        (640, 5, (), (0, 5, 0)),
        (640, 0, (5,), (0, 0, 5)),
        (640, 5, (5,), (5, 5, 5)),
        (640, 5, (3,), (3, 5, 3)),
        (640, 5, (2, 4, 7), (4, 5, 7)),
        (640, 5, (6, 7), (0, 5, 7)),
        (640, 10, (9, 10), (9, 9, 9)),  # one token is left to compute
        (641, 10, (9, 10), (10, 10, 10)),
        (64, 10, (1,), (0, 0, 0)),
        (65, 10, (1,), (1, 1, 1)),
        (1, 10, (1,), (0, 0, 0)),
    ],
)
def test_a_hit_is_the_deepest_snapshot_within_the_kv_match(tokens, kv, states, expected):
    prefix = Prefix(tokens, kv, states)
    hit = prefix.hit()
    assert (len(hit.blocks), hit.kv, hit.state) == expected
    assert hit.blocks == prefix.table[: expected[0]] and hit.num_tokens == 64 * expected[0]


@pytest.mark.parametrize(
    "fields", [{"enabled": False}, {"prompt_logprobs": 0}, {"prompt_logprobs": 5}]
)
def test_who_does_not_look_up_hits_nothing(fields):
    assert Prefix(640, 9, (9,), **fields).hit() == Hit()


def test_a_cache_without_entries_is_off():
    blocks = BlockManager(8, 64)
    assert not PrefixCache(blocks, None).enabled
    assert not PrefixCache(blocks, SnapshotPool(0, 8)).enabled
    assert PrefixCache(blocks, SnapshotPool(1)).enabled


def test_blocks_and_intervals_are_of_64_tokens():
    with pytest.raises(AssertionError, match="blocks of 128"):
        PrefixCache(BlockManager(8, 128), SnapshotPool(1))
    with pytest.raises(AssertionError, match="interval 100"):
        PrefixCache(BlockManager(8, 64), SnapshotPool(1), 100)
