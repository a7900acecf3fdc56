"""One step of the engine, as data: copies, parts of prompts, rows to decode.

Owns the plain records that the scheduler hands to the runner, and how one is put together. Does not
own how they are chosen (`scheduler`) or executed (`model_runner`). Imports no torch.

    step = scheduler.schedule()
    for copy in step.before: ...
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from minivllm.runtime.request import Request


@dataclass(frozen=True)
class StateCopy:
    """The whole state of one entry, all layers, copied to another entry.

    Attributes:
        source, target: pool and index; pools: "slot", "snapshot" and "host".
    """

    source: tuple[str, int]
    target: tuple[str, int]


@dataclass(frozen=True)
class BlockCopy:
    """The K/V of one block, all layers, copied to another block."""

    source: int
    target: int


Copy = StateCopy | BlockCopy


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt: tokens [start, end) of `request.token_ids`.

    Attributes:
        last: it ends the prefill, so its last row's logits are sampled from.
        snapshots: token counts in (start, end], and the snapshot entry that the prefill graph
            fills with the state there.
    """

    request: Request
    start: int
    end: int
    last: bool
    snapshots: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Step:
    """What runs in one step: `before`, the prefill graph, the decode graph, `after`; then sampling.

    Attributes:
        before: spills and restores; in this order, before the graphs.
        prefill: at most one chunk a request.
        decode: each runs its newest token.
        after: snapshots and forks; in this order, after the graphs.
        preempted: requests that lost their place; they wait again.
        sampled: whose next token is drawn: each last chunk's request and then its forks, in the
            order of `prefill`; then the decode rows.
    """

    before: tuple[Copy, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[Request, ...]
    after: tuple[Copy, ...]
    preempted: tuple[Request, ...]
    sampled: tuple[Request, ...]


@dataclass
class StepPlan:
    """A `Step` while it is put together.

    Attributes:
        budget: prefill tokens that it has left.
        context: tokens, history included, that the sequences of further chunks may have.
        logits_rows: rows of logits left for prompts whose log-probabilities are wanted.
    """

    budget: int
    context: int
    logits_rows: int
    before: list[Copy] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    after: list[Copy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def step(self) -> Step:
        ended = (chunk.request.group() for chunk in self.prefill if chunk.last)
        return Step(
            before=tuple(self.before),
            prefill=tuple(self.prefill),
            decode=tuple(self.decode),
            after=tuple(self.after),
            preempted=tuple(self.preempted),
            sampled=(*itertools.chain.from_iterable(ended), *self.decode),
        )
