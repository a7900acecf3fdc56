"""n > 1: one prefill, several completions; and who goes on when some of them end early."""

from __future__ import annotations

import pytest
from scheduler_sim import Sim, alone, spans, split

from minivllm.runtime.request import Request, Status
from minivllm.runtime.step import BlockCopy, StateCopy


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + length))


def members(head: Request) -> list[Request]:
    return list(head.group())


@pytest.mark.parametrize("length", [1, 63, 64, 100, 128, 200])
def test_forks_take_state_and_last_block_and_share_the_rest(length):
    sim = Sim(caching=False)
    group = members(sim.add(prompt(length), n=3, max_tokens=70))
    step = sim.step()
    copies = []
    for fork in group[1:]:
        copies.append(StateCopy(("slot", group[0].state_slot), ("slot", fork.state_slot)))
        if length % 64:
            copies.append(BlockCopy(group[0].blocks[-1], fork.blocks[-1]))
    assert list(step.after) == copies and step.sampled == tuple(group)
    full = length // 64
    assert all(fork.blocks[:full] == group[0].blocks[:full] for fork in group)
    assert sim.blocks.num_used == full + 3 * (length % 64 > 0)
    assert list(sim.scheduler.running) == group and group[0].forks == []
    assert sim.step().decode == tuple(group)
    sim.run()
    assert [split(m)[1] for m in group] == [
        alone(prompt(length), seed, 70, 50_000) for seed in (0, 1, 2)
    ]


def test_a_group_hits_and_publishes_like_one_request():
    sim = Sim()
    sim.serve(prompt(300))
    group = members(sim.add(prompt(300), n=3, max_tokens=100))
    assert spans(sim.step(), group[0]) == [(256, 300)]
    sim.run()
    assert [m.num_cached_tokens for m in group] == [256] * 3
    assert sim.scheduler.stats.queried_tokens == 600, "a group looks up once"
    for member in group:  # each has left the end of its own output
        assert sim.serve([*member.token_ids, 1]).num_cached_tokens == 384


def test_a_group_is_admitted_as_a_whole():
    for limits in ({"seqs": 4}, {"seqs": 9, "slots": 4}):
        sim = Sim(**limits)
        running = sim.add(prompt(5), max_tokens=4)
        sim.step()
        group = members(sim.add(prompt(5, 1), n=4, max_tokens=2))
        small = sim.add(prompt(5, 2))
        while running.status is not Status.FINISHED:
            assert not sim.step().prefill and not small.admissions
        assert len(sim.step().sampled) == 4 and not small.admissions
        assert all(m.admissions == 1 for m in group)
        sim.run()


@pytest.mark.parametrize(
    ("length", "n", "admitted"), [(256, 4, True), (255, 1, True), (255, 2, False)]
)
def test_a_group_needs_a_copy_of_a_partial_block_for_each_fork(length, n, admitted):
    sim = Sim(blocks=6)  # one runs, one is left over
    running = sim.add(prompt(1), max_tokens=3)
    sim.step()
    group = sim.add(prompt(length, 1), n=n)
    assert bool(spans(sim.step(), group)) == admitted
    sim.run()
    assert running.status is Status.FINISHED


def test_forks_that_have_not_begun_count_as_running():
    sim = Sim(seqs=4, slots=9, budget=100)
    group = sim.add(prompt(300), n=3)
    sim.step()
    others = [sim.add(prompt(3, i), max_tokens=9) for i in (1, 2)]
    sim.step()
    assert list(sim.scheduler.running) == [group, others[0]] and sim.slots.num_used == 4
    while group.status is not Status.FINISHED:
        assert not others[1].admissions
        sim.step()
    assert spans(sim.step(), others[1]) == [(0, 3)]
    sim.run()


def test_the_heir_goes_on_where_the_head_was():
    sim = Sim(budget=64)
    head, second, third = members(sim.add(prompt(300), n=3, max_tokens=5))
    sim.step(), sim.step()
    slot, blocks = head.state_slot, head.blocks
    sim.abort(head)
    sim.scheduler.check_integrity()
    assert head.status is Status.FINISHED and second.forks == [third] and third.head is second
    assert (second.state_slot, second.blocks, second.num_computed_tokens) == (slot, blocks, 128)
    assert sim.slots.num_used == 2 and sim.blocks.num_used == 5 + 1
    assert spans(sim.step(), second) == [(128, 192)]
    sim.abort(second)
    assert spans(sim.step(), third) == [(192, 256)]
    sim.run()
    assert sim.finished == [third] and third.admissions == 1
    assert sim.serve(prompt(300)).num_cached_tokens == 256


def test_the_heir_of_a_group_that_waits_keeps_its_place():
    sim = Sim(blocks=6)
    running = sim.add(prompt(200), max_tokens=3)
    sim.step()
    head, second, third = members(sim.add(prompt(200, 1), n=3, max_tokens=3))
    later = sim.add(prompt(1, 2))
    sim.abort(head)
    assert list(sim.scheduler.waiting) == [second, later] and second.forks == [third]
    sim.run()
    assert [r for r in sim.finished if r is not later] == [running, second, third]
    assert second.admissions == third.admissions == 1


@pytest.mark.parametrize("stage", ["waiting", "prefilling"])
def test_a_fork_may_end_before_it_begins(stage):
    sim = Sim(budget=64)
    head, second, third = members(sim.add(prompt(300), n=3, max_tokens=4))
    if stage == "prefilling":
        sim.step()
    sim.abort(second)
    sim.scheduler.check_integrity()
    assert head.forks == [third] and second.blocks == [] and second.state_slot == 0
    sim.run()
    assert sim.finished == [head, third] and second.token_ids == prompt(300)


@pytest.mark.parametrize("ending", [(0,), (1,), (0, 1), (1, 0), (0, 1, 2), (2, 1, 0)])
def test_ends_between_schedule_and_advance_of_the_last_chunk(ending):
    sim = Sim(budget=64)
    group = members(sim.add(prompt(100), n=3, max_tokens=70))
    sim.step()
    step = sim.scheduler.schedule()
    assert step.prefill[0].last and step.sampled == tuple(group)
    tokens = sim.device.execute(step)
    for index in ending:
        sim.abort(group[index])
    sim.settle(step, tokens)
    sim.scheduler.check_integrity()
    rest = [m for i, m in enumerate(group) if i not in ending]
    assert list(sim.scheduler.running) == rest
    sim.run()
    assert sim.finished == rest


def test_a_group_is_preempted_as_a_whole_and_forks_when_it_is_back():
    sim = Sim(blocks=12, budget=64)
    older = sim.add(prompt(62), max_tokens=5)
    sim.step()
    group = members(sim.add(prompt(300, 1), n=3, max_tokens=80))
    sim.step(), sim.step()
    held = sim.blocks.allocate(sim.blocks.num_free)
    step = sim.step()
    assert step.preempted == (group[0],) and step.decode == (older,)
    assert sim.slots.num_used == 1 and list(sim.scheduler.waiting) == [group[0]]
    assert all(m.blocks == [] and m.state_slot == 0 for m in group)
    sim.blocks.free(held)
    sim.scheduler.check_integrity()
    sim.run()
    assert sim.finished[0] is older and set(sim.finished[1:]) == set(group)


def test_a_preempted_fork_comes_back_on_its_own():
    sim = Sim(blocks=8)
    group = members(sim.add(prompt(100), n=4, max_tokens=150))
    while not any(m.num_preemptions for m in group):
        step = sim.step()
    assert step.preempted == (group[3],) and group[3].head is None
    assert len(step.decode) == 3
    sim.scheduler.check_integrity()
    sim.run()
    assert group[0].num_preemptions == 0 and group[3].admissions >= 2


def test_a_failed_head_takes_its_work_with_it():
    sim = Sim(budget=64)
    head, second, third = members(sim.add(prompt(300), n=3, max_tokens=4))
    sim.step(), sim.step()
    sim.scheduler.finish(head, publish=False)
    sim.leave(head)
    sim.scheduler.check_integrity()
    assert sim.blocks.num_used == sim.slots.num_used == sim.blocks.num_cached == 0
    assert list(sim.scheduler.waiting) == [second] and second.forks == [third]
    assert spans(sim.step(), second) == [(0, 64)]
    sim.run()
    assert sim.finished == [second, third]


def test_a_failed_fork_takes_the_prompt_back_for_good():
    sim = Sim()
    first, second = members(sim.add(prompt(300), n=2, max_tokens=150))
    sim.step(), sim.step()
    sim.scheduler.finish(first, publish=False)
    sim.leave(first)
    sim.scheduler.check_integrity()
    sim.run()
    # the other one leaves its own blocks, but those of the prompt are not offered again
    assert sim.blocks.num_cached > 0
    assert sim.serve([*second.token_ids, 1]).num_cached_tokens == 0


def test_a_failure_between_schedule_and_advance_restarts_the_rest():
    sim = Sim(budget=64)
    head, second = members(sim.add(prompt(100), n=2, max_tokens=4))
    sim.step()
    step = sim.scheduler.schedule()
    tokens = sim.device.execute(step)
    sim.scheduler.finish(head, publish=False)
    sim.leave(head)
    sim.scheduler.advance(step)
    assert second.status is Status.WAITING and second.num_computed_tokens == 0
    assert len(tokens) == 2  # the engine gives the second no token: it does not run
    sim.scheduler.check_integrity()
    sim.run()
    assert sim.finished == [second]


def test_reset_before_the_fork():
    sim = Sim(budget=64)
    group = members(sim.add(prompt(300), n=2, max_tokens=90))
    sim.step()
    sim.scheduler.reset_prefix_cache()
    sim.run()
    assert len(sim.finished) == 2 and not any(m.publishes for m in group)
    assert sim.blocks.num_cached == sim.snapshots.num_published == 0


def test_a_group_must_be_alike_and_new():
    sim = Sim()
    head = sim.serve(prompt(5))
    with pytest.raises(AssertionError, match=r"0\.0"):
        sim.scheduler.add(head)
    odd = Request("x", prompt(6), 6, head.params, 0)
    odd.forks = [Request("y", prompt(5), 5, head.params, 0)]
    with pytest.raises(AssertionError, match="y"):
        sim.scheduler.add(odd)
