"""The whole compilation: one trace, two graphs, and what must hold of them."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter

import pytest
import torch
from toy_graphs import aten, code, tiny_config

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.contract import check, is_mutation, mutated_arguments
from minivllm.compiler.graph import PHASES, Graph, StateSpec, WeightPart
from minivllm.compiler.pipeline import PIPELINE
from minivllm.compiler.runner import CompileError
from minivllm.config import CompilerOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS

# pass: (sites found, calls behind it in float32, in bfloat16), for one layer of each kind; where
# prefill differs from decode, two numbers
GOLDEN_COUNTS: dict[str, tuple[int, int | tuple[int, int], int | tuple[int, int]]] = {
    "fuse_norms": (8, 99, 107),  # 5 of layers, 2 of heads, 1 gated
    "fuse_residual_add": (4, 102, 110),
    "merge_linears": (4, 110, 118),
    "fuse_silu_mul": (2, 108, 116),
    "fold_gate": (1, 92, 94),
    "fuse_qk_norm_rope": (1, 64, 64),  # from here on the casts are all inside ops
    "fuse_output_gate": (1, 63, 63),
    "select_logits": (1, 64, 64),
    "fuse_linear_epilogues": (6, 51, 51),  # an MLP's two and a projection of each layer
    "fuse_linear_prologues": (2, 47, 47),
    "decode_linears": (3, 47, 47),
    "lower_mixers": (2, (78, 55), (78, 55)),
    "lower_attention": (1, (79, 56), (79, 56)),
    "inplace_state": (2, (65, 48), (65, 48)),
    "fuse_conv_qk_norm": (1, 61, 61),  # a split and three views less
    "prefetch_states": (2, 48, 48),
    "keep_snapshots": (2, 61, 61),
}
EAGER_COUNTS = {
    "select_logits": (1, 149, 182),
    "lower_mixers": (2, (163, 156), (196, 189)),
    "lower_attention": (1, (164, 157), (197, 190)),
}
ONLY_IN = {
    "prefill": ("select_logits", "fuse_conv_qk_norm", "keep_snapshots"),
    "decode": (
        "fuse_linear_epilogues",
        "fuse_linear_prologues",
        "decode_linears",
        "prefetch_states",
    ),
}
OPAQUE = ("causal_conv1d", "gated_delta_rule", "fused_gated_delta_rule", "attention")


@pytest.fixture(params=["float32", "bfloat16"])
def model(
    request: pytest.FixtureRequest, compiled: CompiledModel, half_compiled: CompiledModel
) -> CompiledModel:
    return compiled if request.param == "float32" else half_compiled


def test_both_graphs(model: CompiledModel) -> None:
    assert set(model.graphs) == set(PHASES)
    assert model.prefill is model.graphs["prefill"] and model.decode is model.graphs["decode"]
    for phase, graph in model.graphs.items():
        assert graph.phase == phase
        check(graph, may_mutate=True)
        for name in OPAQUE:
            assert graph.nodes(OPS[name].overload) == []
    prefill, decode = (set(model.graphs[phase].input_names) for phase in PHASES)
    assert decode - prefill == {"block_table"}  # a prefill has its blocks packed
    assert prefill - decode == {
        "num_computed_tokens",
        "cu_seqlens",
        "chunk_indices",
        "chunk_slots",
        "kv_indptr",
        "kv_indices",
        "logits_rows",
    }


def test_the_source_is_as_it_was_traced(
    model: CompiledModel, source: Graph, half_source: Graph
) -> None:
    dtype = model.source.weights["norm.weight"].dtype
    fresh = source if dtype == torch.float32 else half_source
    assert model.source.phase == "source"
    assert code(model.source) == code(fresh)
    assert model.source.states == {}
    assert list(model.source.weights) == list(fresh.weights)
    assert model.source.symbols.keys() == fresh.symbols.keys()


def test_the_phases_share_their_state(model: CompiledModel) -> None:
    assert model.prefill.states == model.decode.states
    dtype = model.source.weights["norm.weight"].dtype
    assert model.decode.states == {
        "state.layers.0.conv": StateSpec("slot", (80, 4), dtype),
        "state.layers.0.recurrent": StateSpec("slot", (4, 12, 8), torch.float32),
        "state.layers.1.k_cache": StateSpec("block", (16, 2, 16), dtype),
        "state.layers.1.v_cache": StateSpec("block", (16, 2, 16), dtype),
    }


def test_the_phases_share_their_weights(model: CompiledModel, eager: CompiledModel) -> None:
    """Under one recipe: what one of them merged differently would be held twice."""
    assert eager.prefill.weights == eager.decode.weights == eager.source.weights
    assert model.prefill.weights == model.decode.weights
    for graph in model.graphs.values():
        parts = [
            part.name
            for name, spec in graph.weights.items()
            for part in spec.parts or (WeightPart(name, 0, spec.shape[0]),)
        ]
        assert sorted(parts) == sorted(model.source.weights)


@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_counts(
    config: MiniQwenConfig,
    compiled: CompiledModel,
    half_compiled: CompiledModel,
    eager: CompiledModel,
    mode: str,
    dtype: torch.dtype,
) -> None:
    golden = GOLDEN_COUNTS if mode == "compiled" else EAGER_COUNTS
    exact = dtype == torch.float32
    if mode == "compiled":
        model = compiled if exact else half_compiled
    else:
        model = eager if exact else compile_model(config, dtype, CompilerOptions(mode="eager"))
    for index, phase in enumerate(PHASES):
        reports = [r for r in model.reports if r.phase == phase]
        first, *rest = reports
        traced, canonical = (216, 148) if exact else (216, 181)
        assert (first.name, first.expected) == ("canonicalize", None)
        assert (first.calls_before, first.calls_after) == (traced, canonical)
        assert first.matches == traced - canonical
        names = [n for n in golden if n not in ONLY_IN[PHASES[1 - index]]]
        assert [r.name for r in rest] == names
        for before, report in zip(reports, rest, strict=False):
            sites, *calls = golden[report.name]
            after = calls[0 if exact else 1]
            after = after[index] if isinstance(after, tuple) else after
            assert (report.matches, report.expected) == (sites, sites), report
            assert (report.calls_before, report.calls_after) == (before.calls_after, after), report
        assert rest[-1].calls_after == len(model.graphs[phase].nodes())


@pytest.mark.parametrize("phase", PHASES)
def test_golden_ops(model: CompiledModel, phase: str) -> None:
    """What a step calls: linears, our ops, views, and nothing that computes besides."""
    graph = model.graphs[phase]
    names = Counter(str(n.target).removesuffix(".default") for n in graph.nodes())
    assert names.pop("aten.index_select", 0) == (1 if phase == "prefill" else 0)  # logits_rows
    views = ("aten.unflatten.int", "aten.flatten.using_ints", "aten.chunk", "aten.split_with_sizes")
    found = {name: names.pop(name, 0) for name in (*views, "<built-in function getitem>")}
    counts = (4, 2, 1, 4, 25) if phase == "prefill" else (7, 0, 1, 3, 21)
    assert found == dict(zip((*views, "<built-in function getitem>"), counts, strict=True))
    linears = {
        "aten.linear": 9,  # four a layer and the head
        "minivllm.add_rms_norm": 4,
        "minivllm.gated_rms_norm": 1,
        "minivllm.silu_mul": 2,
        "minivllm.sigmoid_mul": 1,
    }
    if phase == "decode":
        linears = {
            "minivllm.linear": 3,
            "minivllm.linear_silu_mul": 2,
            "minivllm.linear_add_rms_norm": 2,
            "minivllm.gated_rms_norm_linear_add_rms_norm": 1,
            "minivllm.sigmoid_mul_linear_add_rms_norm": 1,
        }
    assert names == linears | {
        "aten.embedding": 1,
        "minivllm.rms_norm": 1,
        "minivllm.qk_norm_rope": 1,
        f"minivllm.causal_conv1d_{'qkv_' if phase == 'prefill' else ''}{phase}_slots": 1,
        f"minivllm.fused_gated_delta_rule_{phase}_slots": 1,
        "minivllm.paged_kv_write": 1,
        f"minivllm.paged_attention_{phase}": 1,
    }


def test_reports_come_in_order(model: CompiledModel) -> None:
    fusions = [
        "canonicalize",
        "fuse_norms",
        "fuse_residual_add",
        "merge_linears",
        "fuse_silu_mul",
        "fold_gate",
        "fuse_qk_norm_rope",
        "fuse_output_gate",
    ]
    few_rows = ["fuse_linear_epilogues", "fuse_linear_prologues", "decode_linears"]
    lowering = ["lower_mixers", "lower_attention", "inplace_state"]
    prefill = ["fuse_conv_qk_norm", "keep_snapshots"]
    assert [(r.phase, r.name) for r in model.reports] == [
        *(("prefill", n) for n in [*fusions, "select_logits", *lowering, *prefill]),
        *(("decode", n) for n in [*fusions, *few_rows, *lowering, "prefetch_states"]),
    ]
    assert set(model.seconds) == {"trace", *PHASES}
    for phase in PHASES:
        spent = sum(r.seconds for r in model.reports if r.phase == phase)
        assert 0 < spent <= model.seconds[phase]


def test_each_state_is_read_and_written_once(model: CompiledModel, eager: CompiledModel) -> None:
    ops = {"conv": "causal_conv1d", "recurrent": "fused_gated_delta_rule"}
    for graph in (*model.graphs.values(), *eager.graphs.values()):
        for name, spec in graph.states.items():
            (node,) = (n for n in graph.fx.nodes if n.target == name)
            users = Counter(str(user.target) for user in node.users)
            if spec.kind == "slot" and graph in eager.graphs.values():
                assert users == {"aten.index_select.default": 1, "aten.index_copy_.default": 1}
            elif spec.kind == "slot":
                op = ops[name.rpartition(".")[2]]
                if op == "causal_conv1d" and graph.phase == "prefill":
                    op += "_qkv"
                assert users == {f"minivllm.{op}_{graph.phase}_slots.default": 1}
                (user,) = node.users
                assert mutated_arguments(user) == [node]
                assert user.args[user.args.index(node) + 1] is graph.input("state_slots")
            else:
                assert users == {
                    "minivllm.paged_kv_write.default": 1,
                    f"minivllm.paged_attention_{graph.phase}.default": 1,
                }


def test_no_copy_of_a_pool(model: CompiledModel) -> None:
    """Nothing but a write returns a value as large as a pool; what is gathered has a row a slot."""
    for graph in model.graphs.values():
        pools = {str(graph.symbols["slots"]), str(graph.symbols["num_blocks"])}
        for node in graph.nodes():
            values = node.meta["val"]
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, torch.Tensor) and not is_mutation(node):
                    assert not pools & {str(s) for s in value.shape}, node
        for node in graph.nodes(aten.index_select.default):
            if node.args[0].op == "get_attr" and str(node.args[0].target) in graph.states:
                assert node.args[2] is graph.input("state_slots")


def test_no_device_and_no_length_is_written_down(model: CompiledModel) -> None:
    for graph in model.graphs.values():
        for node in graph.nodes():
            values = [*node.args, *node.kwargs.values()]
            assert not any(isinstance(v, (torch.device, torch.SymInt)) for v in values)
            if node.target is not operator.getitem:
                assert node.target.namespace in ("aten", "minivllm")


def test_the_order_of_reads_and_writes(model: CompiledModel, eager: CompiledModel) -> None:
    """A state is gathered before it is scattered, a key written before it is read."""
    for graph in (*model.graphs.values(), *eager.graphs.values()):
        order = {node: i for i, node in enumerate(graph.fx.nodes)}
        for name, spec in graph.states.items():
            (pool,) = (n for n in graph.fx.nodes if n.target == name)
            if spec.kind == "slot" and graph not in eager.graphs.values():
                continue  # one op does both
            write = next(u for u in pool.users if is_mutation(u))
            read = next(u for u in pool.users if not is_mutation(u))
            assert (order[read] < order[write]) == (spec.kind == "slot")


def test_eager_runs_the_mandatory_passes(eager: CompiledModel, compiled: CompiledModel) -> None:
    """Its ops are the model's own and those that state needs; every fusion is switched off."""
    for phase, graph in eager.graphs.items():
        check(graph, may_mutate=True)
        names = {n.target.name() for n in graph.nodes() if n.target is not operator.getitem}
        assert {n for n in names if n.startswith("minivllm::")} == {
            f"minivllm::causal_conv1d_{phase}",
            f"minivllm::gated_delta_rule_{phase}",
            "minivllm::paged_kv_write",
            f"minivllm::paged_attention_{phase}",
        }
        assert graph.states == compiled.graphs[phase].states


def test_eager_is_compiled_without_its_optional_passes(
    eager: CompiledModel, config: MiniQwenConfig
) -> None:
    optional = tuple(p.name for p in PIPELINE if not p.mandatory)
    model = compile_model(config, torch.float32, CompilerOptions(disable=optional), block_size=16)
    for phase in PHASES:
        assert code(eager.graphs[phase]) == code(model.graphs[phase])


def test_stop_after_and_other_sizes(config: MiniQwenConfig) -> None:
    options = CompilerOptions(mode="eager", stop_after="lower_mixers")
    model = compile_model(
        config, torch.bfloat16, options, state_dtype=torch.bfloat16, block_size=64
    )
    assert [r.name for r in model.reports if r.phase == "decode"] == [
        "canonicalize",
        "lower_mixers",
    ]
    assert model.decode.states["state.layers.0.recurrent"].dtype == torch.bfloat16
    assert len(model.decode.nodes(OPS["attention"].overload)) == 1
    assert "state.layers.1.k_cache" not in model.decode.states


def test_block_size(config: MiniQwenConfig) -> None:
    model = compile_model(config, torch.float32, CompilerOptions())
    assert model.prefill.states["state.layers.1.v_cache"].shape == (64, 2, 16)
    model = compile_model(config, torch.float32, CompilerOptions(), block_size=32)
    assert model.prefill.states["state.layers.1.v_cache"].shape == (32, 2, 16)


@pytest.mark.parametrize("options", [{"disable": ("fuse",)}, {"stop_after": "fuse"}])
def test_names_are_checked_before_the_trace(
    config: MiniQwenConfig, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    import minivllm.compiler.compile as module

    def never(*args: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(module, "trace", never)
    with pytest.raises(UserError, match=r"no pass 'fuse'; choose from canonicalize, "):
        compile_model(config, torch.float32, CompilerOptions(**options))


def test_a_config_that_is_not_the_graphs(
    config: MiniQwenConfig, source: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts come from the config: a model that builds fewer layers is caught."""
    import minivllm.compiler.compile as module

    monkeypatch.setattr(module, "trace", lambda config, dtype: source)
    deeper = tiny_config(
        num_hidden_layers=4, layer_types=("linear_attention", "full_attention") * 2
    )
    with pytest.raises(CompileError) as error:
        compile_model(deeper, torch.float32, CompilerOptions())
    message, *details = str(error.value).splitlines()
    assert details[0] == "  layers.2.input_layernorm: no candidate; the graph has no such layer"
    assert message == (
        "pass fuse_norms on the prefill graph: matched 8 of 15 sites; "
        "unmatched: layers.2.input_layernorm, layers.2.post_attention_layernorm, "
        "layers.3.input_layernorm, layers.3.post_attention_layernorm, layers.3.mixer.q_norm, "
        "layers.3.mixer.k_norm, layers.2.mixer.norm; unexpected: none "
        "(passes before it: canonicalize)"
    )
    with pytest.raises(CompileError) as error:
        compile_model(deeper, torch.float32, CompilerOptions(mode="eager"))
    assert str(error.value).splitlines()[0] == (
        "pass lower_mixers on the prefill graph: matched 2 of 4 sites; "
        "unmatched: layers.2.conv, layers.2.recurrent; unexpected: none "
        "(passes before it: canonicalize, select_logits)"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ("linear_attention",) * 2},
        {"layer_types": ("full_attention",) * 2},
        {"tie_word_embeddings": False, "attention_bias": True, "linear_num_key_heads": 4},
    ],
)
def test_other_architectures(config: MiniQwenConfig, changes: dict) -> None:
    changed = dataclasses.replace(config, **changes)
    model = compile_model(changed, torch.float32, CompilerOptions())
    kinds = Counter(s.kind for s in model.decode.states.values())
    assert kinds["slot"] == 2 * len(changed.linear_layers)
    assert kinds["block"] == 2 * len(changed.attention_layers)
