"""The whole compilation: one trace, two graphs, and what must hold of them."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter

import pytest
import torch
from toy_graphs import aten, code, tiny_config

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.contract import check, is_mutation
from minivllm.compiler.graph import PHASES, Graph, StateSpec
from minivllm.compiler.runner import CompileError
from minivllm.config import CompilerOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS

# pass: (matches, expected) in each phase, for one layer of each kind
GOLDEN_COUNTS = {
    ("prefill", "select_logits"): (1, 1),
    ("prefill", "lower_mixers"): (2, 2),
    ("prefill", "lower_attention"): (1, 1),
    ("decode", "lower_mixers"): (2, 2),
    ("decode", "lower_attention"): (1, 1),
}
OPAQUE = ("causal_conv1d", "gated_delta_rule", "attention")


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
    assert set(model.decode.input_names) < set(model.prefill.input_names)


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
    assert model.prefill.weights == model.decode.weights == model.source.weights


def test_golden_counts(model: CompiledModel) -> None:
    counts = {
        (r.phase, r.name): (r.matches, r.expected) for r in model.reports if r.expected is not None
    }
    assert counts == GOLDEN_COUNTS
    calls = {(r.phase, r.name): (r.calls_before, r.calls_after) for r in model.reports}
    dtype = model.source.weights["norm.weight"].dtype
    traced, canonical = (216, 148) if dtype == torch.float32 else (216, 181)
    for phase in PHASES:
        assert calls[phase, "canonicalize"] == (traced, canonical)
    assert calls["prefill", "select_logits"] == (canonical, canonical + 1)
    assert calls["prefill", "lower_mixers"] == (canonical + 1, canonical + 15)
    assert calls["decode", "lower_mixers"] == (canonical, canonical + 8)
    for phase in PHASES:
        assert calls[phase, "lower_attention"][1] == len(model.graphs[phase].nodes())


def test_reports_come_in_order(model: CompiledModel) -> None:
    assert [(r.phase, r.name) for r in model.reports] == [
        ("prefill", "canonicalize"),
        ("prefill", "select_logits"),
        ("prefill", "lower_mixers"),
        ("prefill", "lower_attention"),
        ("decode", "canonicalize"),
        ("decode", "lower_mixers"),
        ("decode", "lower_attention"),
    ]
    assert set(model.seconds) == {"trace", *PHASES}
    for phase in PHASES:
        spent = sum(r.seconds for r in model.reports if r.phase == phase)
        assert 0 < spent <= model.seconds[phase]


def test_each_state_is_read_and_written_once(model: CompiledModel) -> None:
    for graph in model.graphs.values():
        for name, spec in graph.states.items():
            (node,) = (n for n in graph.fx.nodes if n.target == name)
            users = Counter(str(user.target) for user in node.users)
            if spec.kind == "slot":
                assert users == {"aten.index_select.default": 1, "aten.index_copy_.default": 1}
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


def test_the_order_of_reads_and_writes(model: CompiledModel) -> None:
    """A state is gathered before it is scattered, a key written before it is read."""
    for graph in model.graphs.values():
        order = {node: i for i, node in enumerate(graph.fx.nodes)}
        for name, spec in graph.states.items():
            (pool,) = (n for n in graph.fx.nodes if n.target == name)
            write = next(u for u in pool.users if is_mutation(u))
            read = next(u for u in pool.users if not is_mutation(u))
            assert (order[read] < order[write]) == (spec.kind == "slot")


def test_eager_is_compiled_for_now(compiled: CompiledModel, config: MiniQwenConfig) -> None:
    eager = compile_model(config, torch.float32, CompilerOptions(mode="eager"), block_size=16)
    for phase in PHASES:
        assert code(eager.graphs[phase]) == code(compiled.graphs[phase])


def test_stop_after_and_other_sizes(config: MiniQwenConfig) -> None:
    options = CompilerOptions(stop_after="lower_mixers")
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
    model = compile_model(config, torch.float32, CompilerOptions(), block_size=64)
    assert model.prefill.states["state.layers.1.v_cache"].shape == (64, 2, 16)


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
    assert str(error.value) == (
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
