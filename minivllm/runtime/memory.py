"""How many KV blocks there are, and how long a sequence can therefore be.

Owns the budget. Does not own the pools themselves (`model_runner`).

    plan = plan_memory(options, bytes_per_block, block_size=256, model_len=2048, free_bytes=...)
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.config import RuntimeOptions
from minivllm.errors import UserError

CPU_KV_BYTES = 2**30  # where no size is given; host memory is shared with everything else


@dataclass(frozen=True)
class MemoryPlan:
    """The outcome.

    Attributes:
        num_blocks: KV blocks, block 0 (of padding rows) included.
        max_model_len: longest sequence in tokens, prompt and output.
        note: a line to print if the length was cut to fit, else None.
    """

    num_blocks: int
    max_model_len: int
    note: str | None = None


def plan_memory(
    options: RuntimeOptions,
    bytes_per_block: int,
    block_size: int,
    model_len: int,
    free_bytes: int | None,
) -> MemoryPlan:
    """Size the KV cache for one sequence of the greatest length.

    Args:
        options: `kv_cache_memory_bytes`, else the share `gpu_memory_utilization` of `free_bytes`.
        bytes_per_block: of all layers together; 0 for a model without attention.
        model_len: the checkpoint's `max_position_embeddings`.
        free_bytes: free memory of the GPU after loading; None on CPU.

    Raises:
        UserError: `max_model_len` is longer than the model allows or the memory holds, or not
            even one block fits.
    """
    wanted = options.max_model_len
    if wanted is not None and wanted > model_len:
        raise UserError(
            f"runtime.max_model_len={wanted}: the model was made for {model_len} positions at most"
        )
    budget = options.kv_cache_memory_bytes
    if budget is None:
        share = options.gpu_memory_utilization
        budget = CPU_KV_BYTES if free_bytes is None else int(free_bytes * share)
    if free_bytes is not None and budget > free_bytes:
        raise UserError(
            f"runtime.kv_cache_memory_bytes={budget:,}: the GPU has {free_bytes:,} bytes free"
        )
    length = wanted or model_len
    needed = -(-length // block_size)
    available = budget // bytes_per_block - 1 if bytes_per_block else needed
    if available < 1 or (wanted is not None and available < needed):
        raise UserError(
            f"{length} tokens of KV cache take {(needed + 1) * bytes_per_block:,} bytes and there "
            f"are {budget:,}: lower runtime.max_model_len (here at most "
            f"{max(available, 0) * block_size}), or raise runtime.kv_cache_memory_bytes or "
            f"runtime.gpu_memory_utilization"
        )
    if available >= needed:
        return MemoryPlan(needed + 1, length)
    length = available * block_size
    note = (
        f"max_model_len is {length} of the model's {model_len} tokens: that fills the KV cache's "
        f"{budget:,} bytes (runtime.kv_cache_memory_bytes)"
    )
    return MemoryPlan(available + 1, length, note)
