"""Thousands of requests through pools far too small, with ends of every kind at every moment.

The device of `scheduler_sim` refuses any read of another prefix's state or K/V, and every output is
compared with that of the request alone; here the rest is counted: nothing lost, nothing twice,
nothing left.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_sim import LOGPROBS, PLAIN, Sim

from minivllm.runtime.request import Request, Status
from minivllm.runtime.step import BlockCopy

REQUESTS = 2_000  # of each storm
LENGTH = 500  # of the longest sequence: eight blocks

STORMS: dict[str, dict[str, int]] = {  # what each is short of, or how its steps are
    "blocks": {"blocks": 8, "seqs": 7, "budget": 200, "snapshots": 6, "host": 3},
    "states": {"blocks": 60, "seqs": 5, "slots": 4, "budget": 500, "snapshots": 3, "interval": 64},
    "narrow": {"blocks": 12, "seqs": 6, "budget": 65, "snapshots": 4, "host": 8, "interval": 128},
    "ahead": {"blocks": 9, "seqs": 7, "budget": 200, "snapshots": 6, "host": 3, "ahead": True},
    "wide": {"blocks": 32, "seqs": 20, "slots": 24, "budget": 4096, "snapshots": 9, "host": 2},
}


class Storm:
    """Random arrivals, failures and aborts around a `Sim`; every request's end is written down."""

    def __init__(self, seed: int, **fields: int) -> None:
        self.rng = random.Random(seed)
        # a small vocabulary, so that outputs of equal prompts meet again
        self.sim = Sim(**fields, logits_rows=50, max_model_len=LENGTH, vocabulary=40)
        self.roots = [[self.rng.randrange(40) for _ in range(400)] for _ in range(3)]
        self.arrived: list[Request] = []
        self.gone: list[Request] = []  # aborted or failed
        self.seen: Counter[str] = Counter()

    def prompt(self) -> list[int]:
        rng = self.rng
        if self.sim.finished and rng.random() < 0.2:  # a next turn
            ids = rng.choice(self.sim.finished[-20:]).token_ids
            return [*ids[:300], *(rng.randrange(40) for _ in range(rng.randrange(60)))]
        shared = rng.choice((0, 0, 64, 128, 130, 192, rng.randrange(300)))
        own = rng.choice((1, 5, 64, rng.randrange(1, 100)))
        return rng.choice(self.roots)[:shared] + [rng.randrange(40) for _ in range(own)]

    def arrive(self) -> None:
        rng, sim = self.rng, self.sim
        tokens, n = self.prompt(), rng.choice((1, 1, 1, 1, 2, 3))
        if not sim.scheduler.fits(len(tokens), n):
            tokens, n = tokens[:90], 1
        head = sim.add(
            tokens,
            max_tokens=min(rng.choice((1, 5, 40, rng.randrange(1, 200))), LENGTH - len(tokens)),
            n=n,
            params=LOGPROBS if rng.random() < 0.1 else PLAIN,
            enabled=rng.random() < 0.9,
            salt=rng.choice((None, None, None, "a")),
            snapshot_at=(100,) if rng.random() < 0.1 else (),
        )
        self.arrived += head.group()

    def somebody(self) -> Request | None:
        """Who is to end early: anyone at any stage, and often a prefill that forks wait for."""
        rng = self.rng
        heads = [r for r in self.sim.scheduler.running if r.forks]
        if heads and rng.random() < 0.1:
            return rng.choice(heads)
        there = [r for r in self.arrived[-60:] if r in self.sim.max_tokens]
        return rng.choice(there) if there and rng.random() < 0.025 else None

    def leave(self, request: Request) -> None:
        """Abort it, or let it fail."""
        stage = "fork" if request.head else request.status.value
        self.seen[f"left {stage}" + (" with forks" if request.forks else "")] += 1
        if self.rng.random() < 0.8 or request.status is not Status.RUNNING:
            self.sim.abort(request)
        else:
            self.sim.scheduler.finish(request, publish=False)
            self.sim.leave(request)
        self.gone.append(request)

    def step(self) -> bool:
        sim, rng = self.sim, self.rng
        step = sim.scheduler.schedule()
        if step is None:
            sim.take()
            return bool(sim.scheduler.waiting or sim.scheduler.running)
        sim.steps += 1
        waits = sim.scheduler.cache.still_waits
        self.seen["held back"] += sum(map(waits, sim.scheduler.waiting))
        self.seen["preempted"] += len(step.preempted)
        self.seen["copied blocks"] += sum(isinstance(copy, BlockCopy) for copy in step.after)
        tokens = sim.device.execute(step)
        if rng.random() < 0.01:  # while the step is under way; only aborts can come then
            request = rng.choice(step.sampled or (step.prefill[0].request,))
            self.seen["left in a step"] += 1
            sim.abort(request)
            self.gone.append(request)
        sim.settle(step, tokens)
        if sim.steps % 50 == 0:
            sim.scheduler.check_integrity()
        if sim.steps % 7 == 0:
            sim.device.poison()
        if rng.random() < 0.001:
            sim.scheduler.reset_prefix_cache()
        return True

    def run(self, count: int) -> None:
        while len(self.arrived) < count:
            for _ in range(self.rng.choice((2, 10, 40))):
                self.arrive()
            # most bursts meet the one before; some find the scheduler idle
            for _ in range(self.rng.choice((5, 40, 100_000))):
                if request := self.somebody():
                    self.leave(request)
                if not self.step():
                    self.sim.check_idle()
                    self.seen["idle"] += 1
                    break
        self.sim.run(100_000)
        ended = [*self.sim.finished, *self.gone]
        assert len(ended) == len(set(ended)) and set(ended) == set(self.arrived)
        assert all(r.status is Status.FINISHED for r in ended)


@pytest.mark.parametrize("on_the_way", [False, True])
@pytest.mark.parametrize("name", STORMS)
def test_a_storm_loses_nothing_and_leaves_nothing(name, on_the_way):
    storm = Storm(list(STORMS).index(name), **STORMS[name], on_the_way=on_the_way)
    storm.run(REQUESTS)
    sim, seen, stats = storm.sim, storm.seen, storm.sim.scheduler.stats
    assert len(sim.finished) > 0.6 * REQUESTS and len(storm.gone) > 50
    # it was a storm: each of these has happened often enough to go wrong
    for what in (
        "held back", "copied blocks", "idle", "left waiting", "left running", "left fork",
        "left waiting with forks", "left running with forks", "left in a step",
    ):  # fmt: skip
        assert seen[what] > 5, (what, seen)
    assert stats.reused_tokens > 10_000 and stats.snapshots_restored > 100
    assert stats.snapshots_dropped > 100 and stats.blocks_evicted > 400
    assert (stats.snapshots_spilled > 400) == bool(sim.snapshots.num_host)
    assert (seen["preempted"] > 50) == (name != "states")
    assert not sim.scheduler.cache.planner._in_flight
    assert sim.scheduler.cache.planner._num_rolling == 0


def actions() -> st.SearchStrategy[tuple[object, ...]]:
    arrive = st.tuples(
        st.just("arrive"),
        st.sampled_from((0, 63, 64, 65, 128, 150, 200)),  # shared tokens
        st.sampled_from((1, 2, 63, 64, 70)),  # own tokens
        st.integers(1, 80),  # output
        st.integers(1, 3),  # completions
        st.booleans(),  # of the second salt
        st.booleans(),  # with logprobs of the prompt
    )
    return st.one_of(
        arrive,
        st.tuples(st.just("steps"), st.integers(1, 70)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("abort in a step"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.integers(0, 30)),
        st.tuples(st.just("reset")),
    )


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(
    blocks=st.integers(4, 12),
    seqs=st.integers(1, 5),
    budget=st.sampled_from((1, 7, 63, 64, 65, 300)),
    snapshots=st.integers(0, 4),
    host=st.integers(0, 2),
    interval=st.sampled_from((0, 64, 128)),
    ahead=st.booleans(),
    on_the_way=st.booleans(),
    todo=st.lists(actions(), min_size=2, max_size=20),
)
def test_any_small_scenario(
    blocks, seqs, budget, snapshots, host, interval, ahead, on_the_way, todo
):
    sim = Sim(
        blocks, seqs, budget, snapshots, host, interval,
        max_model_len=250, vocabulary=3, ahead=ahead, on_the_way=on_the_way,
    )  # fmt: skip
    known: list[Request] = []
    for what, *rest in todo:
        if what == "arrive":
            shared, own, output, n, salted, logprobs = rest
            tokens = [1] * shared + [2 + len(known)] * own
            output = min(output, 250 - len(tokens), blocks * 64 + 1 - len(tokens))
            if sim.scheduler.fits(len(tokens), n) and output > 0:
                salt, params = "s" if salted else None, LOGPROBS if logprobs else PLAIN
                known += sim.add(tokens, output, n, salt=salt, params=params).group()
        elif what == "steps":
            for _ in range(rest[0]):
                sim.step()
        elif what == "reset":
            sim.scheduler.reset_prefix_cache()
        elif known and (request := known[rest[0] % len(known)]) in sim.max_tokens:
            if what == "abort":
                sim.abort(request)
            elif what == "fail":
                sim.scheduler.finish(request, publish=False)
                sim.leave(request)
            else:
                step = sim.scheduler.schedule()
                tokens = [] if step is None else sim.device.execute(step)
                sim.abort(request)
                if step is not None:
                    sim.settle(step, tokens)
        sim.scheduler.check_integrity()
        sim.device.poison()
    sim.run()
    assert all(request.status is Status.FINISHED for request in known)
