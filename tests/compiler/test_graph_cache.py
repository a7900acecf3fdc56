"""Graphs kept on disk: the same graphs, whatever changes them is another key, nothing breaks."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_graphs import CPU, aten, code, tiny_config

import minivllm.compiler.compile as compile_module
import minivllm.compiler.graph_cache as graph_cache
import minivllm.compiler.pipeline as pipeline
from minivllm import presets
from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.graph_cache import GraphCache, KeptGraphs, cache_folder, graph_key
from minivllm.compiler.graph_json import graph_data, read_graph
from minivllm.compiler.listing import format_graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import PIPELINE, select_passes
from minivllm.compiler.recipe import assemble
from minivllm.compiler.verify import pool_entries, scenario
from minivllm.config import CompilerOptions, ModelOptions
from minivllm.errors import UserError
from minivllm.inspect import inspect
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights, parameter_shapes
from minivllm.run import main
from minivllm.runtime.resolve import find_model

CACHE = "graphs from cache"
BLOCK_SIZE = 16
# of CompilerOptions: what a key holds, what leaves the cache aside, what does not change a graph
IN_THE_KEY = {"mode", "disable", "stop_after"}
LOOKS_AT_STAGES = {"dump_dir", "verify", "explain", "bisect", "extra_passes"}
WITHOUT_EFFECT = {"dump_layers", "measure", "implementations", "cache_dir"}


class Rename(GraphPass):
    """A user's pass: its source is not the package's."""

    name = "rename"

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return []


def compiled_in(folder: Path, config: MiniQwenConfig | None = None, **kwargs: Any) -> CompiledModel:
    dtype = kwargs.pop("dtype", torch.float32)
    options = kwargs.pop("options", CompilerOptions())
    kwargs = {"block_size": BLOCK_SIZE, "cache_folder": folder, **kwargs}
    return compile_model(config or tiny_config(), dtype, options, **kwargs)


def is_kept(compiled: CompiledModel) -> bool:
    """Whether the graphs come from a file; the parts of the start say the same."""
    kept = compiled.source is None
    assert list(compiled.seconds) == ([CACHE] if kept else ["trace", *PHASES])
    return kept


def preset(name: str) -> MiniQwenConfig:
    options: ModelOptions = presets.model_preset(name)
    return find_model(dataclasses.replace(options, load_format="dummy"))[1]


def executable(graph: Graph, config: MiniQwenConfig, dtype: torch.dtype) -> Executable:
    """A graph bound to dummy weights, over pools of NaN; of decode over zeros."""
    plain = dummy_weights(parameter_shapes(config), dtype, "cpu", 0) | constants(config)
    fill = torch.nan if graph.phase == "prefill" else 0.0
    entries = pool_entries(BLOCK_SIZE)
    pools = {
        name: torch.full((entries, *spec.shape), fill, dtype=spec.dtype)
        for name, spec in graph.states.items()
    }
    return bind(graph, assemble(graph.weights, plain), pools, CPU, dtype)


def run(bound: Executable, phase: str, vocab: int) -> list[bytes]:
    """The bits of a scenario's logits and of what it leaves in the pools and weights."""
    with torch.inference_mode():
        steps = scenario(phase, vocab, BLOCK_SIZE)
        logits = [bound(**step.inputs).float() for step in steps]
    assert all(bool(torch.isfinite(step).all()) for step in logits)
    tensors = [*logits, *(b.float() for _, b in sorted(bound.module.named_buffers()))]
    return [t.numpy().tobytes() for t in tensors]


@pytest.fixture(scope="module", autouse=True)
def source_at_rest() -> Iterator[None]:
    """Whoever edits the package while its tests run does not change what they see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_cache, "IMPORTED", math.inf)
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, config: MiniQwenConfig) -> Path:
    """A folder with the graphs of the tiny config; not to be changed."""
    folder = tmp_path_factory.mktemp("filled")
    assert not is_kept(compiled_in(folder, config))
    return folder


@pytest.fixture
def copied(filled: Path, tmp_path: Path) -> Path:
    """The one file of a folder like `filled`, to change."""
    (file,) = filled.iterdir()
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    return copy


def key_of(config: MiniQwenConfig, **changes: Any) -> Any:
    """The key of a compilation of `config` but for `changes`."""
    options = CompilerOptions(
        **{name: changes.pop(name) for name in list(changes) if name in IN_THE_KEY}
    )
    passes = {
        phase: select_passes(options.mode, phase, options.disable, options.stop_after)
        for phase in PHASES
    }
    arguments = {
        "dtype": torch.float32,
        "state_dtype": torch.float32,
        "block_size": BLOCK_SIZE,
    } | changes
    return graph_key(config, options=options, passes=passes, **arguments)


# the same graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("full_attention",) * 2, "attention_bias": True},
        {
            "num_hidden_layers": 5,
            "layer_types": ("linear_attention",) * 3 + ("full_attention", "linear_attention"),
            "tie_word_embeddings": False,
            "linear_num_key_heads": 4,
            "vocab_size": 77,
        },
    ],
    ids=["tiny", "attention", "five layers"],
)
def test_a_file_gives_the_same_graphs_and_bits(
    tmp_path: Path, changes: dict[str, Any], mode: str, dtype: torch.dtype
) -> None:
    config = tiny_config(**changes)
    options = CompilerOptions(mode=mode)
    fresh, kept = (compiled_in(tmp_path, config, options=options, dtype=dtype) for _ in range(2))
    assert not is_kept(fresh) and is_kept(kept)
    assert_same(fresh, kept)
    for phase in PHASES:
        bound = [executable(m.graphs[phase], config, dtype) for m in (fresh, kept)]
        assert bound[0].module.code == bound[1].module.code
        assert bound[0].implementations == bound[1].implementations
        assert bound[0].inputs == bound[1].inputs
        bits = [run(b, phase, config.vocab_size) for b in bound]
        assert bits[0] == bits[1]


@pytest.mark.parametrize("name", ["tiny", "miniqwen08b"])
def test_the_graphs_of_the_presets(tmp_path: Path, name: str) -> None:
    config = preset(name)
    fresh, kept = (
        compiled_in(tmp_path, config, dtype=torch.bfloat16, block_size=64) for _ in range(2)
    )
    assert not is_kept(fresh) and is_kept(kept)
    assert_same(fresh, kept)
    assert 10 * sum(kept.seconds.values()) < sum(fresh.seconds.values())


def assert_same(fresh: CompiledModel, kept: CompiledModel) -> None:
    assert kept.reports == fresh.reports
    assert list(kept.graphs) == list(fresh.graphs)
    for phase, graph in kept.graphs.items():
        was = fresh.graphs[phase]
        assert format_graph(graph, "the end") == format_graph(was, "the end")
        assert code(graph) == code(was)
        assert (graph.phase, graph.input_names) == (was.phase, was.input_names)
        assert (graph.weights, graph.states) == (was.weights, was.states)
        assert list(graph.weights) == list(was.weights)
        for node, other in zip(graph.fx.nodes, was.fx.nodes, strict=True):
            assert (node.name, node.op, node.target) == (other.name, other.op, other.target)
            assert spelled(node.args) == spelled(other.args)
            assert spelled(node.kwargs) == spelled(other.kwargs)
            assert node.meta.get("pass") == other.meta.get("pass")
            assert {str(user) for user in node.users} == {str(user) for user in other.users}


def spelled(value: Any) -> Any:
    """An argument with the type of each part: True is not 1, a tuple no list."""
    if isinstance(value, Mapping):
        return {key: spelled(v) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return (isinstance(value, tuple), [spelled(v) for v in value])
    return (type(value), str(value))


def test_a_file_is_lines_that_a_person_can_read(filled: Path) -> None:
    (file,) = filled.iterdir()
    lines = file.read_text().splitlines()
    assert '"block_size": 16,' in lines
    (head,) = (line for line in lines if line.startswith('["silu_mul_default", '))
    _, op, target, args, kwargs, meta = json.loads(head.removesuffix(","))
    assert (op, target, kwargs) == ("call_function", "minivllm.silu_mul.default", {})
    assert all(a.startswith("%") for a in args)
    assert meta["type"] == "float32[tokens, 40]" and meta["module"].endswith(".mlp")
    assert meta["source"].startswith("model/miniqwen.py:")


def test_arguments_of_all_kinds() -> None:
    graph = Graph(torch.fx.Graph(), "prefill", {}, None)
    x = graph.fx.placeholder("input_ids")
    x.meta = {"type": "int64[tokens]", "module": "", "source": "", "pass": "a"}
    y = graph.fx.call_function(aten.sum.dim_IntList, (x, [0, -1], True), {"dtype": torch.bfloat16})
    z = graph.fx.call_function(operator.getitem, ((x, (y, None), 1.5, 1e-300, True, "%x"), 0))
    for node in (y, z):
        node.meta = {"type": "float32[2]", "module": "m", "source": "f.py:1"}
    graph.fx.output(z)
    again = read_graph(json.loads(json.dumps(graph_data(graph))))
    for node, other in zip(again.fx.nodes, graph.fx.nodes, strict=True):
        assert spelled(node.args) == spelled(other.args)
        assert spelled(node.kwargs) == spelled(other.kwargs)
        assert node.meta == other.meta


@pytest.mark.parametrize(
    ("target", "argument", "complaint"),
    [
        (aten.neg.default, CPU, r"device\(type='cpu'\) \(device\) has no spelling"),
        (aten.neg.default, slice(1), r"\(slice\) has no spelling"),
        (len, 1, "no op of a library"),
        (aten.neg, 1, "no op of a library"),
    ],
)
def test_what_has_no_spelling_is_told_when_it_is_written(
    filled: Path,
    config: MiniQwenConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    target: Any,
    argument: Any,
    complaint: str,
) -> None:
    cache, key = GraphCache(tmp_path), key_of(config)
    kept = GraphCache(filled).load(key)
    assert kept is not None
    graph = kept.graphs["prefill"]
    with graph.fx.inserting_before(graph.output):
        node = graph.fx.call_function(target, (argument,))
    node.meta = {"type": "int", "module": "", "source": ""}
    with pytest.raises(TypeError, match=complaint):
        graph_data(graph)
    with caplog.at_level(logging.DEBUG, graph_cache.__name__):
        cache.store(key, kept.graphs, kept.reports)
    (record,) = caplog.records
    assert record.levelname == "DEBUG" and "are not kept: TypeError" in record.getMessage()
    assert list(tmp_path.iterdir()) == []


def test_a_graph_from_a_file_is_not_rewritten(filled: Path, config: MiniQwenConfig) -> None:
    kept = GraphCache(filled).load(key_of(config))
    assert kept is not None
    graph = kept.graphs["decode"]
    with pytest.raises(AssertionError, match="read from a file is not rewritten"):
        graph.fake_mode  # noqa: B018


# what is another key


CHANGES: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"state_dtype": torch.bfloat16},
    {"block_size": 64},
    {"mode": "eager"},
    {"disable": ("fuse_norms",)},
    {"disable": ("fuse_qk_norm_rope", "fuse_norms")},
    {"stop_after": "keep_snapshots"},
    {"stop_after": "prefetch_states"},
]


def test_each_change_is_another_file(config: MiniQwenConfig, monkeypatch: Any) -> None:
    cache = GraphCache(Path("folder"))
    keys = [key_of(config), *(key_of(config, **change) for change in CHANGES)]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        changed = {
            bool: lambda v: not v,
            int: lambda v: 2 * v,
            float: lambda v: v / 2,
            tuple: lambda v: (*v[1:], *v[:1]) if v else (3,),
            type(None): lambda v: "bfloat16",
        }[type(value)](value)
        other = object.__new__(MiniQwenConfig)  # unchecked: sizes need not fit together here
        for name in (f.name for f in dataclasses.fields(config)):
            object.__setattr__(other, name, getattr(config, name))
        object.__setattr__(other, field.name, changed)
        keys.append(key_of(other))
    for module, name, value in (
        (graph_cache, "source_digest", lambda *args: "another"),
        (graph_cache, "FORMAT", 0),
        (torch, "__version__", "0.0"),
        (torch.version, "git_version", "another"),
        (graph_cache.platform, "python_version", lambda: "2.7"),
        (pipeline, "PIPELINE", PIPELINE[:-1]),
        (pipeline, "PIPELINE", (*PIPELINE[:2], PIPELINE[3], PIPELINE[2], *PIPELINE[4:])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            keys.append(key_of(config))
    assert len({cache.file(key) for key in keys}) == len(keys) > 30
    assert cache.file(key_of(config)) == cache.file(keys[0])


def test_every_option_is_thought_of() -> None:
    names = {field.name for field in dataclasses.fields(CompilerOptions)}
    assert names == IN_THE_KEY | LOOKS_AT_STAGES | WITHOUT_EFFECT


def test_only_the_same_compilation_is_found(filled: Path, config: MiniQwenConfig) -> None:
    options = CompilerOptions(implementations={"rms_norm": "torch"}, cache_dir=str(filled))
    for same in ({}, {"options": options}, {"device": torch.device("cuda")}):
        assert is_kept(compiled_in(filled, config, **same))
    cache = GraphCache(filled)
    assert cache.load(key_of(config)) is not None
    assert all(cache.load(key_of(config, **change)) is None for change in CHANGES)


def test_a_digest_of_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "inner" / "b.py").write_text("2")
    for number, (file, content) in enumerate(
        [("inner/b.py", "3"), ("a.py", "23"), ("inner/c.py", ""), ("inner/c.py", "1")]
    ):
        before = graph_cache.source_digest(package, 1e12 + number)
        (package / file).write_text(content)
        after = graph_cache.source_digest(package, 2e12 + number)
        assert before is not None and after is not None and before != after
    (package / "inner" / "b.py").rename(package / "b.py")
    assert graph_cache.source_digest(package, 3e12) != after
    assert graph_cache.source_digest(tmp_path / "nowhere", 3e12) is None
    (package / "notes.txt").write_text("no source")
    assert graph_cache.source_digest(package, 4e12) == graph_cache.source_digest(package, 3e12)


def test_source_that_changed_since_it_was_imported(
    config: MiniQwenConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest would name graphs that older code has made."""
    file = graph_cache.PACKAGE / "compiler" / "graph.py"
    monkeypatch.setattr(graph_cache, "IMPORTED", file.stat().st_mtime - 1)
    assert key_of(config) is None


def test_the_digest_is_of_this_package() -> None:
    assert (graph_cache.PACKAGE / "compiler" / "graph_cache.py").samefile(graph_cache.__file__)
    assert graph_cache.PACKAGE.name == "minivllm"


@pytest.mark.parametrize("key", ["passes", "extra_passes", "PIPELINE"])
def test_with_a_pass_from_elsewhere_nothing_is_read_or_kept(
    key: str, tmp_path: Path, config: MiniQwenConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs: dict[str, Any] = {}
    if key == "passes":
        kwargs["passes"] = [Rename()]
    elif key == "extra_passes":
        kwargs["options"] = CompilerOptions(extra_passes=(f"{__name__}:Rename",))
    else:
        monkeypatch.setattr(pipeline, "PIPELINE", (*PIPELINE, Rename()))
    for _ in range(2):
        assert not is_kept(compiled_in(tmp_path, config, **kwargs))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kwargs",
    [
        {"options": {"dump_dir": "dump"}},
        {"options": {"verify": True}},
        {"options": {"explain": "fuse_norms"}},
        {"options": {"bisect": "numerics"}},
        {"observers": [lambda graph, stage: None]},
    ],
    ids=["dump_dir", "verify", "explain", "bisect", "observers"],
)
def test_who_looks_at_the_stages_gets_them(
    kwargs: dict[str, Any],
    filled: Path,
    tmp_path: Path,
    config: MiniQwenConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = CompilerOptions(**kwargs.get("options", {}))
    compiled = compiled_in(filled, config, **{**kwargs, "options": options}, say=lambda text: None)
    assert not is_kept(compiled)


def test_inspect_shows_the_stages_that_it_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["+model=tiny", f"compiler.cache_dir={tmp_path}"], inspect) == 0
        assert "compiled: trace " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# what goes wrong


def without_an_end(text: str) -> str:
    return text[: len(text) // 2]


BROKEN: list[Callable[[str], str]] = [
    lambda text: "",
    without_an_end,
    lambda text: "[]",
    lambda text: "{}",
    lambda text: "\x00" * len(text),
    lambda text: text.replace('"block_size": 16', '"block_size": 32', 1),
    lambda text: text.replace("minivllm.silu_mul.default", "minivllm.silu_mull.default"),
    lambda text: text.replace("minivllm.silu_mul.default", "minivllm.silu_mul"),
    lambda text: text.replace('["silu_mul_default", ', '["silu_mull_default", '),
    lambda text: text.replace('"prefill": {\n"phase"', '"other": {\n"phase"'),
    lambda text: text.replace('"float32"', '"float"'),
    lambda text: text.replace('"float32"', '"nn"'),
    lambda text: text.replace('"name": "canonicalize"', '"names": "canonicalize"'),
    # what would become code, or call what no graph calls
    lambda text: text.replace('"placeholder", "positions"', '"placeholder", "positions=print()"'),
    lambda text: text.replace('"get_attr", "norm.weight"', '"get_attr", "norm.weights"'),
    lambda text: text.replace('"call_function", "operator.getitem"', '"call_method", "clone"'),
    lambda text: text.replace("minivllm.silu_mul.default", "_test.get_first.default"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_file_is_told_and_replaced(
    number: int, copied: Path, config: MiniQwenConfig, caplog: pytest.LogCaptureFixture
) -> None:
    whole = copied.read_text()
    broken = BROKEN[number](whole)
    assert broken != whole
    copied.write_text(broken)
    cache, key = GraphCache(copied.parent), key_of(config)
    assert cache.load(key) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{copied} is broken (" in record.getMessage()
    assert "will be replaced" in record.getMessage()


def test_behind_a_broken_file_comes_a_compilation(
    copied: Path, config: MiniQwenConfig, caplog: pytest.LogCaptureFixture
) -> None:
    whole = copied.read_text()
    copied.write_bytes(b"\xff" + whole.encode()[:1000])
    assert not is_kept(compiled_in(copied.parent, config))
    assert len(caplog.records) == 1
    assert is_kept(compiled_in(copied.parent, config))
    assert len(caplog.records) == 1
    assert list(copied.parent.iterdir()) == [copied]
    without_times = [
        [line for line in text.splitlines() if '"seconds"' not in line]
        for text in (copied.read_text(), whole)
    ]
    assert without_times[0] == without_times[1]


@pytest.mark.parametrize("place", ["taken", "taken/folder"])
def test_where_nothing_can_be_written(
    place: str, tmp_path: Path, config: MiniQwenConfig, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file of someone")
    assert not is_kept(compiled_in(tmp_path / place, config))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(tmp_path / "taken") in record.getMessage()
    assert "compiler.cache_dir=off" in record.getMessage()
    assert (tmp_path / "taken").read_text() == "a file of someone"


def test_a_write_that_fails_leaves_nothing(
    filled: Path,
    tmp_path: Path,
    config: MiniQwenConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    key = key_of(config)
    kept = GraphCache(filled).load(key)
    assert kept is not None
    monkeypatch.setattr(os, "replace", full)
    GraphCache(tmp_path).store(key, kept.graphs, kept.reports)
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_many_write_and_read_one_file(
    filled: Path, tmp_path: Path, config: MiniQwenConfig, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of(config)
    kept = GraphCache(filled).load(key)
    assert kept is not None
    found: list[KeptGraphs | None] = []
    start = threading.Barrier(4)

    def work(writes: bool) -> None:
        cache = GraphCache(tmp_path)
        start.wait()
        for _ in range(8):
            if writes:
                cache.store(key, kept.graphs, kept.reports)
            found.append(cache.load(key))

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.records == []
    assert len(found) == 32 and sum(f is not None for f in found) >= 16
    assert all(f.reports == kept.reports for f in found if f is not None)
    assert [file.name for file in tmp_path.iterdir()] == [GraphCache(tmp_path).file(key).name]


def test_the_folder_is_bounded(
    filled: Path, tmp_path: Path, config: MiniQwenConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = GraphCache(tmp_path)
    kept = GraphCache(filled).load(key_of(config))
    assert kept is not None
    monkeypatch.setattr(graph_cache, "MOST_FILES", 3)
    others = [tmp_path / name for name in ("graphs-of-mine.json", "notes.json")]
    for other in others:
        other.write_text("of someone")
    half = tmp_path / f"graphs-{'0' * 64}.abc.tmp"  # of a process that was killed
    half.write_text("{")
    os.utime(half, (1, 1))
    keys = [key_of(config, block_size=size) for size in range(1, 6)]
    for age, key in enumerate(keys[:3]):
        cache.store(key, kept.graphs, kept.reports)
        os.utime(cache.file(key), (100 + age, 100 + age))
    assert not half.exists()
    assert cache.load(keys[0]) is not None  # now it was used last
    cache.store(keys[3], kept.graphs, kept.reports)
    left = {cache.file(keys[n]) for n in (0, 2, 3)}
    assert set(tmp_path.iterdir()) == {*left, *others}


# where it is


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder(None) is None, "tests read nothing of the user's: conftest.py"
    assert os.environ["XDG_CACHE_HOME"] not in ("", os.path.expanduser("~/.cache"))
    monkeypatch.undo()
    assert cache_folder("off") is None
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder("~/graphs") == Path("/home/someone/graphs")
    assert cache_folder("graphs") == Path("graphs")


def test_what_the_option_takes() -> None:
    with pytest.raises(UserError, match=r"cache_dir: '' is not one of: off, a folder or null"):
        CompilerOptions(cache_dir="")
    with pytest.raises(UserError, match=r"compiler.cache_dir cannot be honoured"):
        CompilerOptions(mode="reference", cache_dir="graphs")


def test_the_default_folder(tmp_path: Path) -> None:
    """In a process of its own, since here there is none."""
    program = (
        "import os, sys\n"
        "from minivllm.compiler.graph_cache import cache_folder\n"
        "for os.environ['XDG_CACHE_HOME'] in sys.argv[1:]: print(cache_folder(None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "relative", ""],
        env={**os.environ, "HOME": "/home/someone"},
        capture_output=True,
        text=True,
        check=True,
    )
    default = "/home/someone/.cache/minivllm"
    assert done.stdout.splitlines() == [f"{tmp_path}/minivllm", default, default]


START = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from minivllm import LLM, SamplingParams
from minivllm.config import CompilerOptions, EngineConfig, ModelOptions, RuntimeOptions
llm = LLM.from_config(EngineConfig(
    ModelOptions(path="asset://tiny", skip_tokenizer_init=True),
    CompilerOptions(cache_dir=sys.argv[1] if len(sys.argv) > 1 else None),
    RuntimeOptions(device="cpu", max_num_seqs=4, kv_cache_memory_bytes=2**22),
))
(output,) = llm.generate([list(range(3, 90))], SamplingParams(temperature=0, max_tokens=12))
heavy = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
print(json.dumps([output.outputs[0].token_ids, heavy]))
"""


def start(env: Mapping[str, str], *arguments: str) -> tuple[list[int], list[str], str]:
    """Tokens, heavy modules and the log of a process that starts an engine."""
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout.splitlines()[-1]), done.stderr)


@pytest.mark.slow
def test_a_second_start_traces_nothing(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    tokens, heavy, log = start(env)
    assert len(tokens) == 12 and heavy == ["torch._dynamo", "sympy"]
    assert "start: trace " in log
    (file,) = (tmp_path / "minivllm").iterdir()
    written = file.read_bytes()
    again, heavy, log = start(env)
    assert (again, heavy) == (tokens, [])
    assert f"start: {CACHE} " in log
    assert file.read_bytes() == written
    again, heavy, log = start(env, "off")
    assert again == tokens and "start: trace " in log
    again, heavy, log = start(env, str(tmp_path / "other"))
    assert again == tokens and "start: trace " in log
    assert [f.name for f in (tmp_path / "other").iterdir()] == [file.name]


def test_a_trace_is_the_only_way_without_a_file(
    filled: Path, config: MiniQwenConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(compile_module, "trace", never)
    assert is_kept(compiled_in(filled, config))
    with pytest.raises(AssertionError, match="traced"):
        compiled_in(filled, config, block_size=2 * BLOCK_SIZE)
    with pytest.raises(AssertionError, match="traced"):
        compile_model(config, torch.float32, CompilerOptions(), block_size=BLOCK_SIZE)
