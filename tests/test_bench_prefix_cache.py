"""The prefix cache's benchmark runs, and its numbers say what they should, on the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.prefix_cache import main


def test_it_measures_the_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "numbers.json"
    sizes = ["--prefix=192", "--suffix=64", "--output=2", "--turns=3", "--requests=3"]
    main(["--model", "tiny", "--device", "cpu", "--git-sha", "abc", "--out", str(out), *sizes])
    record = json.loads(out.read_text())
    assert record["environment"]["git_sha"] == "abc"
    cached = {
        name: [r["cached"] for r in record[name]["requests"]]
        for name in ("cold", "warm", "chat", "shared")
    }
    assert cached == {
        "cold": [0, 0, 0],
        "warm": [192] * 3,  # of 256: one token is left, so a block is
        "chat": [0, 256, 320],  # after 256, 322 and 388 tokens
        "shared": [0, 192, 192],
    }
    for name in ("cold", "chat"):
        assert [r["cached"] for r in record[name]["uncached"]] == [0, 0, 0]
        lengths = [r["prompt"] for r in record[name]["requests"]]
        assert lengths == [r["prompt"] for r in record[name]["uncached"]]
        assert all(r["ttft_ms"] > 0 for r in record[name]["requests"])
    assert record["cold"]["hit_rate"] == 0
    assert record["warm"]["hit_rate"] == 3 * 192 / (4 * 256)
    shared = record["shared"]
    assert shared["at_once"]["computed_tokens"] == 3 * 64
    assert shared["at_once_uncached"]["computed_tokens"] == 3 * 256
    held = record["chat"]["bytes"]
    assert held["kv_bytes"] == held["cached_tokens"] // 64 * record["block_bytes"]
    assert held["cached_tokens"] >= 320 and held["snapshots"] >= 3
    assert held["kv_bytes_per_token"] == record["block_bytes"] / 64
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:2] == ["n", "prompt"]
    assert [line.split(",")[0] for line in printed if line.startswith("shared,")] == ["shared"] * 3
    assert sum("hit rate" in line for line in printed) == 4
