"""Dumps: the same text for the same graph, and a golden one of the tiny config's decode graph.

The golden file is read by people, so it is a dump as it is written. It is compared without source
lines, which move with every edit, and with nodes numbered in order, since torch's own counters
differ from version to version. After a wanted change:

    python tests/compiler/test_dump.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.fx import Node
from toy_graphs import Builder, aten, code, tiny_config, toy

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.dump import dump_to, format_graph
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.pipeline import select_passes
from minivllm.config import CompilerOptions

GOLDEN = Path(__file__).parent / "golden" / "decode.txt"
STAGES = {
    phase: ["source", *(p.name for p in select_passes("compiled", phase))] for phase in PHASES
}


def compile_to(folder: Path) -> CompiledModel:
    options = CompilerOptions(dump_dir=str(folder))
    return compile_model(tiny_config(), torch.float32, options, block_size=16)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompiledModel]:
    folder = tmp_path_factory.mktemp("dump")
    return folder, compile_to(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_file_a_stage(dumped: tuple[Path, CompiledModel]) -> None:
    expected = {
        f"{phase}/{index:02d}_{stage}.txt"
        for phase, stages in STAGES.items()
        for index, stage in enumerate(stages)
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
    compile_to(tmp_path / "new" / "folder")
    assert files(tmp_path / "new" / "folder") == files(dumped[0])


def test_a_dump_changes_nothing(
    dumped: tuple[Path, CompiledModel], compiled: CompiledModel
) -> None:
    for phase in PHASES:
        assert code(dumped[1].graphs[phase]) == code(compiled.graphs[phase])


def test_no_addresses_and_no_unnamed_symbols(dumped: tuple[Path, CompiledModel]) -> None:
    for name, content in files(dumped[0]).items():
        text = content.decode("ascii")
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
    write = dump_to(tmp_path)
    for stage in ("one", "two"):
        for phase in PHASES:
            write(source.clone(phase), stage)
    assert sorted(files(tmp_path)) == [
        "decode/00_one.txt",
        "decode/01_two.txt",
        "prefill/00_one.txt",
        "prefill/01_two.txt",
    ]


def portable(text: str) -> list[str]:
    """The lines without source lines, with nodes numbered in the order they are made."""
    numbers: dict[str, str] = {}
    text = re.sub(r"    # \S+:\d+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"%\w+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), text)
    return text.splitlines()


def test_the_golden_decode_graph(compiled: CompiledModel) -> None:
    """Fails for any change of the model, the trace or a pass that reaches the final graph."""
    text = format_graph(compiled.decode, "inplace_state")
    assert portable(text) == portable(GOLDEN.read_text())


if __name__ == "__main__":
    graphs = compile_model(tiny_config(), torch.float32, CompilerOptions(), block_size=16).graphs
    GOLDEN.write_text(format_graph(graphs["decode"], "inplace_state"))
    print(f"wrote {GOLDEN}")
