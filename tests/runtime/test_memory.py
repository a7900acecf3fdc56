"""The KV cache's size: what is asked, what fits, and what is said when it does not."""

from __future__ import annotations

import pytest

from minivllm.config import RuntimeOptions
from minivllm.errors import UserError
from minivllm.runtime.memory import CPU_KV_BYTES, MemoryPlan, plan_memory


def plan(
    free: int | None = None, bytes_per_block: int = 1000, **options: int | float
) -> MemoryPlan:
    return plan_memory(
        RuntimeOptions(**options), bytes_per_block, block_size=16, model_len=100, free_bytes=free
    )


def test_one_sequence_and_the_block_of_padding_rows() -> None:
    assert plan() == MemoryPlan(7 + 1, 100)
    assert plan(max_model_len=96) == MemoryPlan(6 + 1, 96)
    assert plan(max_model_len=1) == MemoryPlan(1 + 1, 1)
    assert plan(bytes_per_block=0) == MemoryPlan(7 + 1, 100)


def test_the_share_of_the_free_memory() -> None:
    assert plan(free=16_000, gpu_memory_utilization=0.5) == MemoryPlan(7 + 1, 100)
    cut = plan(free=10_000, gpu_memory_utilization=0.5)
    assert (cut.num_blocks, cut.max_model_len) == (5, 64)
    assert cut.note is not None and "64 of the model's 100 tokens" in cut.note
    assert "5,000 bytes" in cut.note


def test_bytes_win_over_the_share() -> None:
    cut = plan(free=10**9, kv_cache_memory_bytes=3000)
    assert (cut.num_blocks, cut.max_model_len) == (3, 32)
    with pytest.raises(UserError, match="kv_cache_memory_bytes=3,000: the GPU has 2,000 bytes"):
        plan(free=2000, kv_cache_memory_bytes=3000)


def test_the_default_on_a_cpu() -> None:
    cut = plan(bytes_per_block=CPU_KV_BYTES // 4)
    assert cut.num_blocks == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 101}, r"max_model_len=101: the model was made for 100 positions"),
        (
            {"max_model_len": 50, "kv_cache_memory_bytes": 3000},
            r"50 tokens .* take 5,000 bytes and there are 3,000: lower runtime.max_model_len "
            r"\(here at most 32\), or raise runtime.kv_cache_memory_bytes",
        ),
        ({"kv_cache_memory_bytes": 1999}, r"at most 0"),
    ],
)
def test_what_does_not_fit(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**options)
