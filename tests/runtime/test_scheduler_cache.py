"""What later requests reuse: hits, where snapshots are left, waiting for them, and their loss."""

from __future__ import annotations

import random

import pytest
from scheduler_sim import LOGPROBS, Sim, spans

from minivllm.runtime.digests import block_digests
from minivllm.runtime.request import Status

WORDS = [random.Random(5).randrange(200_000) for _ in range(4_000)]


def words(length: int, shared: int = 0, other: int = 1) -> list[int]:
    """A prompt whose first `shared` tokens are those of WORDS and whose others are its own."""
    return WORDS[:shared] + [200_000 + 1_000 * other + i for i in range(length - shared)]


def boundaries(sim: Sim, tokens: list[int], salt: str | None = None) -> list[int]:
    """Token counts of the prefixes whose snapshots are kept."""
    chain = block_digests(tokens, len(tokens) // 64, salt)
    return [64 * i for i, digest in enumerate(chain, 1) if sim.snapshots.find(digest)]


@pytest.mark.parametrize(
    ("length", "cached"), [(1, 0), (63, 0), (64, 0), (65, 64), (128, 64), (129, 128), (200, 192)]
)
def test_a_hit_leaves_one_token_to_compute(length, cached):
    sim = Sim()
    assert sim.serve(WORDS[:length]).num_cached_tokens == 0
    again = sim.add(WORDS[:length])
    assert spans(sim.step(), again) == [(cached, length if length % 64 else cached + 64)]
    sim.run()
    assert again.num_cached_tokens == cached
    assert sim.scheduler.stats.snapshots_restored == (cached > 0)


def test_a_prompt_leaves_its_last_boundaries():
    sim = Sim()
    sim.serve(WORDS[:200])
    assert boundaries(sim, WORDS[:200]) == [192]
    sim.serve(words(256))
    assert boundaries(sim, words(256)) == [192, 256]
    assert sim.serve([*words(256), 1]).num_cached_tokens == 256
    assert sim.serve(WORDS[:191]).num_cached_tokens == 0, "the K/V is there, a state is not"


def test_the_second_leaves_the_junction_and_the_third_takes_it():
    sim = Sim()
    a, b, c = words(500, 300, 1), words(500, 300, 2), words(500, 300, 3)
    sim.serve(a)
    assert boundaries(sim, a) == [448]
    second = sim.add(b)
    assert spans(sim.step(), second) == [(0, 256)]
    sim.run()
    assert second.num_cached_tokens == 0 and boundaries(sim, b) == [256, 448]
    assert sim.serve(c).num_cached_tokens == 256
    stats = sim.scheduler.stats
    assert (stats.queried_tokens, stats.kv_matched_tokens) == (1_500, 512)
    assert (stats.state_matched_tokens, stats.reused_tokens) == (256, 256)
    assert (stats.snapshots_kept, stats.snapshots_dropped, stats.snapshots_restored) == (4, 0, 1)


def test_reuse_never_falls_as_the_shared_part_grows():
    reused = []
    for shared in range(701):
        sim = Sim(budget=300)
        served = [sim.serve(words(720, shared, i)).num_cached_tokens for i in range(3)]
        assert served[:2] == [0, 704 if shared > 704 else 0]
        reused.append(served[2])
    assert reused == [shared // 64 * 64 for shared in range(701)]


def test_of_two_equal_prompts_in_one_step_the_second_hits():
    sim = Sim()
    first, second = sim.add(WORDS[:200]), sim.add(WORDS[:200])
    step = sim.step()
    assert spans(step, first) == [(0, 192)] and not spans(step, second)
    assert second.status is Status.WAITING
    step = sim.step()
    assert spans(step, first) == [(192, 200)] and spans(step, second) == [(192, 200)]
    assert sim.step() is None and second.num_cached_tokens == 192


def test_who_waits_for_a_snapshot_is_passed_by_others_and_keeps_its_place():
    sim = Sim(budget=100)  # 64 of which the first one takes
    first = sim.add(WORDS[:400])
    sim.step()
    second, third, stranger = sim.add(WORDS[:400]), sim.add(WORDS[:390]), sim.add(words(20))
    assert spans(sim.step(), stranger) == [(0, 20)]
    while first.num_computed_tokens < 384:
        assert list(sim.scheduler.waiting) == [second, third]
        sim.step()
    assert [c.request for c in sim.step().prefill] == [first, second, third]
    sim.run()
    assert (second.num_cached_tokens, third.num_cached_tokens) == (384, 384)


def test_a_stranger_runs_while_others_wait():
    sim = Sim(budget=100)
    sim.add(WORDS[:400])
    second, stranger = sim.add(WORDS[:400]), sim.add(words(20))
    step = sim.step()
    assert spans(step, stranger) == [(0, 20)] and second.status is Status.WAITING
    sim.run()
    assert second.num_cached_tokens == 384


def test_nobody_waits_for_less_than_it_has():
    sim = Sim(budget=200)
    sim.serve(WORDS[:200])
    longer = sim.add(WORDS[:200] + words(300), snapshot_at=(70,))  # its targets lie behind 192
    sim.step()
    again = sim.add(WORDS[:200])
    assert len(sim.step().prefill) == 2
    assert (longer.num_cached_tokens, again.num_cached_tokens) == (192, 192)
    assert again.admissions == 1
    sim.run()


def test_a_wait_costs_no_look_up_in_the_cache(monkeypatch):
    """A long prompt has thousands of blocks, and many may wait for it over many steps."""
    sim = Sim(budget=100)  # 64 of which the first one takes
    sim.add(WORDS[:600])
    waiting = [sim.add(WORDS[:600]) for _ in range(50)]
    sim.step(), sim.step()
    looked_up = []
    lookup = sim.scheduler.cache.lookup
    monkeypatch.setattr(
        sim.scheduler.cache, "lookup", lambda request: looked_up.append(request) or lookup(request)
    )
    for _ in range(5):
        sim.step()
    assert looked_up == [] and list(sim.scheduler.waiting) == waiting
    sim.run()
    assert len(looked_up) < 200


@pytest.mark.parametrize("end", ["aborted", "failed", "preempted"])
def test_a_wait_ends_with_the_one_it_was_for(end):
    sim = Sim(blocks=20, budget=100, snapshots=4)  # 64 of which the first one takes
    oldest = sim.add(words(62, other=4), max_tokens=5)
    sim.step()
    first, second = sim.add(WORDS[:600]), sim.add(WORDS[:600])
    sim.step(), sim.step()
    assert (first.num_computed_tokens, second.admissions) == (128, 0)
    if end == "preempted":
        held = sim.blocks.allocate(sim.blocks.num_free)
        assert sim.step().preempted == (first,) and oldest.status is Status.RUNNING
        sim.blocks.free(held)
        sim.run()
        # the first comes first again and keeps what it had published, but no state
        assert (first.admissions, second.num_cached_tokens) == (2, 576)
        return
    sim.scheduler.finish(first, publish=end == "aborted")
    sim.leave(first)
    sim.scheduler.check_integrity()
    assert spans(sim.step(), second) == [(0, 64)]
    sim.run()
    # the junction with the first one's published blocks
    assert (128 in boundaries(sim, WORDS[:600])) == (end == "aborted")
    assert sim.serve(WORDS[:600]).num_cached_tokens == 576


def test_a_wait_passes_to_the_heir():
    sim = Sim(budget=100)  # 64 of which the first one takes
    first = sim.add(WORDS[:300], n=2)
    sim.step()
    second = sim.add(WORDS[:300])
    heir = first.forks[0]
    sim.abort(first)
    sim.scheduler.check_integrity()
    step = sim.step()
    assert spans(step, heir) == [(64, 128)] and not second.admissions
    sim.run()
    assert second.num_cached_tokens == 256


def test_only_equal_salts_share():
    sim = Sim()
    salts = [None, "", "a", "b"]
    for salt in salts:
        assert sim.serve(WORDS[:300], salt=salt).num_cached_tokens == 0
    for salt in salts:
        assert sim.serve(WORDS[:300], salt=salt).num_cached_tokens == 256


def test_equal_prompts_of_different_salts_do_not_wait():
    sim = Sim()
    a, b = sim.add(WORDS[:300], salt="a"), sim.add(WORDS[:300], salt="b")
    step = sim.step()
    assert spans(step, a) == spans(step, b) == [(0, 256)]
    sim.run()


def test_who_opts_out_takes_nothing_and_leaves_nothing():
    sim = Sim()
    sim.serve(WORDS[:300], enabled=False, max_tokens=90)
    assert sim.blocks.num_cached == 0 and sim.snapshots.num_published == 0
    sim.serve(WORDS[:300])
    before = (sim.blocks.num_cached, sim.snapshots.num_published)
    request = sim.add(WORDS[:300], enabled=False)
    assert spans(sim.step(), request) == [(0, 300)]
    sim.run()
    assert (sim.blocks.num_cached, sim.snapshots.num_published) == before
    assert request.num_cached_tokens == 0 and sim.scheduler.stats.queried_tokens == 300


def test_who_opts_out_neither_waits_nor_lets_wait():
    sim = Sim()
    a, b, c = (sim.add(WORDS[:300], enabled=enabled) for enabled in (False, True, False))
    step = sim.step()
    assert [spans(step, r) for r in (a, b, c)] == [[(0, 300)], [(0, 256)], [(0, 300)]]
    sim.run()


def test_without_prefix_caching_nothing_is_left():
    sim = Sim(caching=False)
    for _ in range(2):
        assert sim.serve(WORDS[:300], max_tokens=90, snapshot_at=(64,)).num_cached_tokens == 0
    assert sim.blocks.num_cached == 0 and sim.scheduler.stats.queried_tokens == 0


def test_who_asks_for_prompt_logprobs_takes_nothing_but_leaves_it():
    sim = Sim()
    assert sim.serve(WORDS[:300], params=LOGPROBS).num_cached_tokens == 0
    first, second = sim.add(WORDS[:300], params=LOGPROBS), sim.add(WORDS[:300])
    step = sim.step()
    assert spans(step, first) == [(0, 256)] and spans(step, second) == [(256, 300)]
    sim.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 256)
    assert sim.scheduler.stats.queried_tokens == 300


def test_snapshots_where_the_caller_asks():
    sim = Sim()
    sim.serve(words(500, 300), snapshot_at=(0, 63, 130, 191, 300, 10_000))
    assert boundaries(sim, words(500, 300)) == [128, 256, 448]
    assert sim.serve(words(500, 140, 2)).num_cached_tokens == 128, "at once, not at the third"


def test_snapshots_at_every_interval_of_prompt_and_output():
    sim = Sim(interval=128)
    request = sim.add(WORDS[:300], max_tokens=400)
    while len(request.token_ids) < 515:
        sim.step()
    # 384 and 512 are there while it runs; its rolling snapshot has yet to be published
    assert boundaries(sim, request.token_ids[:514]) == [128, 256, 384, 512]
    sim.run()
    assert boundaries(sim, request.token_ids) == [128, 256, 384, 512, 640]
    assert sim.serve(words(500, 300, 2)).num_cached_tokens == 256


def test_a_next_turn_reuses_the_output_of_the_last():
    sim = Sim()
    history = WORDS[:10]
    for turn, cached in enumerate([0, 192, 448, 704]):
        request = sim.serve(history, max_tokens=200)
        assert request.num_cached_tokens == cached
        # the newest token was never run
        assert boundaries(sim, request.token_ids)[-1] == (len(request.token_ids) - 1) // 64 * 64
        history = request.token_ids + words(50, other=turn)
    assert sim.scheduler.stats.snapshots_kept == 4 + 1  # at each turn's end, and at 256


def test_snapshots_on_the_way_need_no_cut():
    """The graph leaves those at every interval, at a junction and at the last boundary."""
    sim = Sim(interval=256, on_the_way=True)
    sim.serve(words(300, 300))
    request = sim.add(words(600, 200), snapshot_at=(400,))
    step = sim.step()
    assert spans(step, request) == [(0, 600)], "200 equal tokens, but no state behind them"
    (chunk,) = step.prefill
    assert [at for at, _ in chunk.snapshots] == [192, 256, 384, 512, 576] and not step.after
    assert boundaries(sim, request.token_ids[:600]) == [192, 256, 384, 512, 576]
    sim.run()
    again = sim.add(words(220, 200, 3))
    assert spans(sim.step(), again) == [(192, 220)]


@pytest.mark.parametrize("on_the_way", [False, True])
def test_a_pool_too_small_for_a_prompt_keeps_its_deepest_snapshots(on_the_way):
    sim = Sim(snapshots=2, interval=64, on_the_way=on_the_way)
    sim.serve(WORDS[:500])
    assert boundaries(sim, WORDS[:500]) == [384, 448]
    assert sim.scheduler.stats.snapshots_dropped == 5
    assert sim.serve(WORDS[:500]).num_cached_tokens == 448


def test_a_chunk_that_starts_within_a_block_is_cut_and_copied():
    """Its chunks of 64 tokens end elsewhere than blocks do."""
    sim = Sim(budget=100, on_the_way=True)
    other, request = sim.add(words(70)), sim.add(words(400, 0, 2), snapshot_at=(64, 128))
    assert spans(sim.step(), request) == [(0, 30)]
    found = []
    while request.prefilling:
        step = sim.step()
        copied = [copy for copy in step.after if copy.source[1] == request.state_slot]
        found += [(*spans(step, request), [at for at, _ in step.prefill[0].snapshots], len(copied))]
    assert found == [
        ((30, 64), [], 1),
        ((64, 128), [128], 0),
        ((128, 192), [], 0),
        ((192, 256), [], 0),
        ((256, 320), [], 0),
        ((320, 400), [384], 0),
    ]
    assert boundaries(sim, request.token_ids[:400]) == [64, 128, 384]
    sim.run()
    assert other.status is Status.FINISHED


@pytest.mark.parametrize("end", ["finish", "abort", "preempt"])
def test_the_newest_state_stays_however_decode_ends(end):
    sim = Sim(blocks=20)
    older = sim.add(words(63), max_tokens=140)
    request = sim.add(WORDS[:10], max_tokens=130 if end == "finish" else 300)
    while len(request.token_ids) < 139:
        sim.step()
    assert boundaries(sim, request.token_ids) == [], "it is the request's own so far"
    if end == "finish":
        while request.status is not Status.FINISHED:
            sim.step()
    elif end == "abort":
        sim.abort(request)
    else:
        held = sim.blocks.allocate(sim.blocks.num_free)
        while not request.num_preemptions:
            sim.step()
        sim.blocks.free(held)
    at = (len(request.token_ids) - 1) // 64 * 64
    assert boundaries(sim, request.token_ids) == [at]
    if end == "preempt":
        assert spans(sim.step(), request)[0][0] == at
        assert request.num_cached_tokens == 0, "that is of its first admission"
    sim.run()
    assert older.status is Status.FINISHED


def test_an_end_while_the_newest_state_is_being_copied():
    """The entry held the state of 64 tokens, and that of 128 is on its way into it."""
    sim = Sim()
    request = sim.add(WORDS[:10], max_tokens=300)
    while len(request.token_ids) < 128:
        sim.step()
    assert request.rolling_blocks == 1
    step = sim.scheduler.schedule()
    tokens = sim.device.execute(step)
    assert [copy.target for copy in step.after] == [("snapshot", request.rolling_snapshot)]
    sim.abort(request)
    sim.settle(step, tokens)
    sim.check_idle()
    assert boundaries(sim, request.token_ids) == []
    assert sim.serve([*request.token_ids, 1]).num_cached_tokens == 0


def test_rolling_snapshots_leave_half_of_the_pool_to_prompts():
    sim = Sim(snapshots=5, seqs=8)
    for i in range(6):
        sim.add(words(60, other=i), max_tokens=100)
    for _ in range(20):
        sim.step()
    assert [r.rolling_snapshot is not None for r in sim.scheduler.running] == [True] * 2 + [
        False
    ] * 4
    assert sim.scheduler.stats.snapshots_dropped == 4
    sim.add(WORDS[:300])
    again = sim.add(WORDS[:300])
    sim.run()
    assert again.num_cached_tokens == 256


def test_no_entry_to_take_is_counted_and_harms_nobody():
    sim = Sim(snapshots=1)
    held = sim.snapshots.take([])
    first, second = sim.add(WORDS[:300]), sim.add(WORDS[:300])
    while sim.step() is not None:
        sim.blocks.check_integrity(r.blocks for r in sim.scheduler.running)
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert sim.scheduler.stats.snapshots_dropped == 2  # 256, by each
    assert sim.scheduler.stats.kv_matched_tokens == 256
    sim.snapshots.release(held)


def test_a_snapshot_without_kv_and_kv_without_a_snapshot():
    sim = Sim(blocks=8)
    sim.serve(WORDS[:300])
    sim.serve(words(8 * 64, other=2))  # takes every block
    assert boundaries(sim, WORDS[:300]) == [256]
    assert sim.serve(WORDS[:300]).num_cached_tokens == 0
    stats = sim.scheduler.stats
    assert (stats.kv_matched_tokens, stats.state_matched_tokens) == (0, 256)
    assert stats.blocks_evicted >= 4
    assert sim.serve(WORDS[:300]).num_cached_tokens == 256, "its K/V is back"

    sim = Sim(snapshots=1)
    sim.serve(WORDS[:300])
    sim.serve(words(100))  # takes the only entry
    assert sim.serve(WORDS[:300]).num_cached_tokens == 0
    stats = sim.scheduler.stats
    assert (stats.kv_matched_tokens, stats.state_matched_tokens) == (256, 0)
    assert stats.snapshots_dropped == 2
    assert sim.serve(WORDS[:300]).num_cached_tokens == 256


def test_a_snapshot_that_is_there_already_is_not_taken_again():
    sim = Sim(blocks=8, snapshots=2)
    sim.serve(WORDS[:300])
    sim.serve(words(64 * 8 - 1, other=2))  # takes every block and the other entry
    again = sim.add(WORDS[:300])
    step = sim.step()
    assert spans(step, again) == [(0, 256)] and not step.after
    sim.run()
    assert sim.scheduler.stats.snapshots_kept == 2
    sim.serve(words(100, other=3))
    assert boundaries(sim, WORDS[:300]) == [256], "it counts as used just now"
    assert boundaries(sim, words(64 * 8 - 1, other=2)) == []


def test_a_chain_loses_its_tail_first_and_a_hit_shrinks_with_it():
    sim = Sim(blocks=10, interval=64)
    sim.serve(WORDS[:500])
    reused = []
    for taken in range(1, 9):
        sim = Sim(blocks=10, interval=64)
        sim.serve(WORDS[:500])  # seven full blocks stay
        sim.serve(words(64 * taken, other=taken))
        reused.append(sim.serve(WORDS[:500]).num_cached_tokens // 64)
    assert reused == [7, 7, 7, 6, 5, 4, 3, 2]


def test_snapshots_spill_to_the_host_and_are_restored_from_it():
    sim = Sim(snapshots=1, host=4, blocks=64)
    for i in range(5):
        sim.serve(words(200, other=i))
        sim.device.poison()
    stats = sim.scheduler.stats
    assert (stats.snapshots_spilled, stats.snapshots_dropped) == (4, 0)
    for i in range(5):
        assert sim.serve(words(200, other=i)).num_cached_tokens == 192
    stats = sim.scheduler.stats
    assert (stats.snapshots_restored, stats.snapshots_kept) == (5, 5)
    sim.serve(words(200, other=9))
    assert sim.scheduler.stats.snapshots_dropped == 1
    assert [sim.serve(words(200, other=i)).num_cached_tokens for i in (0, 4)] == [0, 192]


def test_an_entry_is_evicted_in_the_step_that_restores_it():
    """The restore reads before the spill and the new snapshot overwrite."""
    sim = Sim(snapshots=1, host=1)
    sim.serve(WORDS[:200])
    other = sim.add(WORDS[:192] + words(200))  # hits 192, then leaves 384 in the only entry
    step = sim.step()
    assert spans(step, other) == [(192, 384)]
    assert [(c.source[0], c.target[0]) for c in step.before] == [
        ("snapshot", "slot"),
        ("snapshot", "host"),
    ]
    assert [c.target for c in step.after] == [("snapshot", 0)]
    sim.run()
    assert sim.serve(WORDS[:200]).num_cached_tokens == 192


def test_reset_while_requests_run():
    sim = Sim(budget=300)
    sim.serve(words(100))
    decoding = sim.add(WORDS[:64], max_tokens=100)
    for _ in range(70):
        sim.step()
    assert decoding.rolling_snapshot is not None
    prefilling, waiting = sim.add(WORDS[:600]), sim.add(WORDS[:600])
    sim.step()
    assert prefilling.num_cached_tokens == 64 and waiting.status is Status.WAITING
    sim.scheduler.reset_prefix_cache()
    sim.scheduler.check_integrity()
    assert sim.blocks.num_cached == sim.snapshots.num_published == 0
    sim.step()
    assert waiting.admissions == 1, "nobody is about to leave what it waited for"
    sim.run()
    assert waiting.num_cached_tokens == 0
    assert boundaries(sim, decoding.token_ids) == [], "it ran before the reset"
    assert boundaries(sim, WORDS[:600]) == [576], "the one that came behind the reset left it"
    assert sim.serve(words(100)).num_cached_tokens == 0


def test_reset_between_schedule_and_advance():
    sim = Sim()
    request = sim.add(WORDS[:200])
    step = sim.scheduler.schedule()
    tokens = sim.device.execute(step)
    sim.scheduler.reset_prefix_cache()
    sim.settle(step, tokens)
    sim.scheduler.check_integrity()
    sim.run()
    assert request.status is Status.FINISHED
    assert sim.blocks.num_cached == sim.snapshots.num_published == 0


def test_who_runs_again_after_a_reset_leaves_snapshots_again():
    sim = Sim(blocks=12)
    sim.add(words(63), max_tokens=5)
    request = sim.add(WORDS[:300], max_tokens=3)
    sim.step()
    sim.scheduler.reset_prefix_cache()
    held = sim.blocks.allocate(sim.blocks.num_free)
    while not request.num_preemptions:
        sim.step()
    sim.blocks.free(held)
    sim.run()
    assert boundaries(sim, request.token_ids) == [256]


def test_a_failure_takes_back_its_prefix_and_leaves_others():
    sim = Sim()
    sim.serve(words(300, 200, 1))
    sim.serve(words(300, 200, 2))  # leaves the junction at 192
    sim.serve(words(300))
    failing = sim.add(words(300, 200, 3), max_tokens=100)
    for _ in range(70):
        sim.step()
    assert failing.num_cached_tokens == 192 and failing.rolling_snapshot is not None
    sim.scheduler.finish(failing, publish=False)
    sim.leave(failing)
    sim.check_idle()
    assert boundaries(sim, failing.token_ids) == []
    assert sim.serve(words(300, 200, 4)).num_cached_tokens == 0
    assert sim.serve(words(300)).num_cached_tokens == 256


def test_an_heir_does_not_bring_back_what_failed():
    sim = Sim(budget=100)
    sim.serve(WORDS[:300])
    failing = sim.add(WORDS[:300], max_tokens=9)
    head = sim.add(words(600, 300, 1), n=2)
    heir = head.forks[0]
    sim.step(), sim.step()
    assert head.num_cached_tokens == failing.num_cached_tokens == 256 and head.prefilling
    sim.scheduler.finish(failing, publish=False)
    sim.leave(failing)
    sim.abort(head)
    sim.run()
    assert sim.finished[-1] is heir
    assert sim.serve(words(600, 300, 1)).num_cached_tokens == 0


def test_blocks_that_a_failed_request_shares_stay_with_their_other_owner():
    sim = Sim()
    sim.serve(WORDS[:300])
    a, b = (sim.add(WORDS[:300], max_tokens=50, seed=i) for i in range(2))
    for _ in range(5):
        sim.step()
    assert a.blocks[:4] == b.blocks[:4]
    sim.scheduler.finish(a, publish=False)
    sim.leave(a)
    sim.scheduler.check_integrity()
    sim.run()  # checks what b generates
    assert b.status is Status.FINISHED


def test_equal_prompts_share_blocks_and_nobody_writes_to_them():
    sim = Sim(blocks=40)
    sim.serve(WORDS[:640])
    requests = [sim.add(WORDS[:640], max_tokens=70, seed=i) for i in range(4)]
    sim.step()
    assert [r.blocks[:9] for r in requests] == [requests[0].blocks[:9]] * 4
    assert sim.blocks.num_used == 9 + 4
    sim.run()
    assert len({tuple(r.token_ids) for r in requests}) == 4


def test_what_is_being_decoded_can_be_shared_already():
    """K/V is found while its owner runs; the state only where a snapshot is."""
    sim = Sim(interval=64)
    first = sim.add(WORDS[:100], max_tokens=200)
    while len(first.token_ids) < 260:
        sim.step()
    second = sim.add([*first.token_ids, 1, 2, 3], max_tokens=2)
    sim.step()
    assert second.num_cached_tokens == 256 and second.blocks[:4] == first.blocks[:4]
    sim.run()
