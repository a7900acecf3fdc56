"""The buckets of a captured prefill; `tests/test_captured_prefill.py` runs them on a GPU."""

from __future__ import annotations

import itertools

import torch

from minivllm.runtime.prefill_runner import prefill_buckets

CPU = torch.device("cpu")


def test_buckets_hold_what_can_run_at_once() -> None:
    """The padding sequence counts too; surplus tokens need it."""
    for most in (1, 2, 3, 8, 31, 256):
        seqs = max(bucket.seqs for bucket in prefill_buckets(8192, most))
        assert seqs > min(most, 31), most
    buckets = prefill_buckets(8192, 256)
    assert buckets == sorted(set(buckets)) and max(b.tokens for b in buckets) == 8192
    assert max(b.tokens for b in prefill_buckets(100, 256)) == 64
    lone = [b.tokens for b in buckets if b.seqs == 2]
    assert all(b <= max(a + 512, 64) for a, b in itertools.pairwise(lone))
