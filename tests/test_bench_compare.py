"""Comparing two runs: what counts as a change, and what cannot be compared."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench import compile_vs_eager
from bench.compare import compare, verdict
from bench.samples import Samples, median_interval, percentile, spread_of
from minivllm.errors import UserError

RECORD: dict[str, Any] = {
    "environment": {"git_sha": "a", "versions": {"torch": "1"}, "python": "3"},
    "benchmark": "compile_vs_eager",
    "settings": {"model": "tiny", "device": "cpu", "workload": {"seed": 0, "rounds": 9}},
    "results": {"eager": {"decode_ms@1": 10.0, "peak_bytes": 100.0}},
    "spread": {"eager": {"decode_ms@1": 0.01, "peak_bytes": None}},
}


def changed(**parts: Any) -> dict[str, Any]:
    return copy.deepcopy(RECORD) | parts


@pytest.mark.parametrize(
    ("column", "after", "spreads", "word"),
    [
        ("decode_ms@1", 110, (0.01, 0.01), "slower"),  # 10 % of 1 % noise
        ("decode_ms@1", 90, (0.01, 0.01), "faster"),
        ("decode_ms@1", 110, (0.10, 0.02), "same"),  # 10 % of 10.2 %
        ("decode_ms@1", 101.9, (0.0, 0.0), "same"),  # 2 % of a time is nothing
        ("decode_ms@1", 102.1, (0.0, 0.0), "slower"),
        ("output_throughput@8", 90, (0.01, 0.01), "slower"),  # less of it is worse
        ("floor_share@8", 110, (0.01, 0.01), ""),  # follows from others
        ("mean_ttft_ms", 107, (None, None), "same"),  # taken once: 5 % each, 7.07 % together
        ("mean_ttft_ms", 108, (None, None), "slower"),
        ("decode_launches@1", 101, (0.0, 0.0), "more"),  # a count has no noise
        ("peak_bytes", 90, (None, None), "less"),
        ("logit_error", 101, (0.0, 0.0), "worse"),
        ("token_agreement", 101, (0.0, 0.0), "better"),
        ("duration", 120, (0.01, 0.01), "slower"),
    ],
)
def test_a_change_counts_beyond_the_noise(
    column: str, after: float, spreads: tuple[float | None, float | None], word: str
) -> None:
    assert verdict(column, 100.0, after, spreads)[2] == word


def test_the_noise_is_that_of_both_runs() -> None:
    change, noise, _ = verdict("prefill_ms", 200.0, 210.0, (0.03, 0.04))
    assert (change, noise) == (pytest.approx(0.05), pytest.approx(0.05))


def test_what_the_machine_did_to_others_is_noise() -> None:
    """hf runs no code of ours: a slowdown that it shares is the machine's."""
    results = RECORD["results"] | {"hf": {"decode_ms@1": 20.0}}
    spread = RECORD["spread"] | {"hf": {"decode_ms@1": 0.01}}
    before = changed(results=results, spread=spread)

    def words(eager: float, hf: float, **parts: Any) -> dict[str, str]:
        slower = {"eager": {"decode_ms@1": eager}, "hf": {"decode_ms@1": hf}}
        after = changed(results=slower, spread=spread, **parts)
        return {c.row: c.verdict for c in compare(before, after)}

    assert words(11.0, 22.0) == {"eager": "same", "hf": "slower"}
    assert words(11.0, 20.2) == {"eager": "slower", "hf": "same"}
    other = {"environment": RECORD["environment"] | {"versions": {"torch": "2"}}}
    assert words(11.0, 22.0, **other) == {"eager": "slower", "hf": "slower"}


def test_ratios_of_rows_that_took_turns_are_compared() -> None:
    pair = {"fast": "compiled", "slow": "eager", "column": "decode_ms@1", "rounds": 9}
    before = changed(pairs=[pair | {"speedup": 1.10, "low": 1.08, "high": 1.12}])
    for speedup, word in ((1.12, "same"), (1.20, "faster"), (1.0, "slower")):
        interval = {"low": speedup - 0.02, "high": speedup + 0.02}
        after = changed(pairs=[pair | {"speedup": speedup} | interval])
        found = {(c.row, c.column): c.verdict for c in compare(before, after)}
        assert found["compiled against eager", "decode_ms@1 speedup"] == word


def test_two_runs_of_one_thing_are_the_same_and_a_slower_one_is_not() -> None:
    """Drawn runs of 9 samples: noise alone is a change in under 3 % of pairs, 15 % always is."""
    drawn = random.Random(0)

    def run(mean: float) -> tuple[float, float | None]:
        samples = Samples()
        for _ in range(9):
            samples.add("row", "decode_ms", drawn.gauss(mean, 0.03 * mean))
        return samples.results["row"]["decode_ms"], samples.spread["row"]["decode_ms"]

    def words(mean: float) -> list[str]:
        pairs = [(run(1.0), run(mean)) for _ in range(500)]
        return [verdict("decode_ms", a, b, (sa, sb))[2] for (a, sa), (b, sb) in pairs]

    assert sum(word != "same" for word in words(1.0)) < 15
    assert sum(word == "slower" for word in words(1.15)) > 490


def test_every_number_that_both_have_is_compared() -> None:
    after = changed(results={"eager": {"decode_ms@1": 9.0}, "hf": {"decode_ms@1": 1.0}})
    (change,) = compare(RECORD, after)
    assert (change.row, change.column, change.before, change.after) == (
        "eager", "decode_ms@1", 10.0, 9.0)  # fmt: skip
    assert (change.change, change.verdict) == (pytest.approx(-0.1), "faster")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "other"}, "model: tiny and other"),
        ({"device": "H200"}, "device: cpu and H200"),
        ({"workload": {"seed": 1, "rounds": 9}}, "workload.seed: 0 and 1"),
        ({"extra": 1}, "extra: None and 1"),
    ],
)
def test_runs_of_different_things_are_refused(settings: dict[str, Any], said: str) -> None:
    other = changed(settings=RECORD["settings"] | settings)
    with pytest.raises(UserError, match="cannot be compared") as error:
        compare(RECORD, other)
    assert said in str(error.value)


def test_runs_without_a_common_row_are_refused() -> None:
    other = changed(results={"hf": {"decode_ms@1": 1.0}}, spread={"hf": {"decode_ms@1": 0.0}})
    with pytest.raises(UserError, match="share no row; they have eager and hf"):
        compare(RECORD, other)


def test_the_command_line_compares_two_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(RECORD))
    slower = {"eager": {"decode_ms@1": 12.0, "peak_bytes": 100.0}, "hf": {}}
    environment = RECORD["environment"] | {"git_sha": "b"}
    after.write_text(json.dumps(changed(results=slower, environment=environment)))
    assert compile_vs_eager.main(["--compare", str(before), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "git_sha: a before, b after"
    assert "| eager | decode_ms@1 | 10 | 12 | +20.0 % | 2.0 % | slower |" in lines
    assert "only after: hf" in lines
    told = json.loads(lines[-1])
    assert (told["same"], [c["verdict"] for c in told["changes"]]) == (1, ["slower"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "missing.json", "missing.json"], "missing.json: No such file"),
        (["--compare", "text", "text"], "text: no JSON"),
        (["--compare", "list", "list"], "list: no record of these benchmarks; it lacks environ"),
        (["--compare", "a.json"], "--compare takes two records and nothing else"),
        (["+model=tiny", "--compare", "a", "b"], "--compare takes two records and nothing else"),
    ],
)
def test_what_cannot_be_compared_is_said(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("so")
    Path("list").write_text("[1]")
    assert compile_vs_eager.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_spread_is_that_of_the_quartiles() -> None:
    assert spread_of([10.0]) is None
    assert spread_of([10.0, 12.0]) == pytest.approx(2 / 11)
    assert spread_of([100.0, 9.0, 10.0, 11.0, 10.0]) == pytest.approx(0.1)  # 100 does not count
    assert spread_of([0.0, 0.0]) is None


def test_the_interval_of_a_median() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # 9 samples: the second and the last but one hold the median in 96.1 % of cases
    assert median_interval([float(i) for i in range(9)]) == (1.0, 7.0)
    assert median_interval([float(i) for i in range(25)]) == (7.0, 17.0)
    assert median_interval([5.0]) == (5.0, 5.0)


def test_percentiles_lie_between_samples() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([float(i) for i in range(101)], 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
