"""merge_linears: projections of one value become one, and their weights lie in one tensor."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from toy_graphs import IDS, apply, aten, code, evaluate, targets, tiny_config, traced

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import PHASES, Graph, WeightPart, WeightSpec
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.merge_linears import ALIGNMENT, MergeLinears
from minivllm.compiler.recipe import allocate, assemble
from minivllm.compiler.runner import run_passes
from minivllm.config import CompilerOptions
from minivllm.model import weights as model_weights
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights, load_weights, parameter_shapes

DTYPES = [torch.float32, torch.bfloat16]


class Projections(nn.Module):
    """Linears of one value with the given widths; `use` combines their results."""

    def __init__(self, widths: tuple[int, ...], bias: bool = False, use: Any = None) -> None:
        super().__init__()
        self.names = [f"p{i}" for i in range(len(widths))]
        for name, width in zip(self.names, widths, strict=True):
            setattr(self, name, nn.Linear(8, width, bias=bias))
        self.use = use or (lambda parts, x: torch.cat([p.sin() for p in parts], dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.use([getattr(self, name)(x) for name in self.names], x)


def merged(
    context: PassContext, body: nn.Module, sites: int, dtype: torch.dtype
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of `body` behind the pass; its output is the same, but for the sums' order."""
    graph, weights = traced(body, dtype)
    before = code(graph)
    expected = evaluate(graph, {"input_ids": IDS}, weights)
    assert apply(graph, MergeLinears(), context) == sites
    result = evaluate(graph, {"input_ids": IDS}, weights)
    error = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(result, expected, rtol=error, atol=error)
    assert (code(graph) == before) == (sites == 0)
    check_recipes(graph, weights)
    return graph, weights


def check_recipes(graph: Graph, weights: dict[str, Tensor]) -> None:
    """Every tensor lies in one place, aligned, and what is between is zero."""
    storage, views = allocate(graph.weights, "cpu")
    for name, tensor in assemble(graph.weights, weights).items():
        spec = graph.weights[name]
        assert tensor.shape == spec.shape
        covered = torch.zeros(spec.shape[0], dtype=torch.bool)
        for part in spec.parts:
            rows = slice(part.start, part.start + part.rows)
            assert not covered[rows].any(), "parts overlap"
            covered[rows] = True
            assert torch.equal(tensor[rows], weights[part.name])
            assert part.start * tensor.dtype.itemsize % ALIGNMENT == 0
            assert views[part.name].data_ptr() == storage[name][part.start :].data_ptr()
        if spec.parts:
            assert spec.shape[0] * tensor.dtype.itemsize % ALIGNMENT == 0
            assert not tensor[~covered].any() and not storage[name][~covered].any()
    assert set(views) <= set(weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(8, 16), (5, 3, 8), (1, 1), (8, 4, 4, 12), (7,) * 5])
def test_widths(
    context: PassContext, widths: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    graph, _ = merged(context, Projections(widths, bias), 1, dtype)
    (linear,) = graph.nodes(aten.linear.default)
    (split,) = graph.nodes(aten.split_with_sizes.default)
    assert linear.meta["module"] == "body"
    leaves = ("weight", "bias") if bias else ("weight",)
    joined = "+".join(f"p{i}" for i in range(len(widths)))
    names = [f"body.{joined}.{leaf}" for leaf in leaves]
    assert [n.target for n in linear.args[1:]] == names
    step = ALIGNMENT // dtype.itemsize
    padded = [-(-width // step) * step for width in widths]
    for name, leaf in zip(names, leaves, strict=True):
        spec = graph.weights[name]
        assert spec.dtype == dtype and spec.shape[0] == sum(padded)
        assert spec.parts == tuple(
            WeightPart(f"body.p{i}.{leaf}", sum(padded[:i]), width)
            for i, width in enumerate(widths)
        )
    # the parts are slices of the row, each with its width; the gaps are slices nobody reads
    offset = 0
    starts = []
    for size in split.args[1]:
        starts.append(offset)
        offset += size
    assert offset == sum(padded)
    taken = [u.args[1] for u in split.users]
    assert [(starts[i], split.args[1][i]) for i in taken] == [
        (sum(padded[:i]), width) for i, width in enumerate(widths)
    ]
    assert set(graph.weights) == {"embed_tokens.weight", *names}, "the parts are not held, too"


def test_the_padding_follows_the_dtype(context: PassContext) -> None:
    rows = []
    for dtype in DTYPES:
        graph, _ = merged(context, Projections((4, 4)), 1, dtype)
        rows.append(graph.weights["body.p0+p1.weight"].shape[0])
    assert rows == [8, 16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_readers_and_the_output(context: PassContext, dtype: torch.dtype) -> None:
    """Each part may be read by many, by nobody, or be what the graph returns."""
    merged(context, Projections((8, 8), use=lambda p, x: p[0] * p[0].exp() + p[1] * x), 1, dtype)
    merged(context, Projections((8, 8), use=lambda p, x: p[1]), 0, dtype)
    graph, _ = merged(context, Projections((8, 8, 8), use=lambda p, x: p[2] + p[0]), 1, dtype)
    assert "body.p0+p2.weight" in graph.weights


class Chain(nn.Module):
    """Projections of projections, and an input that several modules project."""

    def __init__(self) -> None:
        super().__init__()
        add = lambda p, x: p[0].sin() + p[1]  # noqa: E731
        self.first, self.second = Projections((8, 8), use=add), Projections((8, 8), use=add)
        self.other = Projections((8, 8), use=add)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.other(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_and_modules_of_one_input(context: PassContext, dtype: torch.dtype) -> None:
    """`first` and `other` read one value, but each keeps its own weight."""
    graph, _ = merged(context, Chain(), 3, dtype)
    assert [n.args[1].target for n in graph.nodes(aten.linear.default)] == [
        f"body.{name}.p0+p1.weight" for name in ("first", "second", "other")
    ]


class DifferentInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x.sin())


class BiasAndNone(nn.Module):
    """One with a bias, one without: a merged bias would need zeros for the other's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class SharedWeight(nn.Module):
    """One of the two weights is read twice: for another input, or as a table of embeddings."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x)
        if self.tied:
            return y + nn.functional.embedding(x.argmax(-1), self.a.weight)
        return self.a(y)


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + nn.functional.linear(x, self.b.weight.exp())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", [
    DifferentInputs(), BiasAndNone(), SharedWeight(True), SharedWeight(False), ComputedWeight(),
    Projections((8,)),
], ids=lambda body: f"{type(body).__name__}-{getattr(body, 'tied', '')}")  # fmt: skip
def test_what_stays_apart(context: PassContext, body: nn.Module, dtype: torch.dtype) -> None:
    graph, _ = merged(context, type(body)(*_arguments(body)), 0, dtype)
    assert all(not spec.parts for spec in graph.weights.values())


def _arguments(body: nn.Module) -> tuple[Any, ...]:
    if isinstance(body, SharedWeight):
        return (body.tied,)
    return ((8,),) if isinstance(body, Projections) else ()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model(
    canonical: Graph, half_canonical: Graph, context: PassContext, phase: str, dtype: torch.dtype
) -> None:
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [MergeLinears()], context)
    assert (report.matches, report.expected) == (4, 4)
    after = Counter(targets(graph))
    assert (before["aten.linear"], after["aten.linear"]) == (16, 9)
    assert after["aten.split_with_sizes"] - before["aten.split_with_sizes"] == 4
    weights = dummy_weights(parameter_shapes(context.config), dtype, "cpu", 0)
    check_recipes(graph, weights | constants(context.config))
    # the head reads the embedding's table, which nobody merges
    assert graph.output.args[1].target == "embed_tokens.weight"
    assert graph.weights["embed_tokens.weight"].parts == ()
    # heads of 4 are odd in bfloat16: 8 bytes each
    spec = next(s for n, s in graph.weights.items() if "in_proj_b" in n)
    assert spec.shape[0] == 80 + 48 + (8 if dtype == torch.float32 else 16)


def test_biases_of_the_model() -> None:
    config = tiny_config(attention_bias=True, layer_types=("full_attention",) * 2)
    model = compile_model(config, torch.float32, CompilerOptions(verify=True), block_size=16)
    for graph in model.graphs.values():
        for i in range(2):
            for leaf in ("weight", "bias"):
                spec = graph.weights[f"layers.{i}.mixer.q_proj+k_proj+v_proj.{leaf}"]
                assert [p.name for p in spec.parts] == [
                    f"layers.{i}.mixer.{name}_proj.{leaf}" for name in "qkv"
                ]
                assert f"layers.{i}.mixer.k_proj.{leaf}" not in graph.weights
            assert f"layers.{i}.mixer.o_proj.bias" in graph.weights


# how the recipe is executed


def save(folder: Path, weights: dict[str, Tensor]) -> None:
    """A checkpoint of the model's weights under the names of transformers."""
    names = model_weights._disk_names(weights, [])
    tensors = {
        disk: weights[plain].unsqueeze(1) if "conv1d" in plain else weights[plain]
        for disk, plain in names.items()
    }
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def odd() -> CompiledModel:
    """A model in bfloat16 whose heads and biases do not fill 16 bytes."""
    config = tiny_config(
        linear_num_key_heads=3, linear_num_value_heads=3, intermediate_size=37, attention_bias=True
    )
    return compile_model(config, torch.bfloat16, CompilerOptions(), block_size=16)


def test_the_loader_fills_the_merged_tensors(odd: CompiledModel, tmp_path: Path) -> None:
    specs = odd.prefill.weights | odd.decode.weights
    specs = {n: s for n, s in specs.items() if n != "rotary_emb.inv_freq"}
    shapes = {n: s.shape for n, s in odd.source.weights.items() if n != "rotary_emb.inv_freq"}
    plain = dummy_weights(shapes, torch.bfloat16, "cpu", seed=3)
    save(tmp_path, plain)
    storage, targets = allocate(specs, "cpu")
    assert set(targets) == set(shapes)
    loaded = load_weights(tmp_path, shapes, torch.bfloat16, "cpu", targets=targets)
    padding = 0
    for name, spec in specs.items():
        whole = storage[name]
        parts = spec.parts or (WeightPart(name, 0, spec.shape[0]),)
        covered = torch.zeros(spec.shape[0], dtype=torch.bool)
        for part in parts:
            view = loaded[part.name]
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            start = part.start * whole.stride(0) * whole.itemsize
            assert view.data_ptr() == whole.data_ptr() + start
            assert view.is_contiguous() and view.shape == shapes[part.name]
            assert torch.equal(view, plain[part.name])
            covered[part.start : part.start + part.rows] = True
        assert not whole[~covered].any()
        padding += int((~covered).sum()) * whole[0].numel() * whole.itemsize
    # not a byte beside the weights and their padding
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in storage.values()}
    held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.values()}
    assert sum(held.values()) == sum(t.nbytes for t in plain.values()) + padding
    assert 0 < padding < 0.1 * sum(held.values())


def test_dummy_weights_fill_the_merged_tensors(odd: CompiledModel) -> None:
    specs = {n: s for n, s in odd.decode.weights.items() if n != "rotary_emb.inv_freq"}
    shapes = {n: s.shape for n, s in odd.source.weights.items() if n != "rotary_emb.inv_freq"}
    storage, targets = allocate(specs, "cpu")
    plain = dummy_weights(shapes, torch.bfloat16, "cpu", 3, targets)
    assert all(plain[name].data_ptr() == target.data_ptr() for name, target in targets.items())
    expected = assemble(specs, dummy_weights(shapes, torch.bfloat16, "cpu", 3))
    for name, tensor in storage.items():
        assert torch.equal(tensor, expected[name])


def test_nothing_is_held_twice() -> None:
    """Two recipes for one tensor, as if the phases had merged differently."""
    spec = WeightSpec((8, 4), torch.float32)
    both = WeightSpec((16, 4), torch.float32, (WeightPart("a", 0, 8), WeightPart("b", 8, 8)))
    with pytest.raises(AssertionError, match="a would be held twice"):
        allocate({"a": spec, "a+b": both}, "cpu")


PEAK = """
import sys
from pathlib import Path
import torch
from minivllm.compiler.graph import WeightPart, WeightSpec
from minivllm.compiler.recipe import allocate
from minivllm.model.weights import load_weights
def kib(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0])
names = [[f"layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up")] for i in range(4)]
specs = {
    f"layers.{i}.mlp.gate_proj+up_proj.weight": WeightSpec(
        (4096, 2048), torch.float32,
        tuple(WeightPart(n, 2048 * j, 2048) for j, n in enumerate(pair)),
    )
    for i, pair in enumerate(names)
}
shapes = {n: (2048, 2048) for pair in names for n in pair}
before = kib("VmRSS")
storage, targets = allocate(specs, "cpu")
load_weights(Path(sys.argv[1]), shapes, torch.float32, "cpu", progress=False, targets=targets)
for i, pair in enumerate(names):
    merged = storage[f"layers.{i}.mlp.gate_proj+up_proj.weight"]
    assert merged[0, 0] == 2 * i and merged[2048, 0] == 2 * i + 1
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file() or "VmHWM" not in Path("/proc/self/status").read_text(),
    reason="the peak of a process is read from Linux's /proc",
)
def test_peak_memory_is_weights_plus_one_stored_tensor(tmp_path: Path) -> None:
    """As without merging: tests/model/test_weights.py measures that."""
    weight_map = {}
    for i in range(8):
        name = f"model.layers.{i // 2}.mlp.{('gate', 'up')[i % 2]}_proj.weight"
        save_file({name: torch.full((2048, 2048), float(i))}, tmp_path / f"part{i}.safetensors")
        weight_map[name] = f"part{i}.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    result = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(model_weights.__file__).parents[2],
    )
    tensor = 2048 * 2048 * 4 // 1024  # KiB
    assert 8 * tensor * 0.9 < int(result.stdout) < 9 * tensor + tensor // 2


def test_a_slice_of_the_merged_row_is_what_its_reader_gets(odd: CompiledModel) -> None:
    """Every reader of a merged linear takes its own part by index, and never a gap."""
    for graph in odd.graphs.values():
        for split in graph.nodes(aten.split_with_sizes.default):
            linear = split.args[0]
            if linear.target is not aten.linear.default:
                continue
            parts = graph.weights[str(linear.args[1].target)].parts
            sizes = list(split.args[1])
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            wanted = {(p.start, p.rows) for p in parts}
            for user in split.users:
                assert user.target is operator.getitem
                i = user.args[1]
                assert (ends[i] - sizes[i], sizes[i]) in wanted
            assert len(split.users) == len(parts)
