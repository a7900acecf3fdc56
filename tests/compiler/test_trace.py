"""The trace: what `torch.export` wrote is the plain model, for every length."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from toy_graphs import aten, evaluate, tiny_config

from minivllm.compiler.graph import SYMBOLS, Graph
from minivllm.compiler.trace import meta_model, trace
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen, constants
from minivllm.model.weights import dummy_weights, parameter_shapes
from minivllm.ops import OPS

CHANGES: dict[str, dict[str, Any]] = {
    "untied_with_bias": {"tie_word_embeddings": False, "attention_bias": True},
    "attention_first": {
        "num_hidden_layers": 3,
        "layer_types": ("full_attention", "linear_attention", "linear_attention"),
        "linear_num_key_heads": 4,
        "num_key_value_heads": 1,
    },
    "deep": {
        "num_hidden_layers": 12,
        "layer_types": (
            *(*("linear_attention",) * 3, "full_attention"),
            *("full_attention", "full_attention", "linear_attention"),
            *("full_attention", "linear_attention", "linear_attention"),
            *("full_attention", "linear_attention"),
        ),
    },
    "one_kind": {"num_hidden_layers": 3, "layer_types": ("linear_attention",) * 3},
    "one_layer": {"num_hidden_layers": 1, "layer_types": ("full_attention",)},
}


def weights_of(config: MiniQwenConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return dummy_weights(parameter_shapes(config), dtype, "cpu", seed=0) | constants(config)


def plain_model(config: MiniQwenConfig, dtype: torch.dtype = torch.float32) -> MiniQwen:
    model = meta_model(config, dtype)
    weights = weights_of(config, dtype)
    model.rotary_emb.inv_freq = weights.pop("rotary_emb.inv_freq")
    model.load_state_dict(weights, assign=True)
    return model


def run_graph(graph: Graph, config: MiniQwenConfig, ids: Tensor, positions: Tensor) -> Tensor:
    dtype = graph.weights["norm.weight"].dtype
    # without the assertions, which speak of the device of the trace
    graph = graph.clone("source")
    for node in graph.nodes(aten._assert_tensor_metadata.default):
        graph.fx.erase_node(node)
    return evaluate(graph, {"input_ids": ids, "positions": positions}, weights_of(config, dtype))


def test_inputs_output_and_symbols(source: Graph) -> None:
    assert source.phase == "source"
    assert source.input_names == ("input_ids", "positions")
    assert set(source.symbols) == set(SYMBOLS)
    assert len({str(s) for s in source.symbols.values()}) == len(SYMBOLS)
    value = source.output.meta["val"]
    assert ([source.named(s) for s in value.shape], value.dtype) == (
        ["tokens", "61"],
        torch.float32,
    )
    assert source.states == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_state_dict(
    config: MiniQwenConfig, source: Graph, half_source: Graph, dtype: torch.dtype
) -> None:
    graph = source if dtype == torch.float32 else half_source
    shapes = {name: spec.shape for name, spec in graph.weights.items()}
    assert shapes == parameter_shapes(config) | {"rotary_emb.inv_freq": (4,)}
    kinds = {name: spec.dtype for name, spec in graph.weights.items()}
    assert kinds.pop("rotary_emb.inv_freq") == torch.float32
    assert set(kinds.values()) == {dtype}
    nodes = [n for n in graph.fx.nodes if n.op == "get_attr"]
    assert sorted(str(n.target) for n in nodes) == sorted(shapes)  # each once, tied ones too
    for node in nodes:
        assert tuple(node.meta["val"].shape) == shapes[str(node.target)]
        assert node.meta["val"].device.type == "meta"


def test_a_tied_head_is_the_embedding(source: Graph) -> None:
    (embedding,) = source.nodes(aten.embedding.default)
    assert source.output.args[1] is embedding.args[0]


def test_every_call_says_what_and_where(config: MiniQwenConfig, source: Graph) -> None:
    modules = {name for name, _ in meta_model(config, torch.float32).named_modules()}
    for node in source.nodes():
        assert "val" in node.meta
        assert node.meta["module"] in modules
        file, line = node.meta["source"].split(":")
        assert file.endswith(".py") and int(line) > 0
    (delta_rule,) = source.nodes(OPS["gated_delta_rule"].overload)
    assert delta_rule.meta["module"] == "layers.0.mixer"
    assert delta_rule.meta["source"].startswith("model/miniqwen.py:")
    (attention,) = source.nodes(OPS["attention"].overload)
    assert attention.meta["module"] == "layers.1.mixer"
    (conv,) = source.nodes(OPS["causal_conv1d"].overload)
    assert conv.meta["module"] == "layers.0.mixer.conv1d"


def test_only_aten_and_our_ops_before_any_decomposition(source: Graph) -> None:
    for node in source.nodes():
        if node.target is not operator.getitem:
            assert isinstance(node.target, torch._ops.OpOverload)
            assert node.target.namespace in ("aten", "minivllm")
    # what a decomposition would have taken apart
    assert len(source.nodes(aten.linear.default)) == 16
    assert len(source.nodes(aten.silu.default)) == 3
    assert len(source.nodes(aten.softplus.default)) == 1
    sizes = [n for n in source.nodes() if "sym_size" in str(n.target)]
    assert sizes == [], "a length is computed in the graph"


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 67])
def test_the_graph_is_the_model_at_every_length(
    config: MiniQwenConfig, source: Graph, tokens: int
) -> None:
    """Export was shown 8 tokens, and promises nothing for one."""
    ids = torch.randint(61, (tokens,), generator=torch.Generator().manual_seed(tokens))
    positions = torch.arange(tokens) + 3
    with torch.no_grad():
        expected = plain_model(config)(ids, positions)
    assert torch.equal(run_graph(source, config, ids, positions), expected)


@pytest.mark.parametrize("name", CHANGES)
def test_other_architectures(name: str) -> None:
    config = tiny_config(**CHANGES[name])
    graph = trace(config, torch.float32)
    shapes = {name: spec.shape for name, spec in graph.weights.items()}
    assert shapes == parameter_shapes(config) | {"rotary_emb.inv_freq": (4,)}
    ids, positions = torch.arange(9), torch.arange(9)
    with torch.no_grad():
        expected = plain_model(config)(ids, positions)
    assert torch.equal(run_graph(graph, config, ids, positions), expected)
    assert len(graph.nodes(OPS["attention"].overload)) == len(config.attention_layers)
    assert len(graph.nodes(OPS["gated_delta_rule"].overload)) == len(config.linear_layers)
    # each layer's calls stand together, in order, under its own name
    layers = [found[1] for n in graph.nodes() if (found := re.match(r"layers\.(\d+)", module(n)))]
    assert list(dict.fromkeys(layers)) == [str(i) for i in range(config.num_hidden_layers)]
    assert layers == sorted(layers, key=int)
    names = [n.name for n in graph.fx.nodes]
    assert len(set(names)) == len(names)
    for kind in ("linear_layers", "attention_layers"):
        counts = {layers.count(str(i)) for i in getattr(config, kind)}
        assert len(counts) <= 1, "layers of one kind differ"


def module(node: Node) -> str:
    return node.meta["module"]


def test_bfloat16(config: MiniQwenConfig, half_source: Graph) -> None:
    ids, positions = torch.arange(20), torch.arange(20)
    with torch.no_grad():
        expected = plain_model(config, torch.bfloat16)(ids, positions)
    logits = run_graph(half_source, config, ids, positions)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, expected)


def test_meta_model_holds_no_data(config: MiniQwenConfig) -> None:
    model = meta_model(config, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not any(p.requires_grad for p in model.parameters())
    assert model.rotary_emb.inv_freq.dtype == torch.float32
