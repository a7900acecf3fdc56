"""What the memory is spent on: KV blocks, state slots and snapshots, within what is free.

Owns the budget and the table that shows it. Does not own the pools (`pools`), nor how much the
weights, the activations and the graphs take (the engine measures that).

    plan = plan_memory(options, needs, free_bytes=..., model_len=262144)
    print(memory_table(plan, needs, block_size=64))
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.config import RuntimeOptions
from minivllm.errors import UserError
from minivllm.runtime.model_runner import PoolSizes

CPU_BYTES = 2**31  # where no size is given; host memory is shared with everything else
SLOTS_SHARE = 0.5  # of the budget at most, before `max_num_seqs` is cut


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of single things, measured or known from shapes.

    Attributes:
        weights: all of them.
        activations: most that a step takes beyond weights and pools.
        graphs: estimate for the captured graphs.
        block: one KV block, all layers; 0 for a model without attention.
        slot: one sequence's state, all layers; a snapshot is as large.
    """

    weights: int
    activations: int
    graphs: int
    block: int
    slot: int


@dataclass(frozen=True)
class MemoryPlan:
    """The outcome.

    Attributes:
        sizes: entries of every pool.
        max_num_seqs: most sequences that run at once.
        max_model_len: longest sequence in tokens, prompt and output.
        notes: a line for everything that was cut to fit.
    """

    sizes: PoolSizes
    max_num_seqs: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def plan_memory(
    options: RuntimeOptions,
    needs: MemoryNeeds,
    *,
    free_bytes: int | None,
    model_len: int,
    block_size: int,
) -> MemoryPlan:
    """Divide the memory.

    Args:
        options: `gpu_memory_utilization`, sizes in bytes, `max_num_seqs`, `max_model_len`.
        needs: bytes of single things.
        free_bytes: free memory of the GPU with the weights loaded; None on a CPU.
        model_len: the checkpoint's `max_position_embeddings`.
        block_size: tokens in a KV block.

    Raises:
        UserError: `max_model_len` is longer than the model allows or the memory holds, or not
            even one short sequence fits; says what could be changed.
    """
    wanted = options.max_model_len
    if wanted is not None and wanted > model_len:
        raise UserError(
            f"runtime.max_model_len={wanted}: the model was made for {model_len} positions at most"
        )
    budget = _budget(options, needs, free_bytes)
    cache, given = options.prefix_cache, options.kv_cache_memory_bytes
    asked = given or 0
    if cache.enabled and needs.slot:
        asked += cache.memory_bytes or 0
    notes: list[str] = []

    # slots: as many as asked for, where sizes in bytes and half of the rest stay for other things
    max_num_seqs = options.max_num_seqs
    if needs.slot:
        share = SLOTS_SHARE if given is None and needs.block else 1.0
        affordable = int((budget - asked) * share) // needs.slot - 1  # one is the padding rows'
        if affordable < max_num_seqs:
            max_num_seqs = max(affordable, 1)
            notes.append(
                f"max_num_seqs is {max_num_seqs} of the {options.max_num_seqs} asked for: a "
                f"sequence's state takes {needs.slot:,} bytes and {budget:,} are there for states "
                "and KV cache (runtime.gpu_memory_utilization, runtime.max_num_seqs)"
            )
    rest = budget - (max_num_seqs + 1) * needs.slot

    length = wanted or model_len
    blocks_of_longest = -(-length // block_size)
    num_snapshots = 0
    if cache.enabled and needs.slot:
        if cache.memory_bytes is not None:
            num_snapshots = cache.memory_bytes // needs.slot
        else:
            # the KV cache of the longest sequence comes first, unless that is cut to fit anyway
            first = (blocks_of_longest + 1) * needs.block
            if first > rest and wanted is None:
                first = 2 * needs.block
            spare = rest - (first if given is None else given)
            num_snapshots = _snapshots(options, needs, rest, spare, block_size)
    rest -= num_snapshots * needs.slot

    kv_bytes = rest if given is None else given
    if kv_bytes > rest or rest < 0:
        raise _nothing_fits(
            options, needs, budget, free_bytes,
            f"{_count(max_num_seqs, 'sequence')}, {_count(num_snapshots, 'snapshot')} and "
            f"{max(kv_bytes, 0):,} bytes of KV cache",
        )  # fmt: skip
    # more than all sequences at their longest can use serves the cache only
    num_blocks = all_longest = max_num_seqs * blocks_of_longest + 1
    if needs.block:
        num_blocks = kv_bytes // needs.block
        if not cache.enabled:
            num_blocks = min(num_blocks, all_longest)
    if num_blocks - 1 < blocks_of_longest:
        fits = max(num_blocks - 1, 0) * block_size
        if wanted is not None or fits == 0:
            raise _nothing_fits(
                options, needs, budget, free_bytes,
                f"a KV cache for {wanted or block_size} tokens (there is room for {fits}) beside "
                f"{_count(max_num_seqs, 'sequence')} and {_count(num_snapshots, 'snapshot')}",
            )  # fmt: skip
        length = fits
        notes.append(
            f"max_model_len is {length} of the model's {model_len} tokens: that fills the KV "
            f"cache's {kv_bytes:,} bytes (runtime.kv_cache_memory_bytes)"
        )

    host = 0
    if cache.enabled and not needs.slot:
        num_snapshots = num_blocks - 1  # of no state at all: they cost nothing
    elif cache.enabled and num_snapshots:
        host = cache.host_memory_bytes // needs.slot
        if cache.host_memory_bytes and not host:
            notes.append(
                f"runtime.prefix_cache.host_memory_bytes={cache.host_memory_bytes:,} holds no "
                f"snapshot: one takes {needs.slot:,} bytes"
            )
    elif cache.enabled:
        notes.append(
            f"no prompt will find anything in the prefix cache: a snapshot takes {needs.slot:,} "
            "bytes of device memory and there is no room for one "
            "(runtime.prefix_cache.memory_bytes)"
        )
    sizes = PoolSizes(max_num_seqs + 1, num_blocks, num_snapshots, host)
    return MemoryPlan(sizes, max_num_seqs, length, tuple(notes))


def _snapshots(
    options: RuntimeOptions, needs: MemoryNeeds, rest: int, spare: int, block_size: int
) -> int:
    """How many snapshots, where nobody said: one for every `snapshot_interval` tokens of KV cache.

    With fewer, K/V of long prompts would lie there unused. At most half of the memory goes to
    them, and one is taken even where that is more than its share.

    Args:
        rest: bytes beside the slots.
        spare: of these, what the KV cache can do without.
    """
    kv = options.prefix_cache.snapshot_interval // block_size * needs.block
    most = rest // 2 if needs.block else rest
    wanted = max(rest * needs.slot // (needs.slot + kv), needs.slot)
    return max(min(wanted, most, spare) // needs.slot, 0)


def memory_table(plan: MemoryPlan, needs: MemoryNeeds, block_size: int) -> str:
    """The plan as a table: bytes of each part, and what it holds."""
    sizes = plan.sizes
    host = sizes.num_host_snapshots
    tokens = (sizes.num_blocks - 1) * block_size
    smallest = f"a prefix of {block_size} tokens can hit" if sizes.num_snapshots else "none"
    holds = f"{tokens:,} tokens" if needs.block else "no layer needs any"
    rows = [
        ("weights", needs.weights, ""),
        ("activations", needs.activations, "of the largest step"),
        ("graphs", needs.graphs, "estimate"),
        ("KV cache", sizes.num_blocks * needs.block, holds),
        ("state slots", sizes.num_slots * needs.slot, f"{plan.max_num_seqs} sequences"),
        ("snapshots", sizes.num_snapshots * needs.slot, f"{sizes.num_snapshots}; {smallest}"),
        *([("  on the host", host * needs.slot, f"{host}")] if host else []),
    ]
    return "\n".join(f"  {name:14} {size:>18,} B  {note}".rstrip() for name, size, note in rows)


def _budget(options: RuntimeOptions, needs: MemoryNeeds, free_bytes: int | None) -> int:
    """Bytes for all pools together."""
    cache = options.prefix_cache
    given = options.kv_cache_memory_bytes
    if free_bytes is None:
        if given is None:
            return max(CPU_BYTES, (cache.memory_bytes or 0) + CPU_BYTES // 2)
        return 2 * (given + (cache.memory_bytes or 0)) + CPU_BYTES
    if given is not None and given > free_bytes:
        raise UserError(
            f"runtime.kv_cache_memory_bytes={given:,}: the GPU has {free_bytes:,} bytes free"
        )
    return int(free_bytes * options.gpu_memory_utilization) - needs.activations - needs.graphs


def _nothing_fits(
    options: RuntimeOptions, needs: MemoryNeeds, budget: int, free_bytes: int | None, what: str
) -> UserError:
    share = f"runtime.gpu_memory_utilization (now {options.gpu_memory_utilization:g}) or "
    lines = [
        f"lower runtime.max_num_seqs (now {options.max_num_seqs}; each sequence's state takes "
        f"{needs.slot:,} bytes) or runtime.prefix_cache.memory_bytes",
        f"lower runtime.max_model_len (a block of KV cache takes {needs.block:,} bytes) or "
        "runtime.max_num_batched_tokens "
        f"(now {options.max_num_batched_tokens}; its step takes {needs.activations:,} bytes)",
        f"raise {'' if free_bytes is None else share}runtime.kv_cache_memory_bytes",
    ]
    return UserError(
        f"{what} do not fit into {max(budget, 0):,} bytes; one of:\n"
        + "\n".join(f"  - {line}" for line in lines)
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
