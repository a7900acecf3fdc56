"""The compiler's benchmark on the shipped model: every number is there and means what it should."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compile_vs_eager, plot, versus
from bench.compile_vs_eager import main
from bench.contenders import Lengths, build
from bench.model import Model
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.presets import model_preset

ON = ["+model=tiny", "runtime.device=cpu"]
SHORT = ["bench.prefill=70", "bench.context=20", "bench.steps=3", "bench.checked=5",
         "bench.batches=[1,3]", "bench.rounds=3", "bench.git_sha=abc"]  # fmt: skip
QUICK = [*ON, *SHORT, "bench.ablation=false"]


@pytest.fixture(scope="module")
def model() -> Model:
    threads = torch.get_num_threads()
    config = EngineConfig(model_preset("tiny"), runtime=RuntimeOptions(device="cpu"))
    loaded = Model.load(config)
    torch.set_num_threads(threads)
    return loaded


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one run of four rows and two ablations, with what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    patch, printed = pytest.MonkeyPatch(), []
    with patch.context() as p:
        p.setattr(versus, "optional_passes", lambda: ["fuse_norms", "inplace_state"])
        p.setattr("builtins.print", lambda *a, **k: printed.append(" ".join(map(str, a))))
        rows = "bench.rows=[hf,reference,eager,compiled,compiled_no_graphs]"
        out = folder / "new" / "run.json"
        code = main([*ON, *SHORT, rows, "bench.starts=[]", f"bench.out={out}"])
    assert code == 0, printed
    return json.loads(out.read_text()) | {"printed": printed, "out": out}


def test_rows_and_columns(record: dict[str, Any]) -> None:
    results = record["results"]
    without = ["without fuse_norms", "without inplace_state"]
    assert sorted(results) == sorted(["hf", "reference", "eager", "compiled", *without])
    assert record["notes"] == {
        "compiled_no_graphs": "needs CUDA; on a CPU it is the row without that ending"
    }
    every = {"prefill_ms", "decode_ms@1", "output_throughput@1", "gb_per_second@1",
             "floor_share@1", "build_s", "peak_bytes", "logit_error",
             "token_agreement"}  # fmt: skip
    for row in ("hf", "reference", "eager", "compiled"):
        assert every <= set(results[row])
        assert ("decode_ms@3" in results[row]) == (row != "reference")  # of one sequence alone
        assert all(v is None or v >= 0 for v in results[row].values())
    assert record["settings"]["batches"] == [1, 3]


def test_derived_columns_follow_from_the_times(record: dict[str, Any], model: Model) -> None:
    row = record["results"]["compiled"]
    assert row["output_throughput@3"] == pytest.approx(3000 / row["decode_ms@3"])
    share = row["gb_per_second@1"] * 1e9 / record["bandwidth"]["1"]
    assert row["floor_share@1"] == pytest.approx(share)
    least = row["gb_per_second@1"] * 1e9 * row["decode_ms@1"] / 1e3
    weights = sum(w.nbytes for n, w in model.weights.items() if "inv_freq" not in n)
    slot = 6 * (6 * 64 * 64 + (2 * 3 * 64 + 6 * 64) * 4) * 4  # recurrent and conv state, float32
    kv = 2 * 2 * 2 * 64 * 4 * (20 + 5 // 2)  # layers, K and V, heads, dim, bytes, tokens
    assert least == pytest.approx(weights + 2 * slot + kv, rel=1e-3)


def test_every_row_computes_the_model(record: dict[str, Any]) -> None:
    for row in ("hf", "reference", "eager", "compiled"):
        assert record["results"][row]["logit_error"] < 1e-4
        assert record["results"][row]["token_agreement"] == 1.0


def test_the_passes_save_launches(record: dict[str, Any]) -> None:
    launches = {r: c.get("decode_launches@1") for r, c in record["results"].items()}
    assert launches["compiled"] * 3 < launches["eager"]
    assert launches["without fuse_norms"] > launches["compiled"]
    assert launches["without inplace_state"] > launches["compiled"]
    assert launches["hf"] is None


def test_pairs_are_medians_of_rounds(record: dict[str, Any]) -> None:
    kinds = {(p["fast"], p["slow"]) for p in record["pairs"]}
    assert kinds == {("compiled", "eager"), ("compiled", "hf"), ("eager", "hf")}
    for pair in [*record["pairs"], *(e["decode_ms@1"] for e in record["ablation"])]:
        assert pair["low"] <= pair["speedup"] <= pair["high"]
        assert pair["rounds"] == 3
    found = versus.ratio("a", [1.0, 2.0, 1.0], "b", [2.0, 2.0, 3.0])
    assert (found["speedup"], found["low"], found["high"]) == (2.0, 1.0, 3.0)


def test_the_record_says_what_ran(record: dict[str, Any]) -> None:
    assert record["environment"]["git_sha"] == "abc"
    assert "bench.prefill=70" in record["environment"]["command"]
    workload = record["settings"]["workload"]
    assert workload["prefill"] == 70 and "out" not in workload and "rows" not in workload
    assert record["out"].with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    last = json.loads(record["printed"][-1])
    assert last["results"] == record["results"]
    assert any("no prefix cache" in line for line in record["printed"])


def test_decode_goes_on_from_the_prompt(model: Model) -> None:
    """Timed decode steps run the tokens that a generation would: prompt, then its own greedy."""
    lengths = Lengths(prefill=70, context=20, steps=3, batches=(1, 3))
    row = build("compiled", model, lengths)
    prompts = [[7 * i + j for j in range(20)] for i in range(3)]
    row.start(prompts)
    row.decode(3, 3)
    held = row.runner.decoder.tokens[1:4].tolist()  # type: ignore[attr-defined]
    for prompt, last in zip(prompts, held, strict=True):
        sequence = list(prompt)
        for _ in range(4):
            sequence.append(int(model.oracle(sequence, [])[-1].argmax()))
        assert last == sequence[-1]


def test_lengths_hold_whole_blocks() -> None:
    lengths = Lengths(prefill=BLOCK_SIZE, context=BLOCK_SIZE - 3, steps=3, batches=(1,))
    assert (lengths.blocks, lengths.prefill_blocks) == (1, 2)


def test_without_matplotlib_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    line = plot.plot({}, ["prefill_ms"], [], "title", tmp_path / "a.png")
    assert "matplotlib is not installed" in line and not (tmp_path / "a.png").exists()


def test_a_plot_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    results = {"compiled": {"prefill_ms": 1.0}, "hf": {"prefill_ms": None}}
    line = plot.plot(results, ["prefill_ms"], [], "title", tmp_path / "a.nonsense")
    assert line.startswith(f"no plot at {tmp_path}/a.nonsense: ")


def test_a_failed_start_leaves_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versus, "SCRIPT", Path("/no/such/script.py"))
    assert main([*QUICK, "bench.rows=[reference]", "bench.starts=[reference]"]) == 0
    out = capsys.readouterr().out
    assert "start of reference: exit code 2" in out
    assert "cold_start_s" not in json.loads(out.splitlines()[-1])["results"]["reference"]


def test_the_first_token_of_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    quick = [text.replace("abc", "1234567") for text in QUICK]  # a commit may be digits alone
    assert main([*quick, "bench.first_token_of=reference"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["row"] == "reference" and told["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench.rows=[eager,fast]"], "bench.rows: no row 'fast'; choose from hf, reference"),
        (["bench.starts=[fast]"], "bench.starts: no row 'fast'"),
        (["bench.round=3"], "bench.round=3: no such key; did you mean 'rounds'?"),
        (["bench.rounds=0"], "bench.rounds: 0 is not an integer >= 1"),
        (["bench.rounds=1,2"], "cannot read 'bench.rounds=1,2'"),
        (["bench.rounds=1", "bench.rounds=2"], "bench.rounds: given more than once"),
        (["bench.batches=[8,1]"], "bench.batches=[8, 1]: must ascend"),
        (["-m", "bench.rounds=1"], "-m: a benchmark is one run"),
        (["compiler.mode=eager"], "compiler.mode=eager: this benchmark builds its rows itself"),
        (["runtime.max_num_seqs=4"], "runtime.max_num_seqs=4: this benchmark builds its rows"),
        (["prompt=a"], "prompt=a: a benchmark makes its own prompts"),
        (["sampling.top_k=4"], "sampling.top_k=4: a benchmark chooses how it samples"),
        (["runtime.device=gpu"], "runtime.device: 'gpu' is not one of"),
        (["runtime.device=cpu", "bench.rows=[compiled_no_graphs]"], "none of them runs here"),
        (["bench.out=/proc/no/run.json"], "bench.out=/proc/no/run.json: No such file"),
        (["bench.context=4000"], "exceed the model's 2048 positions"),
    ],
)
def test_errors_name_the_value_and_the_choices(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_vs_eager.main(["+model=tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "bench.rounds" in out and "tokens_to_pay_back" in out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rows_that_need_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "bench.rows=[eager,compiled_no_graphs,compiled]"
    asked = ["+model=tiny", "runtime.device=cuda", *SHORT, rows, "bench.ablation=false"]
    assert main([*asked, "bench.starts=[]"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    launches = {row: columns["measured_launches@1"] for row, columns in results.items()}
    assert 0 < launches["compiled"] < launches["eager"]
    for row in results.values():
        assert row["logit_error"] < 0.05 and row["token_agreement"] > 0.5  # bfloat16
        assert row["peak_bytes"] > 10e6


@pytest.mark.slow
def test_a_start_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "bench.rows=[eager]", "bench.starts=[eager]"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["eager"]
    assert 1 < statistics.mean([row["cold_start_s"], row["warm_start_s"]]) < 300


@pytest.mark.slow
def test_stock_torch_compile_computes_the_model(model: Model) -> None:
    row = build("torch_compile", model, Lengths(prefill=70, context=20, steps=3, batches=(1,)))
    ids, continuation = list(range(5, 75)), [3, 2, 1]
    expected = model.oracle(ids, continuation)
    found = row.forced(ids, continuation)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    again = row.forced(ids, continuation)  # its states were its own, and begin anew
    assert torch.equal(found, again)
