"""latency.py and throughput.py on the shipped model: what runs, and what the numbers mean."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import latency, throughput
from bench.samples import Samples
from bench.served import Served, summary
from bench.workloads import Load, Request, ServingOptions, nano_vllm_requests
from minivllm import LLM

ON = ["+model=tiny", "runtime.device=cpu", "bench.git_sha=abc"]


@pytest.fixture(scope="module")
def llm() -> Any:
    made = LLM("tiny", device="cpu", max_num_seqs=4, max_model_len=1024, skip_tokenizer_init=True)
    yield made
    made.close()


def test_all_workloads_on_one_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    every = "bench.workloads=[decode,ttft,prefix,prefill,nano_vllm,random]"
    sizes = ["bench.scale=0.03", "bench.rounds=2", "bench.repeats=3", "bench.batches=[1,2]",
             "bench.prompts=[512]", "bench.num_prompts=100", "bench.range_ratio=0.5"]  # fmt: skip
    assert latency.main([*ON, every, *sizes, f"bench.out={out}"]) == 0
    record = json.loads(out.read_text())
    results = record["results"]
    assert list(results) == ["start", "ttft@512", "prefix_cold", "prefix_hit", "decode@1",
                             "decode@2", "prefill", "nano_vllm", "random"]  # fmt: skip
    assert 0 < results["start"]["ready_s"] < results["start"]["first_token_s"]
    field = {f"{kind}_{time}_ms" for kind in ("mean", "median", "p99")
             for time in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    field |= {"request_throughput", "output_throughput", "total_token_throughput", "duration"}
    for row in ("nano_vllm", "random"):
        assert field <= set(results[row])
        assert results[row]["total_token_throughput"] > results[row]["output_throughput"]
    for batch in (1, 2):
        row = results[f"decode@{batch}"]
        # a step gives each row of the batch a token
        assert row["output_throughput"] == pytest.approx(1e3 * batch / row["step_ms"], rel=0.1)
        assert 0 <= row["host_wait_ms"] < row["step_ms"]
    assert results["prefix_cold"]["prefix_hit_rate"] == 0
    assert results["prefix_hit"]["prefix_hit_rate"] == pytest.approx(64 / 96)  # 92 + 4 tokens
    for row in ("nano_vllm", "random", "prefill", "decode@2"):
        assert results[row]["prefix_hit_rate"] == 0
    assert record["benchmark"] == "latency" and record["kernels_built"] == 0
    assert record["environment"]["git_sha"] == "abc"
    printed = capsys.readouterr().out
    assert "prefix cache on" in printed
    assert json.loads(printed.splitlines()[-1])["results"] == results
    assert latency.main(["--compare", str(out), str(out)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["changes"] == [] and told["same"] > 50


def test_a_script_has_its_own_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["bench.scale=0.01", "bench.rounds=1", "runtime.prefix_cache.enabled=false"]
    assert throughput.main([*ON, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "prefix cache off" in printed
    results = json.loads(printed.splitlines()[-1])["results"]
    assert list(results) == ["start", "prefill", "nano_vllm", "random"]


def test_nano_vllms_workload_is_nano_vllms() -> None:
    """133,966 tokens out is what nano-vllm prints for its own benchmark."""
    requests = nano_vllm_requests(vocabulary=248_320)
    assert len(requests) == 256
    assert sum(r.tokens for r in requests) == 133_966
    assert all(100 <= len(r.prompt) <= 1024 and 100 <= r.tokens <= 1024 for r in requests)
    assert max(max(r.prompt) for r in requests) <= 10_000
    small = nano_vllm_requests(vocabulary=97, scale=0.25)
    assert [len(r.prompt) for r in small] == [round(len(r.prompt) / 4) for r in requests[:64]]
    assert max(max(r.prompt) for r in small) < 97


def generation(started: float, first: float, last: float, prompt: int, tokens: int) -> Any:
    request = SimpleNamespace(token_ids=[0] * (prompt + tokens), num_prompt_tokens=prompt)
    return SimpleNamespace(
        prompt=SimpleNamespace(token_ids=[0] * prompt),
        completions=[SimpleNamespace(request=request)],
        started=started,
        first_token=first,
        last_token=last,
    )


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def test_the_fields_numbers_by_hand() -> None:
    a = Hashable(**vars(generation(0.0, 1.0, 3.0, prompt=10, tokens=3)))
    b = Hashable(**vars(generation(0.5, 2.0, 2.0, prompt=20, tokens=1)))
    served = Served([a, b], seconds=4.0, steps=8, waited=1.0, queried=30, reused=6)
    served.times = [(1.0, [a]), (2.0, [b]), (2.5, [a]), (3.0, [a])]
    numbers = served.numbers()
    expected = {
        "duration": 4.0,
        "request_throughput": 0.5,
        "output_throughput": 1.0,
        "total_token_throughput": 34 / 4,
        "prefix_hit_rate": 0.2,
        "step_ms": 500.0,
        "host_wait_ms": 125.0,
        "mean_ttft_ms": 1250.0,
        "median_ttft_ms": 1250.0,
        "p99_ttft_ms": 1495.0,
        "mean_tpot_ms": 1000.0,  # of the first request alone: the other has one token
        "median_itl_ms": 1000.0,  # 1.5 s and 0.5 s
        "p99_itl_ms": 1490.0,
        "mean_e2el_ms": 2250.0,
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    assert summary("x", [0.001]) == {f"{k}_x_ms": 1.0 for k in ("mean", "median", "p99")}


def test_requests_come_when_they_should(llm: LLM) -> None:
    load = Load(llm, ServingOptions(), Samples())
    served = load.serve([Request([1, 2, 3], 2, 0.3), Request([4, 5, 6], 2, 0.0)])
    late, early = sorted(served.generations, key=lambda g: -g.started)
    assert early.prompt.token_ids == [4, 5, 6]
    assert 0.3 <= late.started - early.started < 3
    assert served.seconds >= 0.3


def test_random_lengths_and_arrivals(llm: LLM) -> None:
    options = ServingOptions(num_prompts=6, input_len=20, output_len=4, range_ratio=0.5, rounds=1,
                             request_rate=50.0)  # fmt: skip
    samples = Samples()
    load = Load(llm, options, samples)
    seen: list[Request] = []
    serve = load.serve
    load.serve = lambda r, t=0.0: (seen.extend(r), serve(r, t))[1]  # type: ignore[method-assign]
    load.run("random")
    assert len(seen) == 12  # a round to warm up
    assert {10 <= len(r.prompt) <= 30 and 2 <= r.tokens <= 6 for r in seen} == {True}
    assert len({len(r.prompt) for r in seen}) > 2
    arrivals = [r.arrival for r in seen[:6]]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0
    assert len(samples.of("random", "output_throughput")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench.workloads=[chat]"], "bench.workloads: no workload 'chat'; choose from decode"),
        (["bench.scale=0"], "bench.scale: 0.0 is not a number > 0"),
        (["bench.request_rate=-1"], "bench.request_rate"),
        ([], "prefix has sequences of 3201 tokens, and the engine takes 2048"),
        (["sampling.temperature=1"], "sampling.temperature=1: a benchmark chooses how it samples"),
    ],
)
def test_errors_name_the_value_and_the_choices(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert latency.main([*ON, "bench.prompts=[512]", *arguments]) == 2
    assert said in capsys.readouterr().err
