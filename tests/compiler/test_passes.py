"""What holds for every pass."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import Builder, apply, aten, code, tiny_config, toy

from minivllm.compiler.contract import ContractError
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext, layer_of
from minivllm.compiler.passes.canonicalize import Canonicalize
from minivllm.compiler.passes.lower_attention import LowerAttention
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.passes.select_logits import SelectLogits
from minivllm.compiler.runner import CompileError, run_passes

ALL = (Canonicalize(), SelectLogits(), LowerMixers(), LowerAttention())


def plain(b: Builder) -> Node:
    """A graph in which no pass but canonicalize finds anything, and that one nothing either."""
    return b.call(aten.relu.default, b.hidden())


@pytest.mark.parametrize("graph_pass", ALL, ids=lambda p: p.name)
@pytest.mark.parametrize("phase", PHASES)
def test_without_its_pattern_a_graph_stays(
    source: Graph, context: PassContext, graph_pass: Any, phase: str
) -> None:
    graph = toy(source, plain, phase)
    before = code(graph)
    assert apply(graph, graph_pass, context) == 0
    assert code(graph) == before
    assert graph.states == {}


def test_layer_of(source: Graph) -> None:
    graph = toy(source, lambda b: b.call(aten.relu.default, b.hidden(), module="layers.12.mlp"))
    assert layer_of(graph.output) == "layers.12"
    (embedding,) = graph.nodes(aten.embedding.default)
    with pytest.raises(AssertionError, match="belongs to no layer"):
        layer_of(embedding)


def test_expected_sites_follow_the_config(config: Any) -> None:

    deep = tiny_config(
        num_hidden_layers=5,
        layer_types=("full_attention", *["linear_attention"] * 3, "full_attention"),
    )
    deep_context = PassContext(deep, torch.float32, 16)
    assert LowerAttention().expected("decode", deep_context) == ["layers.0", "layers.4"]
    assert LowerMixers().expected("decode", deep_context) == [
        f"layers.{i}.{kind}" for i in (1, 2, 3) for kind in ("conv", "recurrent")
    ]
    assert Canonicalize().expected("decode", deep_context) is None


@pytest.mark.parametrize("graph_pass", ALL, ids=lambda p: p.name)
def test_a_pass_shows_its_graph_before_and_after(graph_pass: Any) -> None:
    text = sys.modules[type(graph_pass).__module__].__doc__ or ""
    assert text.startswith(f"{graph_pass.name}: ")
    assert "->" in text and len(re.findall(r"%\w+", text)) > 4


def test_a_mutation_without_a_mutating_pass(canonical: Graph, context: PassContext) -> None:
    class Sneaky(LowerMixers):
        mutates = False

    with pytest.raises(CompileError, match="changes its argument before lowering") as error:
        run_passes(canonical.clone("decode"), [Sneaky()], context)
    assert isinstance(error.value.__cause__, ContractError)
