"""A step is launched before the tokens of the one before it are known."""

from __future__ import annotations

import pytest
from scheduler_sim import Sim, spans

from minivllm.runtime.digests import block_digests
from minivllm.runtime.request import Status


def prompt(length: int, shared: int = 0, other: int = 1) -> list[int]:
    """Tokens of which the first `shared` are the same for all."""
    return [*range(shared), *range(other * 10_000, other * 10_000 + length - shared)]


def boundaries(sim: Sim, tokens: list[int]) -> list[int]:
    """Token counts of the prefixes whose snapshots are kept."""
    chain = block_digests(tokens, len(tokens) // 64, None)
    return [64 * i for i, digest in enumerate(chain, 1) if sim.snapshots.find(digest)]


def test_a_row_runs_before_its_newest_token_is_known():
    sim = Sim(ahead=True)
    request = sim.add(prompt(10), max_tokens=5)
    assert spans(sim.step(), request) == [(0, 10)]
    for known in range(10, 14):
        assert (len(request.token_ids), request.in_flight) == (known, 1)
        assert request.num_tokens == known + 1 == request.num_computed_tokens + 1
        assert sim.step().decode == (request,)
    assert (len(request.token_ids), request.in_flight, request.complete) == (14, 1, True)
    assert sim.step() is None, "its last token is on its way, and no row is wasted on it"
    assert request.status is Status.FINISHED and len(request.token_ids) == 15
    sim.check_idle()


def test_a_prompt_as_large_as_the_pool_never_asks_for_more():
    for output in (1, 2, 65):
        sim = Sim(blocks=10, ahead=True)
        sim.add(prompt(10, other=2), max_tokens=20)
        sim.add(prompt(641 - output), max_tokens=output)
        sim.add(prompt(10, other=3), max_tokens=20)
        sim.run()
        assert len(sim.finished) == 3


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("output", [54, 55, 56, 118, 119, 120])
def test_a_boundary_that_the_last_token_reaches_is_kept(ahead, output):
    sim = Sim(ahead=ahead)
    request = sim.serve(prompt(10), max_tokens=output)
    computed = 10 + output - 1  # the newest token is never run
    assert boundaries(sim, request.token_ids) == [computed // 64 * 64][: computed // 64]
    assert sim.blocks.num_cached == computed // 64
    again = sim.serve([*request.token_ids, 1])
    assert again.num_cached_tokens == computed // 64 * 64


def test_a_block_is_published_once_its_tokens_are_known():
    sim = Sim(ahead=True, interval=64)
    request = sim.add(prompt(60), max_tokens=20)
    while request.num_computed_tokens < 64:
        sim.step()
    assert len(request.token_ids) == 64, "its 64th token came after that step's launch"
    assert sim.blocks.num_cached == 0 and boundaries(sim, request.token_ids) == []
    sim.step()
    assert sim.blocks.num_cached == 1 and boundaries(sim, request.token_ids[:64]) == [64]
    sim.run()


def doubled(ahead: bool) -> tuple[Sim, list]:
    """Two requests that each hold K/V of the same four blocks, of which the cache knows the first
    one's; a third left the state. So the second one needs four blocks less if it begins again."""
    sim = Sim(blocks=20, ahead=ahead)
    pair = [sim.add(prompt(340, 256, i), max_tokens=60) for i in (1, 2)]
    sim.step(), sim.step()
    third = sim.add(prompt(340, 256, 3))
    while third.status is not Status.FINISHED:
        sim.step()
    assert third.num_cached_tokens == 0 and boundaries(sim, prompt(256, 256)) == [256]
    assert set(pair[0].blocks).isdisjoint(pair[1].blocks)
    return sim, pair


def test_who_needs_less_the_second_time_comes_back_in_the_same_step():
    sim, (first, second) = doubled(ahead=False)
    held = sim.blocks.allocate(sim.blocks.num_free)
    while not second.num_preemptions:
        step = sim.step()
    assert step.preempted == (second,) and step.decode == (first,)
    # from the newest state of its decode, and with the first one's blocks
    assert spans(step, second) == [(384, 385)] and second.blocks[:4] == first.blocks[:4]
    sim.blocks.free(held)
    sim.run()


def test_who_is_preempted_waits_for_its_token_in_flight():
    sim, (first, second) = doubled(ahead=True)
    held = sim.blocks.allocate(sim.blocks.num_free)
    while not second.num_preemptions:
        step = sim.step()
    assert step.preempted == (second,) and not step.prefill
    assert len(second.token_ids) == 385, "the last of which that step did not know"
    step = sim.step()
    assert spans(step, second) == [(384, 385)] and step.decode == (first,)
    sim.blocks.free(held)
    sim.run()  # checks the outputs


def test_an_abort_with_a_token_in_flight():
    sim = Sim(ahead=True)
    requests = [sim.add(prompt(70, other=i), max_tokens=90) for i in range(3)]
    for _ in range(70):
        sim.step()
    sim.abort(requests[1])
    sim.scheduler.check_integrity()
    length = len(requests[1].token_ids)
    sim.run()
    assert sim.finished == [requests[0], requests[2]] and requests[1].in_flight == 0
    assert len(requests[1].token_ids) == length


@pytest.mark.parametrize("blocks", [12, 64])
def test_outputs_are_those_of_steps_one_by_one(blocks):
    runs = []
    for ahead in (False, True):
        sim = Sim(blocks=blocks, ahead=ahead, vocabulary=9, budget=100, interval=64)
        requests = [
            sim.add(prompt(40 * i + 1, 30 * i, i), max_tokens=99, n=1 + i % 2) for i in range(6)
        ]
        members = [member for request in requests for member in request.group()]
        sim.run()
        runs.append([member.token_ids for member in members])
    assert runs[0] == runs[1] and len(runs[0]) == 9
