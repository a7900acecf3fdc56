"""Dumps: the same text for the same graph, and golden ones of the tiny config's last graphs.

The golden files are read by people, so they are dumps as they are written, and a table of what each
pass left. A graph is compared without source lines, which move with every edit, and with nodes
numbered in order, since torch's own counters differ from version to version. After a wanted change:

    python tests/compiler/test_dump.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import Builder, aten, code, tiny_config, toy

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.dump import Dump
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.listing import format_graph
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.text_diff import Diff, unified
from minivllm.config import CompilerOptions
from minivllm.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
STAGES = {
    phase: ["source", *(p.name for p in select_passes("compiled", phase))] for phase in PHASES
}


def compile_to(folder: Path, layers: tuple[int, ...] = ()) -> CompiledModel:
    options = CompilerOptions(dump_dir=str(folder), dump_layers=layers)
    return compile_model(tiny_config(), torch.float32, options, block_size=16)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompiledModel]:
    folder = tmp_path_factory.mktemp("dump")
    return folder, compile_to(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_file_a_stage(dumped: tuple[Path, CompiledModel]) -> None:
    expected = {"summary.json", "timings.json", "index.html"}
    for phase, stages in STAGES.items():
        expected |= {f"{phase}/{index:02d}_{stage}.txt" for index, stage in enumerate(stages)}
        expected |= {
            f"{phase}/{index:02d}_{stage}.diff" for index, stage in enumerate(stages) if index
        }
    assert set(files(dumped[0])) == expected


def test_a_file_is_its_stage(dumped: tuple[Path, CompiledModel]) -> None:
    folder, compiled = dumped
    for phase in PHASES:
        stages = STAGES[phase]
        last = folder / phase / f"{len(stages) - 1:02d}_{stages[-1]}.txt"
        assert last.read_text() == format_graph(compiled.graphs[phase], stages[-1])
        first = (folder / phase / "00_source.txt").read_text()
        assert first == format_graph(compiled.source.clone(phase), "source")


def test_two_compilations_give_the_same_bytes(
    dumped: tuple[Path, CompiledModel], tmp_path: Path
) -> None:
    """But for the times, which have a file and one element of the page to themselves."""
    compile_to(tmp_path / "new" / "folder")
    first, second = files(dumped[0]), files(tmp_path / "new" / "folder")
    times = [json.loads(run.pop("timings.json")) for run in (first, second)]
    element = re.compile(rb'(?<=<script type="application/json" id="times">).*?(?=</script>)')
    for run, expected in zip((first, second), times, strict=True):
        (found,) = element.findall(run["index.html"])
        assert json.loads(found) == expected
        run["index.html"] = element.sub(b"", run["index.html"])
    assert first == second


def test_an_older_dump_does_not_shine_through(tmp_path: Path) -> None:
    stale = [tmp_path / "decode" / f"99_gone.{kind}" for kind in ("txt", "diff")]
    kept = tmp_path / "decode" / "notes.txt"
    kept.parent.mkdir()
    for path in (*stale, kept):
        path.write_text("from before")
    compile_to(tmp_path)
    assert not any(path.exists() for path in stale)
    assert kept.exists(), "a file of somebody else's is gone"


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the command patch")
def test_patch_turns_a_stage_into_the_next(
    dumped: tuple[Path, CompiledModel], tmp_path: Path
) -> None:
    for phase, stages in STAGES.items():
        folder = dumped[0] / phase
        work = tmp_path / phase
        work.write_bytes((folder / "00_source.txt").read_bytes())
        for index, stage in enumerate(stages[1:], 1):
            change = folder / f"{index:02d}_{stage}.diff"
            subprocess.run(["patch", "--quiet", str(work)], input=change.read_bytes(), check=True)
            assert work.read_bytes() == change.with_suffix(".txt").read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("a\n", ""),
        ("", "a\n"),
        ("a\nb\nc\n", "a\nB\nc\n"),
        ("a\na\nb\na\n", "b\na\na\n"),
        ("x\n" * 9 + "a\n" + "x\n" * 9, "x\n" * 9 + "b\n" + "x\n" * 9),
        ("a\nb\nc\nd\n", "c\nd\na\nb\n"),
        ("".join(f"{i}\n" for i in range(40)), "".join(f"{i}\n" for i in range(40) if i % 9)),
    ],
)
def test_a_difference_is_what_changed(before: str, after: str) -> None:
    a, b = before.splitlines(), after.splitlines()
    rebuilt, kept = [], 0
    for tag, i1, i2, j1, j2 in Diff(a, b).get_opcodes():
        rebuilt += a[i1:i2] if tag == "equal" else b[j1:j2]
        kept += i2 - i1 if tag == "equal" else 0
    assert rebuilt == b
    assert (unified(before, after, "a", "b") == "") == (a == b)
    if len(a) == 40:
        assert kept == len(b)


def test_layers_bound_a_dump(
    dumped: tuple[Path, CompiledModel], compiled: CompiledModel, tmp_path: Path
) -> None:
    bounded = compile_to(tmp_path, (1,))
    for phase in PHASES:
        assert code(bounded.graphs[phase]) == code(compiled.graphs[phase])
    whole, part = files(dumped[0]), files(tmp_path)
    assert set(whole) == set(part)
    for name in whole:
        if name.endswith(".txt"):
            assert len(part[name]) < len(whole[name]), name
        if name.endswith((".txt", ".diff")):
            assert not re.search(rb"^(state  state\.)?layers\.0\..*:", part[name], re.MULTILINE)
    last = part[f"decode/{len(STAGES['decode']) - 1:02d}_prefetch_states.txt"].decode()
    assert re.match(
        r"# decode graph after prefetch_states: \d+ calls, of which \d+ are shown: "
        r"layers 1, and outside of layers\n",
        last,
    )
    assert "layers.1.mixer:" in last and "state  state.layers.1.k_cache" in last
    summaries = [json.loads(run["summary.json"]) for run in (whole, part)]
    assert [summary.pop("dump_layers") for summary in summaries] == [[], [1]]
    assert summaries[0] == summaries[1], "the numbers are of all layers"


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"^compiler.dump_layers: no layer 2; .* 0 to 1$"):
        compile_model(
            tiny_config(),
            torch.float32,
            CompilerOptions(dump_dir="never", dump_layers=(0, 2)),
        )


@pytest.mark.parametrize("value", [[-1], ["0"], [True], 3, "0", [1.0]])
def test_layers_are_a_list_of_integers(value: Any) -> None:
    with pytest.raises(UserError, match=r"is not a list of integers >= 0, such as \[0,3\]$"):
        CompilerOptions(dump_dir="dump", dump_layers=value)


def test_layers_without_a_folder() -> None:
    with pytest.raises(UserError, match=r"dump_layers=\[0\] bounds what compiler.dump_dir holds"):
        CompilerOptions(dump_layers=(0,))


def test_a_dump_changes_nothing(
    dumped: tuple[Path, CompiledModel], compiled: CompiledModel
) -> None:
    for phase in PHASES:
        assert code(dumped[1].graphs[phase]) == code(compiled.graphs[phase])


def test_no_addresses_and_no_unnamed_symbols(dumped: tuple[Path, CompiledModel]) -> None:
    for name, content in files(dumped[0]).items():
        text = content.decode()
        assert not re.search(r"0x[0-9a-f]+|\bobject at\b|/root|/home", text), name
        assert not re.search(r"[\[ ]s\d+\b", text), f"{name} has a symbol without a name"


def test_every_call_stands_in_the_dump(compiled: CompiledModel) -> None:
    for phase, graph in compiled.graphs.items():
        text = format_graph(graph, "end")
        assert text.startswith(f"# {phase} graph after end: {len(graph.nodes())} calls\n")
        assert re.findall(r"^  %(\w+) = ", text, re.MULTILINE) == [n.name for n in graph.nodes()]
        assert re.findall(r"^input  (\w+):", text, re.MULTILINE) == list(graph.input_names)
        assert re.findall(r"^state  ([\w.]+):", text, re.MULTILINE) == list(graph.states)
        assert text.splitlines()[-1] == f"return %{graph.output.name}: float32[{rows(phase)}, 61]"


def rows(phase: str) -> str:
    return "rows" if phase == "prefill" else "tokens"


def test_the_format(source: Graph) -> None:
    def body(b: Builder) -> Node:
        x = b.hidden()
        pool = b.state("layers.0.conv", "slot", 8)
        old = b.call(aten.index_select.default, pool, 0, b.input("state_slots"))
        parts = b.call(aten.chunk.default, old, 2, -1)
        b.call(aten.index_copy_.default, pool, 0, b.input("state_slots"), x)
        half = b.call(aten.to.dtype, x, torch.bfloat16, module="norm")
        both = b.call(aten.cat.default, [half, half], -1, module="norm")
        b.call(aten.sum.dim_IntList, parts and both, [0], True, dtype=torch.float64, module="")
        return both

    assert format_graph(toy(source, body, "decode"), "toy") == (
        "# decode graph after toy: 7 calls\n"
        "\n"
        "input  input_ids: int64[tokens]    # token ids, sequences packed\n"
        "input  state_slots: int64[tokens]    # state slot of each sequence; 0: padding\n"
        "state  state.layers.0.conv: float32[slots, 8]\n"
        "\n"
        "(top):\n"
        "  %embedding_default = aten.embedding(embed_tokens.weight, input_ids):"
        " float32[tokens, 8]    # toy.py:1\n"
        "\n"
        "layers.0.mixer:\n"
        "  %index_select_default = aten.index_select(state.layers.0.conv, 0, state_slots):"
        " float32[tokens, 8]    # toy.py:1\n"
        "  %chunk_default = aten.chunk(%index_select_default, 2, -1):"
        " (float32[tokens, 4], float32[tokens, 4])    # toy.py:1\n"
        "  %index_copy__default = aten.index_copy_(state.layers.0.conv, 0, state_slots,"
        " %embedding_default): float32[slots, 8]    # toy.py:1\n"
        "\n"
        "norm:\n"
        "  %to_dtype = aten.to.dtype(%embedding_default, bfloat16):"
        " bfloat16[tokens, 8]    # toy.py:1\n"
        "  %cat_default = aten.cat([%to_dtype, %to_dtype], -1):"
        " bfloat16[tokens, 16]    # toy.py:1\n"
        "\n"
        "(top):\n"
        "  %sum_dim_int_list = aten.sum.dim_IntList(%cat_default, [0], True, dtype=float64):"
        " float64[1, 16]    # toy.py:1\n"
        "\n"
        "return %cat_default: bfloat16[tokens, 16]\n"
    )


def test_an_observer_counts_by_phase(source: Graph, tmp_path: Path) -> None:
    dump = Dump(tmp_path, tiny_config())
    for stage in ("one", "two"):
        for phase in PHASES:
            dump.observe(source.clone(phase), stage)
    assert sorted(files(tmp_path)) == [
        "decode/00_one.txt",
        "decode/01_two.diff",
        "decode/01_two.txt",
        "prefill/00_one.txt",
        "prefill/01_two.diff",
        "prefill/01_two.txt",
    ]


def portable(text: str) -> list[str]:
    """The lines without source lines, with nodes numbered in the order they are made."""
    numbers: dict[str, str] = {}
    text = re.sub(r"    # \S+:\d+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"%\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text)
    return text.splitlines()


@pytest.mark.parametrize("phase", PHASES)
def test_the_golden_graph(compiled: CompiledModel, phase: str) -> None:
    """Fails for any change of the model, the trace or a pass that reaches the final graph."""
    text = format_graph(compiled.graphs[phase], STAGES[phase][-1])
    assert portable(text) == portable((GOLDEN / f"{phase}.txt").read_text())


def test_the_golden_stages(dumped: tuple[Path, CompiledModel]) -> None:
    """Fails for a pass that does more, less or something else than it did."""
    summary = json.loads((dumped[0] / "summary.json").read_text())
    assert stage_table(summary) == (GOLDEN / "stages.txt").read_text()


def stage_table(summary: dict[str, Any]) -> str:
    """The stages' numbers, from canonicalize on: before it they are torch's own."""
    columns = ("sites", "calls", "nodes", "launches", "bytes", "flops")
    lines = [f"{'':31}{''.join(f'{column:>10}' for column in columns)}"]
    for phase in PHASES:
        for index, stage in enumerate(summary["phases"][phase]["stages"][1:]):
            numbers = ["" if index == 0 and c == "sites" else stage[c] for c in columns]
            name = f"{phase} {stage['name']}"
            lines.append(f"{name:31}{''.join(f'{number:>10}' for number in numbers)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        graphs = compile_to(Path(scratch)).graphs
        stages = stage_table(json.loads((Path(scratch) / "summary.json").read_text()))
    for phase in PHASES:
        (GOLDEN / f"{phase}.txt").write_text(format_graph(graphs[phase], STAGES[phase][-1]))
    (GOLDEN / "stages.txt").write_text(stages)
    print(f"wrote {GOLDEN}")
