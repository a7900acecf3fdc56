"""The scheduler: which requests run in the next step, which tokens of them, and what moves when.

Owns the queue, the running requests and the order of all decisions. Does not own what is cached
(`prefix_cache`), the books of blocks and slots (`group_memory`), sampling, or when a request is
done (the engine calls `finish`). No torch, no clock, no threads: equal calls give equal steps.

    scheduler.add(request)
    while (step := scheduler.schedule()) is not None:
        tokens = run(step)  # step.before, the graphs, sampling, step.after
        scheduler.advance(step)
        for request, token in zip(step.sampled, tokens):  # now, or after one more step's launch
            request.in_flight -= 1
            request.token_ids.append(token)  # and scheduler.finish(request), where that ended it

Why it never stops: blocks are taken from the youngest running request only, so the oldest always
goes on; and no waiting request is overtaken, save by those that run while it waits for a snapshot
that one of them is about to leave.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.runtime.block_manager import BlockManager, IntegrityError
from minivllm.runtime.digests import BLOCK_SIZE
from minivllm.runtime.group_memory import GroupMemory
from minivllm.runtime.prefix_cache import Hit, PrefixCache, PrefixCacheStats
from minivllm.runtime.request import Request, Status
from minivllm.runtime.snapshot_pool import SnapshotPool
from minivllm.runtime.state_slots import StateSlots
from minivllm.runtime.step import Chunk, Step, StepPlan

__all__ = ["Chunk", "Scheduler", "SchedulerLimits", "Step"]


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a step and of a sequence.

    Attributes:
        max_num_seqs: most running requests, forks that are to begin included.
        max_num_batched_tokens: most prefill tokens in a step; decode rows do not count.
        max_model_len: longest sequence, prompt and output.
        snapshot_interval: tokens between snapshots of a long sequence; 0: none.
        prefix_caching: whether anything is looked up or left behind at all.
        snapshots_on_the_way: the prefill graph leaves snapshots within a chunk (`Chunk.snapshots`).
        max_logits_rows: most tokens in a step of prompts whose log-probabilities are wanted.
        max_context_tokens: most tokens, history included, of all sequences that have a chunk in a
            step; a chunk alone may have more. None: any number.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    snapshot_interval: int = 0
    prefix_caching: bool = True
    snapshots_on_the_way: bool = False
    max_context_tokens: int | None = None
    max_logits_rows: int = 256

    def __post_init__(self) -> None:
        assert min(self.max_num_seqs, self.max_num_batched_tokens, self.max_logits_rows) >= 1, self


class Scheduler:
    """Requests wait in order of arrival, run, and end; the rules stand beside each method.

    Args:
        limits: of a step.
        blocks: of the KV cache; all of them free.
        slots: of the recurrent state; all of them free.
        snapshots: of the state; None: nothing is cached.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        slots: StateSlots,
        snapshots: SnapshotPool | None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.slots = slots
        self.cache = PrefixCache(
            blocks,
            snapshots if limits.prefix_caching else None,
            limits.snapshot_interval,
            limits.snapshots_on_the_way,
        )
        self._memory = GroupMemory(blocks, slots)
        self._watermark = max(1, blocks.num_blocks // 100)
        self._waiting: list[Request] = []  # both oldest first
        self._running: list[Request] = []
        self._arrivals = itertools.count()

    @property
    def waiting(self) -> Sequence[Request]:
        """Oldest first; forks that have not begun are found at their head. Not to be changed."""
        return self._waiting

    @property
    def running(self) -> Sequence[Request]:
        """Oldest first, prefilling or decoding. Not to be changed."""
        return self._running

    @property
    def stats(self) -> PrefixCacheStats:
        return self.cache.stats

    def fits(self, num_prompt_tokens: int, n: int = 1) -> bool:
        """Whether a prompt with `n` completions can be admitted when nothing else runs."""
        return (
            0 < num_prompt_tokens < self.limits.max_model_len
            and n <= min(self.limits.max_num_seqs, self.slots.num_slots - 1)
            and self._memory.num_blocks(num_prompt_tokens, n) < self.blocks.num_blocks
        )

    def add(self, request: Request) -> None:
        """Queue a request and its forks; the caller has checked that it `fits`."""
        assert self.fits(len(request.token_ids), 1 + len(request.forks)), request.request_id
        for member in request.group():
            assert member.status is Status.WAITING and not member.admissions, member.request_id
            member.arrival = next(self._arrivals)
        for fork in request.forks:
            assert fork.token_ids == request.token_ids and not fork.forks, fork.request_id
            fork.head = request
        self._waiting.append(request)

    def schedule(self) -> Step | None:
        """The next step; None: nothing waits and nothing runs, or all hangs on tokens in flight."""
        if not self._waiting and not self._running:
            return None
        limits = self.limits
        context = limits.max_context_tokens or sys.maxsize
        plan = StepPlan(limits.max_num_batched_tokens, context, limits.max_logits_rows)
        self._plan_decode(plan)
        for request in self._running:
            if request.prefilling and self._fits_step(request, request.num_computed_tokens, plan):
                self._plan_chunk(request, plan)
        self._admit(plan)
        if not plan.prefill and not plan.decode:
            flying = any(r.in_flight for r in (*self._running, *self._waiting))
            assert flying, "requests wait, nothing runs, and none of them fits"
            return None
        return plan.step()

    def _plan_decode(self, plan: StepPlan) -> None:
        """Every request past its prefill, oldest first, as long as the younger can make room."""
        for request in tuple(self._running):
            waits = request.prefilling or request.complete
            if request.status is Status.RUNNING and not waits:
                computed = request.num_computed_tokens
                assert request.num_tokens == computed + 1, (
                    f"request {request.request_id}: no token was appended since its last step"
                )
                if len(request.blocks) * BLOCK_SIZE > computed or self._grow(request, plan):
                    plan.decode.append(request)
        for request in plan.decode:
            if (request.num_computed_tokens + 1) % BLOCK_SIZE == 0:
                self.cache.plan_decode(request, plan.before, plan.after)

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        """One more block, taken from the youngest if need be; False: that was this request."""
        while not self.blocks.num_free:
            victim = self._running[-1]
            assert victim is not self._running[0], "a request outgrew the whole KV cache"
            self._release(victim)
            victim.num_preemptions += 1
            insort(self._waiting, victim, key=_age)
            plan.preempted.append(victim)
            if victim is request:
                return False
        request.blocks += self.blocks.allocate(1)
        return True

    def _admit(self, plan: StepPlan) -> None:
        """Waiting requests in order of arrival, up to the first one that does not fit."""
        held_back = []
        examined = 0
        for request in self._waiting:
            if not plan.budget or not self.slots.num_free or request.in_flight:
                break  # a token in flight: it lost its place just now, and is not known in full
            if self.cache.still_waits(request):
                held_back.append(request)
            else:
                hit = self.cache.lookup(request)
                if self.cache.must_wait(request, hit):
                    held_back.append(request)
                elif self._has_room(request, hit, plan):
                    self._start(request, hit, plan)
                else:
                    break
            examined += 1
        self._waiting[:examined] = held_back

    def _fits_step(self, request: Request, computed: int, plan: StepPlan) -> bool:
        """Whether a chunk of it may run in this step beside those that do already."""
        if request.params.prompt_logprobs is not None and not plan.logits_rows:
            return False
        end = min(len(request.token_ids), computed + plan.budget)
        return plan.budget > 0 and (not plan.prefill or end <= plan.context)

    def _has_room(self, request: Request, hit: Hit, plan: StepPlan) -> bool:
        """The watermark spares the running a preemption; a request alone may fill everything."""
        spare = self._watermark if self._running else 0
        members = self.slots.num_used + 1 + len(request.forks)
        return (
            members <= self.limits.max_num_seqs
            and self._fits_step(request, hit.num_tokens, plan)
            and self._memory.has_room(request, hit.blocks, spare)
        )

    def _start(self, request: Request, hit: Hit, plan: StepPlan) -> None:
        """Give a group its memory and run its first chunk."""
        self._memory.give(request, hit.blocks)
        request.prefill_end = len(request.token_ids)
        for member in request.group():
            member.status = Status.RUNNING
            member.admissions += 1
        insort(self._running, request, key=_age)
        self.cache.start(request, hit, plan.before)
        self._plan_chunk(request, plan)

    def _plan_chunk(self, request: Request, plan: StepPlan) -> None:
        """A prefilling request's next tokens, and behind its last ones the forks' copies."""
        start, end = request.num_computed_tokens, self._chunk_end(request, plan)
        last = end == request.prefill_end
        plan.budget -= end - start
        plan.context -= end
        if request.params.prompt_logprobs is not None:
            plan.logits_rows -= end - start
        snapshots = self.cache.plan_chunk(request, end, plan.before, plan.after)
        plan.prefill.append(Chunk(request, start, end, last, snapshots))
        if last:
            plan.after += self._memory.plan_forks(request)

    def _chunk_end(self, request: Request, plan: StepPlan) -> int:
        """A chunk ends where it must for a snapshot, at the prefill's end, or else with a block."""
        budget = plan.budget
        if request.params.prompt_logprobs is not None:
            budget = min(budget, plan.logits_rows)
        start = request.num_computed_tokens
        stop = self.cache.next_stop(request) or request.prefill_end
        if stop <= start + budget:
            return stop
        aligned = (start + budget) // BLOCK_SIZE * BLOCK_SIZE
        return aligned if aligned > start else start + budget

    def advance(self, step: Step) -> None:
        """The step was launched: count its tokens, publish what it fills, let forks begin.

        What later steps read is in place by then: the device runs steps in the order of launches.
        Each drawn token is in flight from here on, until the caller appends it.

        Requests that ended since `schedule` are passed over; of a group whose first member did,
        the heir goes on.
        """
        for chunk in step.prefill:
            request = chunk.request
            while request.heir is not None:
                request = request.heir
            if request.status is Status.RUNNING:
                request.num_computed_tokens = chunk.end
                self.cache.advance(request)
                if chunk.last:
                    request.in_flight += 1
                    self._begin_forks(request)
        for request in step.decode:
            if request.status is Status.RUNNING:
                request.num_computed_tokens += 1
                request.in_flight += 1
                self.cache.advance(request)

    def _begin_forks(self, request: Request) -> None:
        """From here on every fork is a request of its own."""
        for fork in request.forks:
            self._memory.share_prompt(request, fork)
            fork.num_computed_tokens = fork.prefill_end = request.num_computed_tokens
            fork.in_flight = 1
            fork.num_cached_tokens = request.num_cached_tokens
            fork.block_digests = request.block_digests.copy()
            fork.num_published_blocks = request.num_published_blocks
            fork.publishes = request.publishes
            fork.head = None
            insort(self._running, fork, key=_age)
        request.forks = []

    def finish(self, request: Request, *, publish: bool = True) -> None:
        """End a request at any stage and free all it holds; one that has ended is left alone.

        Of a group that has not forked only this member ends; the next one goes on in its place.

        Args:
            publish: False: it failed. Nothing of its tokens stays in the cache, whoever left it,
                and the rest of its group begins again. For a step that did not run to its end,
                finish all its requests so and call `reset_prefix_cache`: spills may be missing.
        """
        if request.status is Status.FINISHED:
            return
        if request.head is not None:
            request.head.forks.remove(request)
            self._memory.take_back(request)
        elif request.status is Status.WAITING:
            self._remove(self._waiting, request)
            self._promote(request, self._waiting)
        elif publish and request.forks:
            self._remove(self._running, request)
            self._promote(request, self._running)
        else:
            if not publish:
                self.cache.distrust(request)
            self._release(request)
            self._promote(request, self._waiting)
        request.status = Status.FINISHED

    def _promote(self, request: Request, queue: list[Request]) -> None:
        """The first fork of a request that leaves becomes the head, in its place and progress.

        Nobody arrived between the two, so its place in the order is the same.
        """
        if not request.forks:
            return
        heir, *forks = request.forks
        request.forks, request.heir = [], heir
        heir.head, heir.forks = None, forks
        for fork in forks:
            fork.head = heir
        if queue is self._running:
            self._memory.hand_over(request, heir)
            heir.num_computed_tokens = request.num_computed_tokens
            heir.prefill_end = request.prefill_end
        heir.num_cached_tokens = request.num_cached_tokens
        self.cache.hand_over(request, heir)
        insort(queue, heir, key=_age)

    def _release(self, request: Request) -> None:
        """Take a group out of the running ones; what it has published stays."""
        self._remove(self._running, request)
        self.cache.drop(request)
        for member in request.group():
            self._memory.take_back(member)
            member.status = Status.WAITING
            member.num_computed_tokens = member.prefill_end = 0

    def _remove(self, queue: list[Request], request: Request) -> None:
        index = bisect_left(queue, request.arrival, key=_age)
        assert queue[index] is request, f"request {request.request_id} is not where it should be"
        del queue[index]

    def reset_prefix_cache(self) -> None:
        """Nothing cached is found any more, and what runs now leaves nothing behind."""
        self.cache.reset(self._running)

    def check_integrity(self) -> None:
        """Raise unless every block, slot and snapshot is free, cached or owned by one who runs.

        Raises:
            IntegrityError: naming the first thing that is wrong.
        """
        members = [member for request in self._running for member in request.group()]
        self.blocks.check_integrity(member.blocks for member in members)
        self.slots.check_integrity(member.state_slot for member in members)
        self.cache.planner.check_integrity(self._running)
        if len(members) > self.limits.max_num_seqs:
            raise IntegrityError(f"{len(members)} requests run")
        for queue, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            for request in queue:
                if any(member.status is not status for member in request.group()):
                    raise IntegrityError(f"request {request.request_id}: not {status.value}")
            ages = [request.arrival for request in queue]
            if any(a >= b for a, b in itertools.pairwise(ages)):
                raise IntegrityError(f"{status.value} requests are not in order: {ages}")


def _age(request: Request) -> int:
    return request.arrival
