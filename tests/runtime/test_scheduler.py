"""Who runs, in which order, with which memory: decode, chunks, admission, preemption, the end."""

from __future__ import annotations

import itertools

import pytest
from scheduler_sim import LOGPROBS, Sim, chunks, spans

from minivllm.runtime.block_manager import BlockManager, IntegrityError
from minivllm.runtime.request import Request, Status
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.scheduler import Scheduler, SchedulerLimits
from minivllm.runtime.state_slots import StateSlots


def prompt(length: int, start: int = 0) -> range:
    """Prompts of different starts share nothing."""
    return range(start * 10_000, start * 10_000 + length)


def test_nothing_to_do_is_no_step():
    sim = Sim()
    assert sim.scheduler.schedule() is None
    sim.serve(prompt(3))
    assert sim.scheduler.schedule() is None


def test_decode_goes_on_while_a_long_prompt_is_chunked():
    sim = Sim(budget=128)
    short = sim.add(prompt(10), max_tokens=50)
    assert chunks(sim.step()) == [(short, 0, 10, True)]
    long = sim.add(prompt(1_000, 1))
    seen = []
    for number in itertools.count(2):
        step = sim.step()
        assert step.decode == (short,) and len(short.token_ids) == 10 + number
        seen += spans(step, long)
        if step.prefill[0].last:
            break
    # the last boundary, 960, is where a snapshot is left
    assert seen == [*((i, i + 128) for i in range(0, 896, 128)), (896, 960), (960, 1000)]
    assert sim.step().decode == (short,) and long.status is Status.FINISHED
    sim.run()


def test_decode_rows_take_nothing_from_the_budget():
    sim = Sim(budget=1)
    rows = [sim.add(prompt(1, i), max_tokens=40) for i in range(5)]
    for _ in rows:
        sim.step()
    late = sim.add(prompt(7, 9))
    for start in range(7):
        step = sim.step()
        assert step.decode == tuple(rows) and spans(step, late) == [(start, start + 1)]
    sim.run()


@pytest.mark.parametrize(
    ("budget", "length", "caching", "expected"),
    [
        (1, 3, True, [1, 2, 3]),
        (7, 20, True, [7, 14, 20]),
        (7, 67, False, [7, 14, 21, 28, 35, 42, 49, 56, 63, 67]),
        (63, 200, True, [63, 64, 127, 128, 191, 192, 200]),
        (63, 200, False, [63, 64, 127, 128, 191, 200]),
        (64, 200, True, [64, 128, 192, 200]),
        (65, 200, True, [64, 128, 192, 200]),
        (65, 200, False, [64, 128, 192, 200]),
        (199, 200, False, [192, 200]),
        (200, 200, False, [200]),
        (200, 200, True, [192, 200]),
        (4096, 200, True, [192, 200]),
        (4096, 128, True, [64, 128]),
        (4096, 128, False, [128]),
        (4096, 64, True, [64]),
        (4096, 63, True, [63]),
        (4096, 1, True, [1]),
    ],
)
def test_chunks_end_at_snapshots_at_blocks_and_at_the_end(budget, length, caching, expected):
    sim = Sim(budget=budget, caching=caching)
    request = sim.add(prompt(length))
    seen = []
    while step := sim.step():
        seen += spans(step, request)
        assert not step.decode and step.prefill[0].last == (seen[-1][1] == length)
    assert seen == list(zip([0, *expected[:-1]], expected, strict=True))


def test_a_chunk_of_logprobs_has_a_limit_of_its_own():
    sim = Sim(logits_rows=30, budget=100)
    asking = sim.add(prompt(100), params=LOGPROBS)
    other = sim.add(prompt(90, 1))
    ends: dict[Request, list[int]] = {asking: [], other: []}
    while step := sim.step():
        for chunk in step.prefill:
            ends[chunk.request].append(chunk.end)
    assert ends == {asking: [30, 60, 64, 94, 100], other: [64, 90]}


def test_prompts_of_one_step_share_the_budget_oldest_first():
    sim = Sim(budget=100, caching=False)
    a, b, c = sim.add(prompt(80)), sim.add(prompt(150, 1)), sim.add(prompt(30, 2))
    assert chunks(sim.step()) == [(a, 0, 80, True), (b, 0, 20, False)]
    assert c.status is Status.WAITING
    assert chunks(sim.step()) == [(b, 20, 64, False), (c, 0, 30, True)]
    assert chunks(sim.step()) == [(b, 64, 150, True)]
    assert sim.step() is None


def test_the_tokens_drawn_are_those_of_last_chunks_then_of_decode_rows():
    sim = Sim(budget=100, caching=False)
    a = sim.add(prompt(5), max_tokens=9)
    sim.step()
    b, c = sim.add(prompt(6, 1), n=2), sim.add(prompt(300, 2))
    b2 = b.forks[0]
    step = sim.step()
    assert [s.request_id for s in step.sampled] == [b.request_id, b2.request_id, a.request_id]
    assert spans(step, c) == [(0, 64)] and not step.prefill[1].last
    sim.run()


def test_nobody_overtakes_the_first_who_does_not_fit():
    sim = Sim(blocks=10)
    first = sim.add(prompt(6 * 64 - 3), max_tokens=3)
    sim.step()
    large, small = sim.add(prompt(8 * 64, 1)), sim.add(prompt(1, 2))
    while first.status is not Status.FINISHED:
        sim.step()
        assert large.admissions == small.admissions == 0
    step = sim.step()
    assert spans(step, large) == [(0, 7 * 64)] and spans(step, small) == [(0, 1)]
    sim.run()


@pytest.mark.parametrize(("blocks_asked", "admitted"), [(296, True), (297, False)])
def test_admission_leaves_one_percent_of_the_blocks(blocks_asked, admitted):
    sim = Sim(blocks=300, budget=20_000)
    running = sim.add(prompt(1), max_tokens=5)  # holds one block; of 300 that leaves 299
    sim.step()
    large = sim.add(range(blocks_asked * 64))
    sim.step()
    assert bool(large.admissions) == admitted
    sim.run()
    assert running.status is large.status is Status.FINISHED


def test_admission_leaves_one_block_of_a_small_pool_unless_nothing_runs():
    sim = Sim(blocks=4)
    assert sim.serve(prompt(4 * 64)).admissions == 1
    running = sim.add(prompt(1, 1), max_tokens=3)
    all_but_running = sim.add(prompt(3 * 64, 2))
    sim.step(), sim.step()
    assert (running.admissions, all_but_running.admissions) == (1, 0)
    sim.run()


def test_as_many_run_as_are_allowed_and_as_there_are_slots():
    for limits in ({"seqs": 3}, {"seqs": 8, "slots": 3}):
        sim = Sim(**limits)
        requests = [sim.add(prompt(4, i), max_tokens=4) for i in range(5)]
        for _ in range(4):
            sim.step()
            assert [r.admissions for r in requests] == [1, 1, 1, 0, 0]
        assert len(sim.step().prefill) == 2
        sim.run()


def full_pool(blocks: int = 4, **fields: object) -> tuple[Sim, list[Request]]:
    """Three requests of one block each, one token before its end; one block is free."""
    sim = Sim(blocks=blocks, **fields)
    requests = [sim.add(prompt(63, i), max_tokens=9) for i in range(3)]
    step = sim.step()
    assert [c.request for c in step.prefill] == requests
    assert sim.step().decode == tuple(requests), "the 64th position is still theirs"
    return sim, requests


def test_the_youngest_gives_way_and_comes_back_in_its_turn():
    sim, (a, b, c) = full_pool()
    later = sim.add(prompt(1, 9))
    step = sim.step()
    assert step.preempted == (c,) and step.decode == (a, b) and not step.prefill
    assert (c.status, c.num_preemptions, c.num_computed_tokens) == (Status.WAITING, 1, 0)
    assert c.blocks == [] and c.state_slot == 0 and later.admissions == 0
    assert list(sim.scheduler.waiting) == [c, later]
    assert list(sim.scheduler.running) == [a, b]
    sim.run()
    assert [r.num_preemptions for r in (a, b, c, later)] == [0, 0, 1, 0]
    assert [r.admissions for r in (a, b, c, later)] == [1, 1, 2, 1]
    assert sim.finished.index(c) > sim.finished.index(b)


def test_the_youngest_may_be_the_one_that_asks():
    sim = Sim(blocks=4)
    a, b = sim.add(prompt(10), max_tokens=50), sim.add(prompt(60, 1), max_tokens=50)
    sim.step()
    held = sim.blocks.allocate(2)
    while b.num_preemptions == 0:
        step = sim.step()
    assert step.preempted == (b,) and step.decode == (a,) and len(b.token_ids) == 65
    sim.blocks.free(held)
    sim.run()
    assert a.num_preemptions == 0 and b.admissions == 2


def test_a_prefill_under_way_gives_way_too():
    sim = Sim(blocks=6, budget=64, snapshots=2)
    old = sim.add(prompt(62), max_tokens=9)
    sim.step()
    young = sim.add(prompt(4 * 64, 1))
    seen = []
    while not young.num_preemptions:
        step = sim.step()
        seen += spans(step, young)
        if len(seen) == 1:
            held = sim.blocks.allocate(sim.blocks.num_free)
    assert step.preempted == (young,) and step.decode == (old,) and not step.prefill
    assert seen == [(0, 64), (64, 128)]
    assert list(sim.scheduler.waiting) == [young]
    sim.blocks.free(held)
    sim.run()
    assert (young.admissions, young.num_cached_tokens) == (2, 0)


def test_nobody_overtakes_who_was_preempted():
    sim, (_, _, c) = full_pool()
    tiny = sim.add(prompt(1, 9))
    while c.status is not Status.FINISHED:
        sim.step()
        assert tiny.admissions < 1 + (c.admissions - c.num_preemptions)
    sim.run()


def test_who_is_older_takes_the_place_of_the_preempted_at_once():
    sim = Sim(blocks=8, seqs=3, slots=2)
    a, b = sim.add(prompt(62), max_tokens=9), sim.add(prompt(5 * 64, 1), max_tokens=9)
    sim.step()
    older = sim.add(prompt(10, 2), max_tokens=9)
    older.arrival, b.arrival = b.arrival, older.arrival
    held = sim.blocks.allocate(sim.blocks.num_free)
    sim.step()
    step = sim.step()
    assert step.preempted == (b,) and step.decode == (a,) and spans(step, older) == [(0, 10)]
    sim.blocks.free(held)
    sim.run()


def test_who_came_first_is_never_preempted_for_who_came_later():
    sim = Sim(blocks=8, seqs=6)
    requests = [sim.add(prompt(20 + i, i), max_tokens=150) for i in range(6)]
    order = []
    while step := sim.step():
        running = [r for r in requests if r.status is Status.RUNNING]
        for victim in step.preempted:
            assert all(r.arrival < victim.arrival for r in running)
            order.append(victim)
    assert len(order) >= 4 and requests[0] not in order
    assert sim.finished[0] is requests[0]
    sim.check_idle()


@pytest.mark.parametrize("percent", [99, 100])
def test_a_prompt_as_large_as_the_pool_ends_among_others(percent):
    sim = Sim(blocks=100, budget=1_000)
    before = [sim.add(prompt(150, i), max_tokens=100) for i in range(3)]
    sim.step()
    length = percent * 64
    large = sim.add(prompt(length, 7), max_tokens=6_401 - length)  # to max_model_len
    after = [sim.add(prompt(150, 10 + i), max_tokens=100) for i in range(3)]
    sim.run()
    assert set(sim.finished) == {*before, large, *after}
    assert all(sim.finished.index(r) < sim.finished.index(large) for r in before)


def test_a_prompt_larger_than_the_pool_does_not_fit():
    sim = Sim(blocks=100, max_model_len=10_000)
    assert sim.scheduler.fits(6_400) and not sim.scheduler.fits(6_401)
    with pytest.raises(AssertionError):
        sim.add(prompt(6_401))


@pytest.mark.parametrize(
    ("tokens", "n", "fits"),
    [
        (0, 1, False),
        (1, 1, True),
        (640, 1, True),
        (641, 1, False),
        (640, 4, True),
        (640, 5, False),  # slots
        (576, 4, True),
        (575, 2, True),
        (575, 3, False),  # nine blocks and two copies of the last
        (513, 3, False),
        (449, 3, True),
    ],
)
def test_what_fits(tokens, n, fits):
    sim = Sim(blocks=10, seqs=4)
    assert sim.scheduler.fits(tokens, n) == fits
    if fits:
        sim.serve(prompt(tokens), n=n)
        assert len(sim.finished) == n


def test_sequences_of_a_step_have_only_so_much_history():
    """Their keys and values are copied side by side; one alone may have more."""
    sim = Sim(blocks=100, budget=1_000, context=500)
    long = sim.serve(prompt(640), max_tokens=1).token_ids[:640]
    again = [sim.add([*long, 7, i], max_tokens=1) for i in range(3)]
    short = sim.add(prompt(100, 5), max_tokens=1)
    for request in again:
        assert chunks(sim.step()) == [(request, 640, 642, True)], "alone, and in order"
    assert chunks(sim.step())[0][:3] == (short, 0, 64)
    sim.run()


def test_prompts_with_logprobs_share_the_rows_of_a_step():
    sim = Sim(logits_rows=30, budget=100)
    a, b = (sim.add(prompt(20, i), max_tokens=1, params=LOGPROBS) for i in range(2))
    other = sim.add(prompt(20, 9), max_tokens=1)
    assert chunks(sim.step()) == [(a, 0, 20, True), (b, 0, 10, False), (other, 0, 20, True)]
    assert chunks(sim.step()) == [(b, 10, 20, True)]


def test_a_request_must_get_its_token_before_the_next_step():
    sim = Sim()
    sim.add(prompt(3), max_tokens=5)
    step = sim.scheduler.schedule()
    sim.device.execute(step)
    sim.scheduler.advance(step)
    (request,) = step.sampled
    request.in_flight -= 1  # seen, and not appended
    with pytest.raises(AssertionError, match=r"request 0\.0: no token was appended"):
        sim.scheduler.schedule()


def test_an_end_may_come_twice_and_at_any_stage():
    sim = Sim(budget=64)
    waiting, prefilling = sim.add(prompt(5), max_tokens=5), None
    sim.abort(waiting)
    assert sim.scheduler.schedule() is None
    decoding = sim.add(prompt(5), max_tokens=9)
    sim.step()
    prefilling = sim.add(prompt(300, 1))
    sim.step()
    assert prefilling.num_computed_tokens == 64
    for request in (prefilling, decoding):
        sim.abort(request)
        sim.scheduler.check_integrity()
        sim.scheduler.finish(request)
        sim.scheduler.finish(request, publish=False)
        assert request.status is Status.FINISHED and request.blocks == []
    sim.check_idle()


def test_an_end_between_schedule_and_advance():
    sim = Sim(budget=64)
    decoding, stays = sim.add(prompt(63), max_tokens=9), sim.add(prompt(20, 2), max_tokens=9)
    sim.step(), sim.step()
    prefilling = sim.add(prompt(300, 1))
    step = sim.scheduler.schedule()
    assert decoding in step.decode and spans(step, prefilling) == [(0, 64)]
    tokens = sim.device.execute(step)
    sim.abort(decoding)
    sim.abort(prefilling)
    sim.settle(step, tokens)
    sim.scheduler.check_integrity()
    assert decoding.num_computed_tokens == prefilling.num_computed_tokens == 0
    sim.run()
    assert sim.finished == [stays]
    assert sim.serve(prompt(300, 1)).num_cached_tokens == 0


def test_a_failed_step_leaves_nothing_behind():
    sim = Sim(snapshots=2, host=2)
    for i in range(3):
        sim.serve(prompt(70, i))
    sim.add(prompt(70, 1), max_tokens=5)
    sim.add(prompt(200, 8), max_tokens=5)
    step = sim.scheduler.schedule()  # and it is never run
    for request in {*(c.request for c in step.prefill), *step.decode}:
        sim.scheduler.finish(request, publish=False)
        sim.leave(request)
    sim.scheduler.reset_prefix_cache()
    sim.check_idle()
    assert sim.blocks.num_cached == sim.snapshots.num_published == 0
    for start in (0, 1, 2, 8):
        assert sim.serve(prompt(200, start)).num_cached_tokens == 0


def test_the_books_stay_small():
    """No list of the scheduler's grows with the number of steps or of requests served."""
    sim = Sim(blocks=20, snapshots=6, host=4, budget=256, interval=64, vocabulary=50)
    scheduler, planner = sim.scheduler, sim.scheduler.cache.planner
    for number in itertools.count():
        if sim.steps >= 10_000:
            break
        while len(scheduler.waiting) < 3:
            length = 1 + 37 * number % 290
            sim.add([i * number % 3 for i in range(length)], max_tokens=1 + number % 90)
        sim.finished.clear()
        sim.step()
    sizes = [
        len(scheduler.waiting), len(scheduler.running), len(planner._in_flight),
        len(sim.blocks._block_of), len(sim.blocks._digest_of), len(sim.blocks._blank),
        len(sim.blocks._evictable), len(sim.snapshots._device), len(sim.snapshots._host),
        len(sim.snapshots._free), len(sim.snapshots._free_host), len(sim.slots._free),
    ]  # fmt: skip
    assert max(sizes) <= 20 and scheduler.stats.reused_tokens > 100_000
    sim.run()
    assert not planner._in_flight and planner._num_rolling == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.running[0].blocks.append(9), "block 9"),
        (lambda s: setattr(s.running[0], "state_slot", 5), r"slots \[1, 5\]"),
        (lambda s: s._running.reverse(), "not in order"),
        (lambda s: setattr(s.running[0], "status", Status.WAITING), r"request 0\.0: not running"),
        (lambda s: s.running[1].targets.clear(), r"request 1\.0 is announced"),
        (lambda s: setattr(s.running[0], "rolling_snapshot", 1), "snapshots: free"),
    ],
)
def test_the_check_names_what_is_wrong(spoil, message):
    sim = Sim(blocks=20, budget=64)
    sim.add(prompt(5), max_tokens=9)
    sim.step()
    sim.add(prompt(500, 1))
    sim.step()
    sim.scheduler.check_integrity()
    spoil(sim.scheduler)
    with pytest.raises(IntegrityError, match=message):
        sim.scheduler.check_integrity()


def test_equal_calls_give_equal_steps():
    def trace() -> list[object]:
        sim = Sim(blocks=12, seqs=4, budget=100, snapshots=4, host=2, vocabulary=9)
        for i in range(12):
            sim.add([j % (2 + i % 3) for j in range(40 * (i % 5) + 1)], max_tokens=70, n=1 + i % 2)
        seen = []
        while step := sim.step():
            rows = [(c.request.request_id, c.start, c.end) for c in step.prefill]
            names = [[r.request_id for r in part] for part in (step.decode, step.preempted)]
            seen.append((rows, names, step.before, step.after))
        return seen

    first = trace()
    assert first == trace() and len(first) > 100


def test_limits_and_pools_must_agree():
    with pytest.raises(AssertionError):
        SchedulerLimits(max_num_seqs=0, max_num_batched_tokens=1, max_model_len=1)
    with pytest.raises(AssertionError, match="blocks of 32, not 64"):
        Scheduler(SchedulerLimits(1, 1, 10), BlockManager(4, 32), StateSlots(2), None)


def test_no_snapshot_pool_is_no_cache():
    scheduler = Scheduler(SchedulerLimits(1, 500, 300), BlockManager(9, 64), StateSlots(2), None)
    for number in range(2):
        request = Request(str(number), list(range(200)), 200, SamplingParams(), 0)
        scheduler.add(request)
        step = scheduler.schedule()
        assert chunks(step) == [(request, 0, 200, True)] and not step.before and not step.after
        scheduler.advance(step)
        scheduler.finish(request)
        scheduler.check_integrity()
    assert scheduler.blocks.num_cached == 0 and scheduler.stats.queried_tokens == 0
