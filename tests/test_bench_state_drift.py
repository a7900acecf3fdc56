"""The drift of bfloat16 states is measured on the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.state_drift import main


def test_it_measures_the_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "drift.json"
    options = ["--models", "tiny", "--device", "cpu", "--tokens", "64"]
    main([*options, "--git-sha", "abc", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["environment"]["git_sha"] == "abc"
    rows = {row["state"]: row for row in record["rows"]}
    assert list(rows) == ["float32", "bfloat16"]
    for row in rows.values():
        assert (row["model"], row["tokens"], row["rows"]) == ("tiny", 64, 2 * 64)
        # bfloat16 weights and activations; `test_tiny.py` holds them to transformers
        assert 1e-3 < row["rms"] < 2e-2 and 1e-3 < row["state_rms"] < 5e-2
        assert row["widest_tie"] <= 2
    assert rows["float32"]["state_rms"] != rows["bfloat16"]["state_rms"]
    assert capsys.readouterr().out.count("| tiny |") == 2


def test_what_it_cannot_measure() -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--tokens", "63"])
