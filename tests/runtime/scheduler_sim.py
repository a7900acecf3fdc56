"""A device made of lists, which runs the scheduler's steps and knows what every place should hold.

The state behind a prefix, and the K/V at a position, is a number that depends on all tokens so far.
`Device.execute` refuses to read a place that holds anything but the right number, to write where
others read, and to exceed a limit; so a step that runs has given no request another's state.

    sim = Sim(blocks=20)
    request = sim.add(range(100), max_tokens=8)
    sim.run()  # checks the output against that of the request alone
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from minivllm.runtime.block_manager import BlockManager
from minivllm.runtime.prefix_cache import BLOCK_SIZE, SnapshotPool
from minivllm.runtime.request import CacheOptions, Request, Status
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.scheduler import Chunk, Scheduler, SchedulerLimits, Step
from minivllm.runtime.state_slots import StateSlots
from minivllm.runtime.step import Copy, StateCopy

MODULUS = 2**61 - 1
POISON = -1  # what no prefix's number is
START = 1
PLAIN = SamplingParams(max_tokens=None)
LOGPROBS = SamplingParams(max_tokens=None, prompt_logprobs=0)


def absorb(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 7) % MODULUS


def draw(state: int, seed: int, vocabulary: int) -> int:
    return (state ^ (seed * 0x9E3779B97F4A7C15)) % MODULUS % vocabulary


def alone(prompt: Sequence[int], seed: int, count: int, vocabulary: int) -> list[int]:
    """What a request generates when nothing else runs."""
    state, output = START, []
    for token in prompt:
        state = absorb(state, token)
    for _ in range(count):
        output.append(draw(state, seed, vocabulary))
        state = absorb(state, output[-1])
    return output


class Device:
    """The pools, and a step's execution in the order that `Step` tells."""

    def __init__(self, scheduler: Scheduler, vocabulary: int) -> None:
        self.scheduler = scheduler
        self.vocabulary = vocabulary
        pool = scheduler.cache.snapshots
        self.states = {
            "slot": [POISON] * scheduler.slots.num_slots,
            "snapshot": [POISON] * pool.num_snapshots,
            "host": [POISON] * pool.num_host,
        }
        self.kv = [[POISON] * BLOCK_SIZE for _ in range(scheduler.blocks.num_blocks)]
        self._prefixes: dict[Request, list[int]] = {}
        self._drawn: dict[Request, int] = {}  # the newest token of each

    def prefixes(self, request: Request) -> list[int]:
        """The number of each of the request's prefixes."""
        known = self._prefixes.setdefault(request, [])
        state = known[-1] if known else START
        tokens = request.token_ids[len(known) :]
        if request.in_flight and len(known) <= len(request.token_ids):
            tokens.append(self._drawn[request])  # which the host has not seen
        for token in tokens:
            state = absorb(state, token)
            known.append(state)
        return known

    def forget(self, request: Request) -> None:
        self._prefixes.pop(request, None)
        self._drawn.pop(request, None)

    def execute(self, step: Step) -> list[int]:
        """Run a step; the tokens of `step.sampled`."""
        self.check_shape(step)
        for copy in step.before:
            self.copy(copy)
        tokens = []
        for chunk in step.prefill:
            state = self.run(chunk.request, chunk.start, chunk.end, chunk.snapshots)
            if chunk.last:
                tokens += [draw(state, m.seed, self.vocabulary) for m in chunk.request.group()]
        for request in step.decode:
            end = request.num_tokens
            state = self.run(request, end - 1, end)
            tokens.append(draw(state, request.seed, self.vocabulary))
        for copy in step.after:
            self.copy(copy)
        assert len(tokens) == len(step.sampled)
        self._drawn |= zip(step.sampled, tokens, strict=True)
        return tokens

    def check_shape(self, step: Step) -> None:
        limits = self.scheduler.limits
        assert sum(c.end - c.start for c in step.prefill) <= limits.max_num_batched_tokens
        rows = [*(c.request for c in step.prefill), *step.decode]
        assert 0 < len(rows) == len(set(rows)) <= limits.max_num_seqs
        slots = [member.state_slot for r in rows for member in r.group()]
        assert 0 not in slots and len(slots) == len(set(slots))
        ended = [m for c in step.prefill if c.last for m in c.request.group()]
        assert step.sampled == (*ended, *step.decode)
        assert all(
            c.start < c.end and c.start == c.request.num_computed_tokens for c in step.prefill
        )

    def run(
        self, request: Request, start: int, end: int, snapshots: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Tokens [start, end) of one row: read what is before them, write what they add."""
        prefixes = self.prefixes(request)
        slots = self.states["slot"]
        if start:
            assert slots[request.state_slot] == prefixes[start - 1], "another prefix's state"
        assert len(request.blocks) * BLOCK_SIZE >= end
        for first in range(0, end, BLOCK_SIZE):
            block = request.blocks[first // BLOCK_SIZE]
            cells, known = self.kv[block], max(0, min(start - first, BLOCK_SIZE))
            assert cells[:known] == prefixes[first : first + known], "another prefix's K/V"
            stop = min(end - first, BLOCK_SIZE)
            if known < stop:
                assert self.scheduler.blocks._refs[block] == 1, "a write to a shared block"
                assert block not in self.scheduler.blocks._digest_of, "a write to a cached block"
                cells[known:stop] = prefixes[first + known : first + stop]
        slots[request.state_slot] = prefixes[end - 1]
        for at, index in snapshots:
            assert start < at <= end and (at - start) % BLOCK_SIZE == 0
            self.states["snapshot"][index] = prefixes[at - 1]
        return prefixes[end - 1]

    def copy(self, copy: Copy) -> None:
        if isinstance(copy, StateCopy):
            (pool, source), (to, target) = copy.source, copy.target
            assert self.states[pool][source] != POISON, f"{copy}: nothing is there"
            self.states[to][target] = self.states[pool][source]
        else:
            assert self.kv[copy.source][0] != POISON, f"{copy}: nothing is there"
            self.kv[copy.target] = list(self.kv[copy.source])

    def poison(self) -> None:
        """Overwrite all that is free and that nobody may read again."""
        blocks, slots = self.scheduler.blocks, self.scheduler.slots
        pool = self.scheduler.cache.snapshots
        for block in blocks._blank:
            self.kv[block] = [POISON] * BLOCK_SIZE
        for name, free in (("slot", slots._free), ("snapshot", pool._free)):
            for index in free:
                self.states[name][index] = POISON
        for index in pool._free_host:
            self.states["host"][index] = POISON


class Sim:
    """A scheduler, its device, and the loop that an engine runs."""

    def __init__(
        self,
        blocks: int = 64,
        seqs: int = 8,
        budget: int = 4096,
        snapshots: int = 16,
        host: int = 0,
        interval: int = 0,
        caching: bool = True,
        logits_rows: int = 256,
        slots: int | None = None,
        max_model_len: int | None = None,
        vocabulary: int = 50_000,
        ahead: bool = False,
        context: int | None = None,
        on_the_way: bool = False,
    ) -> None:
        """`blocks` and `slots` do not count the padding rows' own; `ahead`: a step is scheduled and
        launched before the tokens of the one before it are known; `on_the_way`: a prefill leaves
        snapshots within a chunk."""
        limits = SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len or blocks * BLOCK_SIZE + 1,
            snapshot_interval=interval,
            prefix_caching=caching,
            snapshots_on_the_way=on_the_way,
            max_logits_rows=logits_rows,
            max_context_tokens=context,
        )
        self.blocks = BlockManager(blocks + 1, BLOCK_SIZE)
        self.slots = StateSlots((slots or seqs) + 1)
        self.snapshots = SnapshotPool(snapshots, host)
        self.scheduler = Scheduler(limits, self.blocks, self.slots, self.snapshots)
        self.device = Device(self.scheduler, vocabulary)
        self.max_tokens: dict[Request, int] = {}
        self.finished: list[Request] = []
        self.steps = 0
        self._ahead = ahead
        self._launched: deque[tuple[Step, Sequence[int]]] = deque()
        self._ids = itertools.count()

    def add(
        self,
        tokens: Iterable[int],
        max_tokens: int = 1,
        n: int = 1,
        seed: int | None = None,
        params: SamplingParams = PLAIN,
        **cache: object,
    ) -> Request:
        """Queue a request (the head of its forks); `cache`: fields of `CacheOptions`."""
        prompt, number = list(tokens), next(self._ids)
        options = CacheOptions(**cache)
        members = [
            Request(
                request_id=f"{number}.{i}",
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                seed=1000 * number + i if seed is None else seed + i,
                cache=options,
                final_length=len(prompt) + max_tokens,
            )
            for i in range(n)
        ]
        head = members[0]
        head.forks = members[1:]
        self.max_tokens |= dict.fromkeys(members, max_tokens)
        self.scheduler.add(head)
        return head

    def step(self) -> Step | None:
        """One turn of the engine's loop; requests end at their last token."""
        step = self.scheduler.schedule()
        if step is not None:
            self.steps += 1
            tokens = self.device.execute(step)
            self.scheduler.advance(step)
            self._launched.append((step, tokens))
        self.take(keep=1 if step is not None and self._ahead else 0)
        return step

    def take(self, keep: int = 0) -> None:
        """Append the tokens of all launched steps but the last `keep`."""
        while len(self._launched) > keep:
            step, tokens = self._launched.popleft()
            for request, token in zip(step.sampled, tokens, strict=True):
                request.in_flight -= 1
                if request.status is not Status.FINISHED:
                    request.token_ids.append(token)
                    length = len(request.token_ids) - request.num_prompt_tokens
                    if length == self.max_tokens[request]:
                        self.end(request)

    def settle(self, step: Step, tokens: Sequence[int]) -> None:
        """What an engine does once a step ran."""
        self.scheduler.advance(step)
        self._launched.append((step, tokens))
        self.take(keep=1 if self._ahead else 0)

    def end(self, request: Request) -> None:
        """Finish a request whose output is whole, and compare it."""
        self.scheduler.finish(request)
        prompt, output = split(request)
        assert output == alone(
            prompt, request.seed, self.max_tokens[request], self.device.vocabulary
        )
        self.leave(request)
        self.finished.append(request)

    def leave(self, request: Request) -> None:
        del self.max_tokens[request]
        self.device.forget(request)

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.leave(request)

    def run(self, most: int = 10_000) -> None:
        """Steps to the end of all requests, which leaves everything free."""
        for _ in range(most):
            waiting, running = self.scheduler.waiting, self.scheduler.running
            if self.step() is None and not waiting and not running:
                break
        else:
            raise AssertionError(f"not idle after {most} steps")
        self.check_idle()

    def check_idle(self) -> None:
        assert not self.scheduler.waiting and not self.scheduler.running and not self.max_tokens
        self.scheduler.check_integrity()
        assert self.blocks.num_used == 0 and self.slots.num_used == 0
        pool = self.snapshots
        assert len(pool._free) + len(pool._device) == pool.num_snapshots

    def serve(self, tokens: Iterable[int], **fields: object) -> Request:
        """One request from its arrival to its end, with nothing else running."""
        request = self.add(tokens, **fields)
        self.run()
        return request


def split(request: Request) -> tuple[list[int], list[int]]:
    """Prompt and output."""
    ids, n = request.token_ids, request.num_prompt_tokens
    return ids[:n], ids[n:]


def chunks(step: Step) -> list[tuple[Request, int, int, bool]]:
    return [(c.request, c.start, c.end, c.last) for c in step.prefill]


def spans(step: Step, request: Request) -> list[tuple[int, int]]:
    """The part of a request's prompt that a step runs: one pair or none."""
    return [(c.start, c.end) for c in step.prefill if c.request is request]


__all__ = ["LOGPROBS", "PLAIN", "Chunk", "Device", "Sim", "alone", "chunks", "spans", "split"]
