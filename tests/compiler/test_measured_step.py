"""`inspect` with `compiler.measure`: the planned steps run, their times in tables and report."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from test_report import Page, check_numbers, read
from torch import fx

from minivllm.compiler.bind import Executable
from minivllm.compiler.graph import PHASES
from minivllm.compiler.measured import join
from minivllm.errors import UserError
from minivllm.inspect import inspect
from minivllm.run import main
from minivllm.runtime import measure

LAYERS = 8  # of tiny
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(
    scope="module",
    params=["cpu", pytest.param("cuda", marks=ON_GPU)],
)
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """The device, the dump of the shipped model with its measured steps, and what was printed."""
    folder = tmp_path_factory.mktemp("measured")
    printed = io.StringIO()
    arguments = ["+model=tiny", "compiler.measure=true", f"runtime.device={request.param}"]
    with redirect_stdout(printed):
        assert main([*arguments, f"compiler.dump_dir={folder}"], inspect) == 0
    return request.param, folder, printed.getvalue()


def steps(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "measured.json").read_text())
    assert set(found) == set(PHASES)
    return found


def calls(folder: Path, phase: str) -> dict[str, tuple[str, str]]:
    """Name to module and op of the calls of the last graph, from its listing."""
    text = sorted((folder / phase).glob("*.txt"))[-1].read_text()
    found, module = {}, ""
    for line in text.splitlines():
        if re.fullmatch(r"\S+:", line):
            module = line[:-1].replace("(top)", "")
        elif line.startswith("  %"):
            name, op = re.match(r"  %(\w+) = ([\w.]+)\(", line).groups()
            found[name] = module, op
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_every_kernel_is_joined(measured: tuple[str, Path, str], phase: str) -> None:
    device, folder, _ = measured
    step, known = steps(folder)[phase], calls(folder, phase)
    assert step["notes"] == [] and step["captured"] == (device == "cuda")
    joined = [kernel for kernel in step["kernels"] if "module" in kernel]
    others = {kernel["call"] for kernel in step["kernels"] if "module" not in kernel}
    # a prefill's inputs are sent as they are; on CUDA that is a copy, and no kernel
    before = set() if device == "cuda" and phase == "prefill" else {"before the graph"}
    assert others == before | {"behind the graph"}
    for kernel in joined:
        assert known[kernel["call"]] == (kernel["module"], kernel["op"]) and kernel["us"] >= 0
    order = list(known)
    places = [order.index(kernel["call"]) for kernel in joined]
    assert places == sorted(places)
    layers = {m for k in joined for m in re.findall(r"layers\.(\d+)", k["module"])}
    assert layers == {str(i) for i in range(LAYERS)}
    if device == "cpu":
        assert [kernel["call"] for kernel in joined] == order
    else:
        own = {name for name, (_, op) in known.items() if op.startswith("minivllm.")}
        assert own and own <= {kernel["call"] for kernel in joined}


@pytest.mark.parametrize("phase", PHASES)
def test_times_add_up_to_the_step(measured: tuple[str, Path, str], phase: str) -> None:
    device, folder, _ = measured
    step = steps(folder)[phase]
    total = sum(kernel["us"] for kernel in step["kernels"])
    assert total == pytest.approx(step["profiled_us"])
    # what a profiler and a busy machine add, and what runs side by side without it
    assert 0.4 * step["step_us"] < total < 6 * step["step_us"]
    assert step["floor_us"] > 0 and step["machine"]["bytes_per_second"] > 1e8
    assert step["machine"]["flops_per_second"] > 1e9
    assert ("CPU" in step["machine"]["name"]) == (device == "cpu")


@pytest.mark.parametrize("phase", PHASES)
def test_the_measured_step_stands_beside_its_floor(
    measured: tuple[str, Path, str], phase: str
) -> None:
    _, folder, printed = measured
    step = steps(folder)[phase]
    part = printed[re.search(rf"^{phase}, \d+ token", printed, re.M).start() :]
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        for block in re.findall(r"(?:^\|.*\n)+", part, re.M)[:3]
    ]
    passes, parts, ops = tables
    assert passes[0][-2:] == ["floor ms", "measured ms"]
    assert [row[-1] for row in passes[2:-1]] == [""] * (len(passes) - 3)
    assert passes[-1][-2:] == [f"{step['floor_us'] / 1000:.3f}", f"{step['step_us'] / 1000:.3f}"]
    floors = [float(row[-2]) for row in passes[2:]]
    assert floors[0] > floors[-1] if phase == "prefill" else all(floor > 0 for floor in floors)
    names = [row[0] for row in parts]
    assert [f"layers.{i}" for i in range(LAYERS)] == names[3 : 3 + LAYERS]
    for rows in (parts, ops):
        assert rows[0][5:7] == ["floor µs", "µs"] and rows[-1][0] == "all"
        for column, whole in ((5, step["floor_us"]), (6, step["profiled_us"])):
            values = [float(row[column].replace(",", "")) for row in rows[2:]]
            assert values[-1] == pytest.approx(whole, abs=0.051)
            assert sum(values[:-1]) == pytest.approx(whole, abs=0.051 * len(values))


def test_the_other_tables_are_as_without(measured: tuple[str, Path, str]) -> None:
    _, folder, printed = measured
    shorter = re.sub(r"^(\|(?:[^|\n]*\|){7})[^|\n]*\|[^|\n]*\|$", r"\1", printed, flags=re.M)
    passes = [m.start() for m in re.finditer(r"^\| pass \|", shorter, re.M)]
    assert len(passes) == len(PHASES)
    check_numbers(folder, shorter)


@pytest.mark.parametrize("phase", PHASES)
def test_the_report_has_a_time_line(measured: tuple[str, Path, str], phase: str) -> None:
    _, folder, _ = measured
    step = steps(folder)[phase]
    html = (folder / "index.html").read_text(encoding="utf-8")
    page: Page = read(folder)
    assert f"{phase}-measured" in page.ids
    for link in set(page.links):
        assert not link.startswith("#") or link[1:] in page.ids, link
    (lanes,) = re.findall(rf'aria-label="Time line of {phase}, by layer">(.*)</div>\n', html)
    bars = [
        (float(left), float(width))
        for left, width in re.findall(r'<b style="left:([\d.]+)%;width:([\d.]+)%"', lanes)
    ]
    assert len(bars) == len(step["kernels"])
    ends = 0.0
    for left, width in sorted(bars):  # one behind the other, to the end of the step
        assert left == pytest.approx(ends, abs=0.002 * len(bars))
        ends = left + width
    assert ends == pytest.approx(100, abs=0.01)
    names = [re.sub("<.*?>", "", name).strip() for name in re.findall(r"<span>(.*?)</span>", lanes)]
    assert [n.split()[:2] for n in names if n.startswith("layer ")] == [
        ["layer", str(i)] for i in range(LAYERS)
    ]
    text = "".join(page.text)
    for layer in range(LAYERS):
        inside = rf"layers\.{layer}(\.|$)"
        us = sum(k["us"] for k in step["kernels"] if re.match(inside, k.get("module", "")))
        assert f"{us:,.1f} µs (floor " in text, layer


def test_without_it_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measured.json").write_text("old")
    assert main(["+model=tiny", f"compiler.dump_dir={tmp_path}"], inspect) == 0
    assert "measured" not in capsys.readouterr().out
    assert not (tmp_path / "measured.json").exists()
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'class="lane' not in html and " µs (floor" not in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["+model=tiny", "compiler.stop_after=fuse_norms"],
            "compiler.measure=true runs the graphs, and without select_logits, lower_mixers, "
            "lower_attention they cannot run",
        ),
        (["+model=miniqwen08b", "model.path=/nowhere"], "/nowhere"),
        pytest.param(
            ["+model=tiny", "runtime.device=cuda"],
            "runtime.device='cuda': this machine has 0 CUDA devices; choose auto, cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["+model=tiny", "compiler.mode=reference"], "compiler.mode='reference' compiles nothing"),
        (
            ["+model=tiny", "+compiler.implementations.linear=fla"],
            "linear='fla'",
        ),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "compiler.measure=true"], inspect) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_run_says_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+model=tiny", "compiler.measure=true"]) == 2
    error = capsys.readouterr().err
    assert "python -m minivllm.inspect" in error and "runtime.profile=FOLDER" in error


def test_eager_is_measured_launch_by_launch(capsys: pytest.CaptureFixture[str]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = ["+model=tiny", "compiler.mode=eager", "compiler.measure=true"]
    assert main([*arguments, f"runtime.device={device}"], inspect) == 0
    printed = capsys.readouterr().out
    assert printed.count("launch by launch") == 2 and "not joined" not in printed


class LoggedStep:
    """A step of three calls on a device that only writes down what is launched."""

    captured = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        graph = fx.Graph()
        value = graph.placeholder("x")
        for kernels in (["gemm", "splitk"], [], ["norm"]):  # the second is a view
            value = graph.call_function(self.op(kernels), (value,))
        graph.output(value)
        self.executable = Executable(fx.GraphModule({}, graph), ("x",), {}, [], True)
        monkeypatch.setattr(measure, "traced", self.traced)
        monkeypatch.setattr(measure, "_mark", lambda: self.log.append("at::spin_kernel(long)"))

    def op(self, kernels: list[str]) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            self.log += kernels
            return x

        return call

    def traced(self, run: Any, device: torch.device) -> dict[str, Any]:
        self.log.clear()
        run()
        events = [
            {"cat": "kernel", "name": name, "ts": 3.0 * i, "dur": 2.0}
            for i, name in enumerate(self.log)
        ]
        return {"traceEvents": events}

    def run(self, executable: Executable) -> None:
        self.log += ["Memcpy HtoD (Pinned -> Device)", "index"]
        executable(x=torch.ones(1))
        self.log.append("max")

    def replay(self) -> None:
        self.log += ["index", "gemm", "splitk", "norm", "max"]


def test_markers_tell_whose_kernels_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = LoggedStep(monkeypatch)
    device = torch.device("cuda")
    launched = measure._launched(step, ["linear", "view", "rms_norm"], device)
    assert launched == [
        ("before the graph", "index"),
        ("linear", "gemm"),
        ("linear", "splitk"),
        ("rms_norm", "norm"),
        ("behind the graph", "max"),
    ]
    replays = measure._replays(step, 4, device)
    assert len(replays) == 4
    timed, notes = join(launched, replays)
    assert [(t.owner, t.name) for t in timed] == launched and notes == ()
    assert [t.us for t in timed] == [2.0, 3.0, 3.0, 3.0, 3.0]


def test_a_profiler_that_sees_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = LoggedStep(monkeypatch)
    monkeypatch.setattr(measure, "traced", lambda run, device: {"traceEvents": []})
    with pytest.raises(UserError, match="torch's profiler sees no kernel"):
        measure._replays(step, 2, torch.device("cuda"))
