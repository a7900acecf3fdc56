"""`runtime.profile`: which steps are traced, what the table adds up to, and what is said."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.errors import UserError
from minivllm.presets import model_preset
from minivllm.run import main
from minivllm.runtime.kernel_trace import device_kernels, host_spans, op_self_times
from minivllm.runtime.profile import StepProfile, profile_table

CPU = torch.device("cpu")
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


STEPS = [
    event("user_annotation", "engine step 3", 0, 100),
    event("user_annotation", "engine step 4", 100, 60),
    event("user_annotation", "something else", 100, 60),
    {"ph": "M", "name": "process_name", "ts": 0},
]


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [*STEPS, *events]}


def rows(table: str) -> dict[str, list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in cells if row[0] != "---"}


def test_kernels_and_spans_are_read_in_order() -> None:
    data = trace(
        event("kernel", "b", 20, 5, tid=7),
        event("gpu_memcpy", "Memcpy HtoD", 3, 1, tid=7),
        event("gpu_user_annotation", "engine step 3", 0, 50, tid=7),
        event("cpu_op", "aten::mm", 1, 2),
        event("gpu_memset", "Memset", 30, 1, tid=7),
    )
    assert [k.name for k in device_kernels(data)] == ["Memcpy HtoD", "b", "Memset"]
    assert [s.name for s in host_spans(data, "engine step ")] == ["engine step 3", "engine step 4"]


def test_the_time_of_an_op_is_its_own() -> None:
    data = trace(
        event("cpu_op", "linear", 0, 50),
        event("cpu_op", "matmul", 5, 40),
        event("cpu_op", "mm", 10, 30),
        event("cpu_op", "add", 50, 7),  # begins when linear ends
        event("cpu_op", "mm", 12, 4, tid=2),  # another thread's
    )
    assert sorted(op_self_times(data)) == [
        ("add", 7), ("linear", 10), ("matmul", 10), ("mm", 4), ("mm", 30)
    ]  # fmt: skip


def test_the_table_of_kernels_adds_up_with_the_idle_time() -> None:
    data = trace(
        event("cpu_op", "aten::mm", 1, 2),
        event("kernel", "gemm<a|b>", 10, 20),
        event("kernel", "norm", 25, 10),  # 5 of it behind the gemm
        event("kernel", "gemm<a|b>", 50, 20),  # 15 idle before it
    )
    table = profile_table(data)
    assert table.splitlines()[0] == "2 steps, 0.080 ms each on the host; 0.030 ms on the device"
    assert rows(table) == {
        "kernel": ["calls a step", "µs a step", "share"],
        "gemm<a\\|b>": ["1.0", "20.0", "66.7 %"],
        "norm": ["0.5", "2.5", "8.3 %"],
        "(idle)": ["", "7.5", "25.0 %"],
        "all": ["", "30.0", "100.0 %"],
    }


def test_the_table_of_ops_and_its_shorter_form() -> None:
    data = trace(*(event("cpu_op", f"op{i}", 10 * i, 2 * i) for i in range(1, 5)))
    table = profile_table(data)
    assert table.splitlines()[0] == "2 steps, 0.080 ms each on the host; all of it on the CPU"
    assert list(rows(table)) == ["op", "op4", "op3", "op2", "op1", "(outside of ops)", "all"]
    assert rows(table)["op4"] == ["0.5", "4.0", "5.0 %"]
    assert rows(table)["(outside of ops)"] == ["", "70.0", "87.5 %"]
    shorter = rows(profile_table(data, most=2))
    assert list(shorter) == ["op", "op4", "op3", "(2 others)", "(outside of ops)", "all"]
    assert shorter["(2 others)"] == ["1.0", "3.0", "3.8 %"]


def run_profile(folder: Path, skip: int, steps: int, count: int) -> StepProfile:
    profile = StepProfile(folder, skip, steps, CPU)
    x = torch.ones(4, 4)
    for _ in range(count):
        with profile.step():
            torch.mm(x, x)
    return profile


def test_these_steps_and_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="minivllm")
    profile = run_profile(tmp_path / "new" / "folder", skip=2, steps=3, count=7)
    assert sorted(p.name for p in profile.folder.iterdir()) == ["kernels.txt", "trace.json"]
    data = json.loads((profile.folder / "trace.json").read_text())
    spans = host_spans(data, "engine step ")
    assert [span.name for span in spans] == [f"engine step {i}" for i in (2, 3, 4)]
    table = (profile.folder / "kernels.txt").read_text()
    assert table.startswith("3 steps, ") and rows(table)["aten::mm"][0] == "1.0"
    assert "| aten::mm | 1.0 |" in caplog.text and str(profile.folder) in caplog.text
    caplog.clear()
    profile.end()  # again
    assert not caplog.records


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2, "nothing was traced; the engine ran 2 steps, and runtime.profile_skip=2 come before"),
        (4, "2 of the runtime.profile_steps=3 steps asked for were traced"),
    ],
)
def test_fewer_steps_than_asked_for_are_told(
    count: int, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile = run_profile(tmp_path, skip=2, steps=3, count=count)
    profile.end()
    assert message in caplog.text
    assert (tmp_path / "trace.json").exists() == (count > 2)


def test_a_step_that_breaks_off_ends_the_trace(tmp_path: Path) -> None:
    profile = StepProfile(tmp_path, 0, 3, CPU)
    with pytest.raises(RuntimeError, match="broken"), profile.step():
        raise RuntimeError("broken")
    assert (tmp_path / "trace.json").exists()
    with profile.step():  # goes on, untraced
        pass
    spans = host_spans(json.loads((tmp_path / "trace.json").read_text()), "engine step ")
    assert len(spans) == 1


def test_steps_of_another_thread_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = threading.Thread(target=run_profile, args=(tmp_path, 0, 3, 4), name="minivllm-engine")
    thread.start()
    thread.join()
    assert "nothing is traced" in caplog.text and "minivllm-engine" in caplog.text
    assert not (tmp_path / "trace.json").exists()


def test_an_engine_that_nobody_closes_is_traced_too(tmp_path: Path) -> None:
    """And another thread cannot end what the main one has begun."""
    code = (
        "import sys, threading, torch; from pathlib import Path\n"
        "from minivllm.runtime.profile import StepProfile\n"
        "profile = StepProfile(Path(sys.argv[1]), 0, 9, torch.device('cpu'))\n"
        "with profile.step():\n"
        "    torch.ones(2) + 1\n"
        "thread = threading.Thread(target=profile.end)\n"
        "thread.start(); thread.join()\n"
        "assert not (profile.folder / 'trace.json').exists()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "1 of the runtime.profile_steps=9 steps" in done.stderr
    assert rows((tmp_path / "kernels.txt").read_text())["aten::add"][0] == "1.0"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UserError, match="name a folder that can be written") as raised:
            StepProfile(path, 0, 1, CPU)
        assert str(raised.value).startswith(f"runtime.profile={str(path)!r}: cannot write ")
    assert main(["+model=tiny", f"runtime.profile={tmp_path}/file"]) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"profile": "p", "profile_steps": 0}, "runtime.profile_steps: 0 is not an integer >= 1"),
        ({"profile": "p", "profile_skip": -1}, "runtime.profile_skip: -1 is not an integer >= 0"),
        ({"profile": ""}, "runtime.profile: '' is not a text of at least one character or null"),
        ({"profile_steps": 5}, "runtime.profile_steps=5 says which steps runtime.profile records"),
        ({"profile_skip": 0}, "it names no folder; name one: runtime.profile=profile"),
    ],
)
def test_bad_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        RuntimeOptions.from_mapping(values)
    assert message in str(raised.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_the_steps_of_an_engine(device: str, tmp_path: Path) -> None:
    options = RuntimeOptions(
        device=device, max_num_seqs=4, profile=str(tmp_path), profile_skip=3, profile_steps=5
    )
    llm = LLM.from_config(EngineConfig(model_preset("tiny"), runtime=options))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    profiled = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    data = json.loads((tmp_path / "trace.json").read_text())
    again = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    llm.close()
    assert profiled == again
    spans = host_spans(data, "engine step ")
    assert [span.name for span in spans] == [f"engine step {i}" for i in range(3, 8)]
    table = (tmp_path / "kernels.txt").read_text()
    found = rows(table)
    shares = [float(row[2].removesuffix(" %")) for name, row in list(found.items())[1:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.06 * len(shares))
    if device == "cpu":
        assert next(iter(found)) == "op"
        assert float(found["aten::mm"][0]) == 33  # 4 linears a layer and the head
        assert not device_kernels(data)
    else:
        assert next(iter(found)) == "kernel" and "(idle)" in found
        calls = sum(
            float(row[0].replace(",", "")) for row in found.values() if row[0][:1].isdigit()
        )
        assert calls > 60  # a step's launches
        assert max(k.end for k in device_kernels(data)) > spans[-1].start
