"""A request as the scheduler sees it: its tokens, what the cache may do with it, and its progress.

Owns the fields and who writes them. Does not own what happens to a request (`scheduler`), what is
cached of it (`prefix_cache`) or its text (the engine). Imports no torch.

    request = Request("7", [1, 2, 3], num_prompt_tokens=3, params=SamplingParams(), seed=0)
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minivllm.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class CacheOptions:
    """What the prefix cache may do with one request.

    Attributes:
        enabled: False: it neither takes from the cache nor leaves anything there.
        salt: only requests of the same salt share; None is a salt of its own.
        snapshot_at: token counts where the caller wants the state kept; rounded down to blocks,
            and those beyond the prompt have no effect.
    """

    enabled: bool = True
    salt: str | None = None
    snapshot_at: tuple[int, ...] = ()


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def packed(token_ids: Sequence[int], start: int, end: int) -> memoryview:
    """The bytes of tokens [start, end), int64; an array must be one of 64-bit numbers."""
    part = token_ids[start:end]
    if not isinstance(part, array):
        part = array("q", part)
    assert part.itemsize == 8, part.typecode
    return memoryview(part).cast("B")  # of the copy: a shared array could not grow meanwhile


@dataclass(eq=False)
class Request:
    """One sequence: a prompt and the completion that grows behind it.

    The caller sets the first nine fields and appends every sampled token to `token_ids`; all
    else is written by the scheduler and the prefix cache.

    Attributes:
        request_id: for messages.
        token_ids: the prompt, then the output; only ever appended to.
        num_prompt_tokens: how many of them are the prompt.
        params: of sampling; the scheduler reads only `prompt_logprobs`.
        seed: of sampling.
        cache: what the prefix cache may do with it.
        final_length: most tokens it can have, prompt and output; None: the caller ends it in time.
        packed_ids: the first of its tokens as unsigned 64-bit numbers; see `pack`.
        forks: further completions of the same prompt, which begin when its prefill ends; each has
            its own list of the same tokens. Emptied when they begin.
        arrival: the order of requests; smaller is older.
        in_flight: tokens that a step has drawn and the host has not seen yet; the caller counts
            them down as it appends them.
        num_computed_tokens: tokens whose K/V is written and which the state in the slot has seen.
        state_slot: 0 while it holds none.
        blocks: its KV blocks in order. Of a fork that has not begun: its own last block, if the
            prompt's last block is partly filled.
        admissions: how often it was admitted.
        num_cached_tokens: taken from the cache at its first admission.
        num_preemptions: how often it lost its place.
        prefill_end: up to this many tokens run as prefill; set at each admission.
        head: the request whose prefill this fork waits for; None: it is on its own.
        heir: the fork that took over when this request left its group.
        block_digests: the digest chain of its full blocks, as far as it was needed.
        num_published_blocks: blocks already offered to the cache.
        publishes: whether it leaves blocks and snapshots in the cache.
        targets: token counts, ascending, where its prefill has yet to leave a snapshot.
        pending_snapshots: of these, the token counts whose snapshot the step under way leaves, and
            the entry that it fills.
        rolling_snapshot: the entry that holds its newest state of a block boundary in decode.
        rolling_blocks: at which boundary; 0: nothing is in it, or a copy into it is under way.
        waits_for: the digest whose snapshot another request is about to leave.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    cache: CacheOptions = field(default_factory=CacheOptions)
    forks: list[Request] = field(default_factory=list)
    final_length: int | None = None
    packed_ids: array[int] = field(default_factory=lambda: array("Q"))

    arrival: int = 0
    status: Status = Status.WAITING
    in_flight: int = 0
    num_computed_tokens: int = 0
    state_slot: int = 0
    blocks: list[int] = field(default_factory=list)
    admissions: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    prefill_end: int = 0
    head: Request | None = None
    heir: Request | None = None
    block_digests: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    publishes: bool = False
    targets: list[int] = field(default_factory=list)
    pending_snapshots: dict[int, int] = field(default_factory=dict)
    rolling_snapshot: int | None = None
    rolling_blocks: int = 0
    waits_for: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """Its length, tokens in flight included."""
        return len(self.token_ids) + self.in_flight

    @property
    def complete(self) -> bool:
        """Whether it is as long as it can be, and its last token is in flight."""
        return self.final_length is not None and self.num_tokens >= self.final_length

    @property
    def prefilling(self) -> bool:
        """Whether a running request has prefill left; a lone last token may be prefill too."""
        return self.num_computed_tokens < self.prefill_end

    def pack(self) -> array[int]:
        """`packed_ids`, brought up to all of `token_ids`: they are hashed and sent as such."""
        if len(self.packed_ids) < len(self.token_ids):
            self.packed_ids.fromlist(self.token_ids[len(self.packed_ids) :])
        return self.packed_ids

    def group(self) -> Iterator[Request]:
        """The request and its forks that have not begun."""
        yield self
        yield from self.forks
