"""The division of memory: who gets what, what is cut, and what is said when it does not fit.

Units here: a block of 64 tokens takes 1,000 bytes, a sequence's state (and a snapshot) 10,000.
"""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.config import PrefixCacheOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.runtime.memory import CPU_BYTES, MemoryNeeds, MemoryPlan, memory_table, plan_memory
from minivllm.runtime.model_runner import PoolSizes

BLOCK, SLOT = 1_000, 10_000
NEEDS = MemoryNeeds(weights=7, activations=0, graphs=0, block=BLOCK, slot=SLOT)


def plan(
    free: int | None = 1_000_000,
    needs: MemoryNeeds = NEEDS,
    cache: dict[str, Any] | None = None,
    model_len: int = 640,
    **options: Any,
) -> MemoryPlan:
    options = {"max_num_seqs": 4, "gpu_memory_utilization": 1.0} | options
    runtime = RuntimeOptions(prefix_cache=PrefixCacheOptions(**(cache or {})), **options)
    return plan_memory(runtime, needs, free_bytes=free, model_len=model_len, block_size=64)


def spent(found: MemoryPlan, needs: MemoryNeeds = NEEDS) -> int:
    sizes = found.sizes
    return (
        needs.block * sizes.num_blocks
        + needs.slot * (sizes.num_slots + sizes.num_snapshots)
        + needs.activations
        + needs.graphs
    )


def test_the_default_division() -> None:
    """A snapshot for every 2,048 tokens: 32 blocks, 32,000 bytes of K/V beside 10,000."""
    found = plan()
    assert found == MemoryPlan(PoolSizes(5, 730, 22), 4, 640)
    assert spent(found) == 1_000_000  # 950,000 beside the slots: 10 of 42 to snapshots
    assert found.sizes.num_snapshots == 950_000 * 10 // 42 // SLOT


def test_snapshots_follow_their_interval_up_to_half() -> None:
    assert plan(cache={"snapshot_interval": 4096}).sizes.num_snapshots == 950_000 * 10 // 74 // SLOT
    assert plan(cache={"snapshot_interval": 64}).sizes.num_snapshots == 950_000 // 2 // SLOT


def test_the_share_and_what_a_step_takes() -> None:
    needs = MemoryNeeds(0, activations=100_000, graphs=50_000, block=BLOCK, slot=SLOT)
    found = plan(free=2_000_000, needs=needs, gpu_memory_utilization=0.5)
    assert 1_000_000 - BLOCK < spent(found, needs) <= 1_000_000
    assert found.sizes.num_slots == 5 and not found.notes


def test_without_a_cache_no_more_than_all_sequences_can_use() -> None:
    found = plan(cache={"enabled": False, "host_memory_bytes": 10**9})
    assert found == MemoryPlan(PoolSizes(5, 4 * 10 + 1), 4, 640)
    assert plan(free=60_000, cache={"enabled": False}, max_num_seqs=1).sizes.num_blocks == 11
    found = plan(free=45_000, cache={"enabled": False}, max_num_seqs=2)
    assert found.sizes == PoolSizes(2 + 0, 25 - 14) and found.max_num_seqs == 1


def test_slots_take_half_at_most() -> None:
    found = plan(max_num_seqs=256)
    assert found.max_num_seqs == 49 and found.sizes.num_slots == 50
    (note,) = found.notes
    assert "max_num_seqs is 49 of the 256 asked for" in note
    assert "10,000 bytes" in note and "1,000,000" in note and "runtime.max_num_seqs" in note
    assert plan(max_num_seqs=49).notes == ()


def test_slots_give_way_to_sizes_in_bytes() -> None:
    """The sizes were asked for; `max_num_seqs` is a bound."""
    found = plan(max_num_seqs=256, kv_cache_memory_bytes=700_000)
    assert found.sizes.num_blocks == 700 and found.max_num_seqs == 29
    assert spent(found) == 1_000_000 and "max_num_seqs is 29" in found.notes[0]
    assert "nothing in the prefix cache" not in found.notes[0]
    found = plan(max_num_seqs=256, cache={"memory_bytes": 600_000})
    assert found.sizes.num_snapshots == 60
    assert found.max_num_seqs == 400_000 // 2 // SLOT - 1
    assert spent(found) == 1_000_000


def test_sizes_in_bytes() -> None:
    found = plan(kv_cache_memory_bytes=50_999, cache={"memory_bytes": 39_999})
    assert found == MemoryPlan(PoolSizes(5, 50, 3), 4, 640)
    assert plan(kv_cache_memory_bytes=50_000).sizes == PoolSizes(5, 50, 22)
    # what the KV cache leaves bounds the snapshots
    assert plan(kv_cache_memory_bytes=915_000).sizes == PoolSizes(5, 915, 3)
    found = plan(cache={"memory_bytes": 30_000, "host_memory_bytes": 55_000})
    assert found.sizes == PoolSizes(5, 920, 3, 5)


def test_one_snapshot_at_least_where_there_is_room() -> None:
    """30,000 beside the slots, of which a snapshot's share would be 7,142."""
    found = plan(free=80_000, max_model_len=640)
    assert found.sizes == PoolSizes(4, 30, 1) and found.max_num_seqs == 3
    # not where it would take more than half, or a part of the longest sequence's cache
    for free, length in ((38_000, 640), (60_000, 19 * 64)):
        found = plan(free=free, max_num_seqs=1, max_model_len=length, model_len=10**6)
        assert found.sizes.num_snapshots == (1 if free - 20_000 >= 20_000 + BLOCK else 0)


def test_no_snapshot_is_said() -> None:
    for cache in ({"memory_bytes": 0}, {"memory_bytes": SLOT - 1, "host_memory_bytes": 10**6}):
        found = plan(cache=cache)
        assert found.sizes.num_snapshots == found.sizes.num_host_snapshots == 0
        (note,) = found.notes
        assert "no prompt will find anything" in note and "10,000 bytes" in note
        assert "runtime.prefix_cache.memory_bytes" in note
    found = plan(cache={"host_memory_bytes": SLOT - 1})
    assert found.sizes.num_host_snapshots == 0 and found.sizes.num_snapshots == 22
    assert "host_memory_bytes=9,999 holds no snapshot: one takes 10,000 bytes" in found.notes[0]
    assert plan(cache={"enabled": False, "memory_bytes": 0}).notes == ()


def test_the_longest_sequence_is_cut_to_what_fits() -> None:
    found = plan(model_len=10**6)
    assert found.max_model_len == (found.sizes.num_blocks - 1) * 64 == 729 * 64
    assert found.sizes.num_snapshots == 22, "the cut leaves them their share"
    (note,) = found.notes
    assert f"max_model_len is {729 * 64} of the model's 1000000 tokens" in note
    assert "730,000 bytes" in note and "runtime.kv_cache_memory_bytes" in note
    # a length that was asked for comes before snapshots, and is never cut
    found = plan(model_len=10**6, max_model_len=900 * 64)
    assert found.max_model_len == 900 * 64
    assert found.sizes == PoolSizes(5, 910, 4) and not found.notes


def test_no_layer_with_state() -> None:
    """Snapshots of no state take no memory, so every block may have one."""
    needs = MemoryNeeds(0, 0, 0, block=BLOCK, slot=0)
    found = plan(needs=needs, max_num_seqs=256, cache={"host_memory_bytes": 10**6})
    assert found == MemoryPlan(PoolSizes(257, 1000, 999, 0), 256, 640, found.notes)
    assert "holds no snapshot" not in "".join(found.notes)
    assert plan(needs=needs, cache={"enabled": False}).sizes == PoolSizes(5, 41)


def test_no_layer_with_attention() -> None:
    """Blocks are numbers without memory, enough for all; states and snapshots share the rest."""
    needs = MemoryNeeds(0, 0, 0, block=0, slot=SLOT)
    assert plan(needs=needs).sizes == PoolSizes(5, 41, 95)
    assert plan(needs=needs, max_num_seqs=80, max_model_len=65).sizes == PoolSizes(81, 161, 19)
    found = plan(needs=needs, max_num_seqs=256)
    assert found.max_num_seqs == 99 and found.sizes.num_snapshots == 0
    assert ["max_num_seqs" in n or "no prompt will find" in n for n in found.notes] == [True] * 2


def test_nothing_to_hold_at_all() -> None:
    """The reference mode, which keeps neither."""
    found = plan(free=None, needs=MemoryNeeds(7, 0, 0, 0, 0), max_model_len=65)
    assert (found.sizes.num_slots, found.sizes.num_blocks) == (5, 4 * 2 + 1)


def test_a_cpu() -> None:
    found = plan(free=None)
    assert CPU_BYTES - BLOCK < spent(found) <= CPU_BYTES
    found = plan(free=None, kv_cache_memory_bytes=12_000, cache={"memory_bytes": 20_000})
    assert found.sizes == PoolSizes(5, 12, 2)
    found = plan(free=None, cache={"memory_bytes": 2 * CPU_BYTES})
    assert found.sizes.num_snapshots == 2 * CPU_BYTES // SLOT
    assert found.sizes.num_blocks > CPU_BYTES // 4 // BLOCK


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (10**6, {"max_model_len": 641}, r"max_model_len=641: the model was made for 640 positions"),
        (9_999, {"kv_cache_memory_bytes": 10_000}, r"=10,000: the GPU has 9,999 bytes free"),
        (0, {}, r"1 sequence, 0 snapshots and 0 bytes of KV cache do not fit into 0 bytes"),
        (19_999, {}, r"1 sequence, 0 snapshots and 0 bytes of KV cache do not fit into 19,999 b"),
        (21_999, {}, r"KV cache for 64 tokens \(there is room for 0\) beside 1 sequence and 0 sna"),
        (
            100_000,
            {"max_model_len": 600, "max_num_seqs": 1, "kv_cache_memory_bytes": 10_000},
            r"a KV cache for 600 tokens \(there is room for 576\) beside 1 sequence and 1 snapshot",
        ),
        (100_000, {"kv_cache_memory_bytes": 90_000}, r"90,000 bytes of KV cache do not fit into"),
        (100_000, {"cache": {"memory_bytes": 80_001}}, r"KV cache for 64 tokens .* 8 snapshots"),
        (10**6, {"cache": {"memory_bytes": 10**6}}, r"1 sequence, 100 snapshots and 0 bytes"),
    ],
)
def test_what_does_not_fit(free: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(free=free, **options)


def test_the_error_says_what_can_be_changed() -> None:
    needs = MemoryNeeds(0, activations=300_000, graphs=0, block=BLOCK, slot=SLOT)
    with pytest.raises(UserError) as raised:
        plan(free=250_000, needs=needs)
    first, *lines = str(raised.value).splitlines()
    assert first.endswith("do not fit into 0 bytes; one of:")
    assert [line.split()[1] for line in lines] == ["lower", "lower", "raise"]
    assert "runtime.max_num_seqs (now 4; each sequence's state takes 10,000 bytes)" in lines[0]
    assert "runtime.max_num_batched_tokens (now 8192; its step takes 300,000 bytes)" in lines[1]
    assert "runtime.gpu_memory_utilization (now 1)" in lines[2]
    with pytest.raises(UserError) as raised:
        plan(free=None, kv_cache_memory_bytes=1_999)
    assert "gpu_memory_utilization" not in str(raised.value), "it means nothing on a CPU"
    assert "raise runtime.kv_cache_memory_bytes" in str(raised.value)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("block", [0, 1, 1_000, 70_000])
@pytest.mark.parametrize("slot", [0, 1, 10_000, 70_000])
def test_every_plan_is_within_the_budget(block: int, slot: int, enabled: bool) -> None:
    needs = MemoryNeeds(0, 5_000, 5_000, block, slot)
    fitting = 0
    for free in [*range(0, 400_000, 7_919), 10**7]:
        for given in (None, 3 * block or 1, 100_000):
            for wanted in (None, 64, 640):
                options = {"max_model_len": wanted, "kv_cache_memory_bytes": given}
                try:
                    found = plan(free, needs, {"enabled": enabled}, **options)
                except UserError:
                    continue
                fitting += 1
                assert spent(found, needs) <= free
                assert 1 <= found.max_num_seqs <= 4
                assert found.sizes.num_slots == found.max_num_seqs + 1
                assert found.sizes.num_blocks - 1 >= -(-found.max_model_len // 64)
                assert found.max_model_len == wanted or (wanted is None and found.max_model_len > 0)
                assert enabled or found.sizes.num_snapshots == 0
    assert fitting > 40


def test_the_table() -> None:
    needs = MemoryNeeds(5_000, 600, 70, BLOCK, SLOT)
    found = MemoryPlan(PoolSizes(5, 730, 22, 3), 4, 640)
    table = memory_table(found, needs, 64)
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "weights 5,000 B",
        "activations 600 B of the largest step",
        "graphs 70 B estimate",
        "KV cache 730,000 B 46,656 tokens",
        "state slots 50,000 B 4 sequences",
        "snapshots 220,000 B 22; a prefix of 64 tokens can hit",
        "on the host 30,000 B 3",
    ]
    assert len({line.index(" B") for line in table.splitlines()}) == 1
    bare = memory_table(MemoryPlan(PoolSizes(5, 41), 4, 640), MemoryNeeds(0, 0, 0, 0, SLOT), 64)
    assert "no layer needs any" in bare and "0; none" in bare and "host" not in bare
