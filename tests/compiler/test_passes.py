"""What holds for every pass."""

from __future__ import annotations

import dataclasses
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
from minivllm.compiler.passes.fold_gate import FoldGate
from minivllm.compiler.passes.fuse_qk_norm_rope import FuseQkNormRope
from minivllm.compiler.passes.fuse_residual_add import FuseResidualAdd
from minivllm.compiler.passes.lower_attention import LowerAttention
from minivllm.compiler.passes.lower_mixers import LowerMixers
from minivllm.compiler.pipeline import PIPELINE, select_passes
from minivllm.compiler.runner import CompileError, run_passes

ALL = PIPELINE


def plain(b: Builder) -> Node:
    """A graph in which no pass finds anything."""
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


def test_expected_sites_follow_the_config() -> None:
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
    counts = {p.name: len(p.expected("decode", deep_context) or ()) for p in PIPELINE}
    assert counts == {
        "canonicalize": 0,
        "fuse_norms": 10 + 4 + 3 + 1,
        "fuse_residual_add": 10,
        "merge_linears": 10,
        "fuse_silu_mul": 5,
        "fold_gate": 3,
        "fuse_qk_norm_rope": 2,
        "fuse_output_gate": 2,
        "select_logits": 1,
        "fuse_linear_epilogues": 10 + 5,
        "fuse_linear_prologues": 5,
        "decode_linears": 5 + 1,
        "lower_mixers": 6,
        "lower_attention": 2,
        "inplace_state": 6,
        "fuse_conv_qk_norm": 3,
        "prefetch_states": 6,
        "keep_snapshots": 6,
    }
    for graph_pass in PIPELINE:
        sites = graph_pass.expected("prefill", deep_context) or []
        assert len(set(sites)) == len(sites)
    assert set(FoldGate().expected("decode", deep_context)) == {
        f"layers.{i}.mixer" for i in (1, 2, 3)
    }
    assert (
        FuseResidualAdd().expected("decode", deep_context)[0] == "layers.0.post_attention_layernorm"
    )


def test_a_pass_that_misses_a_site_says_so(source: Graph, config: Any) -> None:
    """Each optional pass on a graph whose last layer it cannot match, as after a model's edit."""
    deep = tiny_config(
        num_hidden_layers=3,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
    )
    two, three = (PassContext(c, torch.float32, 16) for c in (config, deep))
    for graph_pass in PIPELINE:
        phase = graph_pass.phases[0]
        graph = source.clone(phase)
        missed = graph_pass.expected(phase, three)
        if missed == graph_pass.expected(phase, two):
            continue
        before = select_passes("compiled", phase)
        before = before[: [p.name for p in before].index(graph_pass.name)]
        run_passes(graph, before, two)
        with pytest.raises(CompileError, match=r"unmatched: .*layers\.\d") as error:
            run_passes(graph, [graph_pass], three)
        assert "unexpected: none" in str(error.value)


def test_passes_that_build_on_a_disabled_one_may_find_less(
    source: Graph, context: PassContext
) -> None:
    without = dataclasses.replace(context, disabled=frozenset({"fuse_norms"}))
    graph = source.clone("decode")
    passes = [Canonicalize(), FuseResidualAdd(), FuseQkNormRope()]
    reports = run_passes(graph, passes, without)
    assert [(r.matches, r.expected) for r in reports[1:]] == [(0, None)] * 2
    with pytest.raises(CompileError, match=r"fuse_residual_add .*matched 0 of 4 sites"):
        run_passes(graph, passes, context)


@pytest.mark.parametrize("graph_pass", ALL, ids=lambda p: p.name)
def test_a_pass_shows_its_graph_before_and_after(graph_pass: Any) -> None:
    text = sys.modules[type(graph_pass).__module__].__doc__ or ""
    assert text.startswith(f"{graph_pass.name}: ")
    # an arrow to the right, or one downwards
    assert re.search(r"->|\| *\n *v\n", text) and len(re.findall(r"%\w+", text)) > 4


def test_a_mutation_without_a_mutating_pass(canonical: Graph, context: PassContext) -> None:
    class Sneaky(LowerMixers):
        mutates = False

    with pytest.raises(CompileError, match="changes its argument before lowering") as error:
        run_passes(canonical.clone("decode"), [Sneaky()], context)
    assert isinstance(error.value.__cause__, ContractError)
