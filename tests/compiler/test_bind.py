"""Binding: implementations are chosen once, tensors are shared, the graph stays as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from toy_graphs import CPU, Builder, aten, code, randn, toy

import minivllm.ops.op as op_module
from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.recipe import assemble
from minivllm.compiler.verify import scenario
from minivllm.config import CompilerOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights, parameter_shapes
from minivllm.ops import OPS

LINEARS = {
    "prefill": ("add_rms_norm", "gated_rms_norm", "silu_mul", "sigmoid_mul"),
    "decode": tuple(name for name in OPS if "linear" in name),
}
OPS_OF = {
    phase: {
        "rms_norm",
        *LINEARS[phase],
        "qk_norm_rope",
        "causal_conv1d_qkv_prefill_slots" if phase == "prefill" else "causal_conv1d_decode_slots",
        f"fused_gated_delta_rule_{phase}_slots",
        "paged_kv_write",
        f"paged_attention_{phase}",
    }
    for phase in PHASES
}


@pytest.fixture(scope="module")
def weights(config: MiniQwenConfig, compiled: CompiledModel) -> dict[str, Tensor]:
    """The weights of the compiled graphs, merged, and of the others as they are."""
    plain = dummy_weights(parameter_shapes(config), torch.float32, "cpu", 0) | constants(config)
    return plain | assemble(compiled.decode.weights, plain)


def pools_of(graph: Graph) -> dict[str, Tensor]:
    return {n: torch.zeros(16, *s.shape, dtype=s.dtype) for n, s in graph.states.items()}


def bound(compiled: CompiledModel, weights: dict[str, Tensor], phase: str, **kwargs: Any) -> Any:
    graph = compiled.graphs[phase]
    return bind(graph, weights, pools_of(graph), CPU, torch.float32, **kwargs)


@pytest.mark.parametrize("phase", PHASES)
def test_implementations_and_inputs(
    compiled: CompiledModel, weights: dict[str, Tensor], phase: str
) -> None:
    step = bound(compiled, weights, phase)
    assert step.implementations == dict.fromkeys(OPS_OF[phase], "torch")
    assert step.warnings == []
    assert step.inputs == compiled.graphs[phase].input_names
    called = {n.target for n in step.module.graph.nodes}
    assert not called & {op.overload for op in OPS.values()}
    assert {OPS[name].implementations[0].call for name in OPS_OF[phase]} <= called


@pytest.mark.parametrize("phase", PHASES)
def test_weights_and_pools_are_shared_not_copied(
    compiled: CompiledModel, weights: dict[str, Tensor], phase: str
) -> None:
    graph = compiled.graphs[phase]
    pools = pools_of(graph)
    step = bind(graph, weights, pools, CPU, torch.float32)
    given = {t.data_ptr() for t in (*(weights[n] for n in graph.weights), *pools.values())}
    held = {**dict(step.module.named_parameters()), **dict(step.module.named_buffers())}
    assert len(held) == len(graph.weights) + len(graph.states)
    assert {t.data_ptr() for t in held.values()} == given
    assert all("." not in name for name in held)


def test_the_graph_is_left_as_it_was(compiled: CompiledModel, weights: dict[str, Tensor]) -> None:
    before = {phase: code(graph) for phase, graph in compiled.graphs.items()}
    for phase in PHASES:
        bound(compiled, weights, phase)
        bound(compiled, weights, phase)
    assert {phase: code(graph) for phase, graph in compiled.graphs.items()} == before


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_reads_and_writes_the_pools(
    compiled: CompiledModel, weights: dict[str, Tensor], phase: str
) -> None:
    graph = compiled.graphs[phase]
    pools = pools_of(graph)
    step = bind(graph, weights, pools, CPU, torch.float32)
    inputs = scenario(phase, 61, 16)[0].inputs
    with torch.inference_mode():
        logits = step(**inputs)
    assert logits.shape == (3, 61)
    slots = inputs["state_slots"].tolist()
    if phase == "prefill":
        kept = inputs["chunk_slots"]
        slots += kept[kept > 0].tolist()
    for name, spec in graph.states.items():
        if spec.kind == "slot":
            touched = pools[name].flatten(1).abs().amax(1).nonzero().flatten().tolist()
            assert touched == sorted(slots)
        else:
            touched = pools[name].flatten(0, 1).flatten(1).abs().amax(1).nonzero().flatten()
            assert touched.tolist() == sorted(inputs["slot_mapping"].tolist())


def test_inputs_that_the_graph_does_not_read_are_ignored(
    compiled: CompiledModel, weights: dict[str, Tensor]
) -> None:
    step: Executable = bound(compiled, weights, "decode")
    inputs = scenario("decode", 61, 16)[0].inputs
    assert {"cu_seqlens", "num_computed_tokens", "logits_rows"} <= set(inputs) - set(step.inputs)
    only = {name: inputs[name] for name in step.inputs}
    # two steps would see each other's state, so each has pools of its own
    other: Executable = bound(compiled, weights, "decode")
    assert torch.equal(step(**inputs), other(**only))
    del only["positions"]
    with pytest.raises(KeyError, match="positions"):
        step(**only)


def test_the_program_is_readable(compiled: CompiledModel, weights: dict[str, Tensor]) -> None:
    step = bound(compiled, weights, "decode")
    assert type(step.module).__name__ == "decode_graph"
    assert "def forward(self, input_ids" in step.module.code
    assert "self.layers_0_mixer_conv1d_weight" in step.module.code
    merged = "layers_0_mixer_in_proj_qkv_in_proj_b_in_proj_a_in_proj_z_weight"
    assert re.search(rf"define_linear\(\w+, {merged}\)", step.module.code)


RULES = {"compiled": "fused_gated_delta_rule_{}_slots", "eager": "gated_delta_rule_{}"}


@pytest.mark.parametrize("mode", RULES)
def test_forced_implementations(
    compiled: CompiledModel, eager: CompiledModel, weights: dict[str, Tensor], mode: str
) -> None:
    model = compiled if mode == "compiled" else eager
    decode, prefill = (RULES[mode].format(phase) for phase in ("decode", "prefill"))
    step = bound(model, weights, "decode", forced={decode: "torch"})
    assert step.implementations[decode] == "torch"
    # of the other phase: fine, one option serves both graphs
    step = bound(model, weights, "decode", forced={prefill: "torch"})
    assert prefill not in step.implementations


def test_forcing_an_unknown_op(compiled: CompiledModel, weights: dict[str, Tensor]) -> None:
    with pytest.raises(UserError) as error:
        bound(compiled, weights, "decode", forced={"delta_rule": "torch"})
    assert str(error.value) == (
        f"compiler.implementations: no op 'delta_rule'; choose from {', '.join(OPS)}"
    )


@pytest.mark.parametrize(
    ("mode", "name", "reason"),
    [
        ("eager", "triton", "choose one of torch"),
        ("eager", "fla", "runs on cuda only"),
        ("compiled", "fla", "choose one of torch"),
        ("compiled", "triton", "runs on cuda only"),
    ],
)
def test_forcing_what_cannot_be(
    compiled: CompiledModel,
    eager: CompiledModel,
    weights: dict[str, Tensor],
    mode: str,
    name: str,
    reason: str,
) -> None:
    model, op = compiled if mode == "compiled" else eager, RULES[mode].format("decode")
    with pytest.raises(UserError, match=rf"\.{op}='{name}'.*{reason}"):
        bound(model, weights, "decode", forced={op: name})


def for_cuda(graph: Graph) -> Executable:
    """Binding for CUDA needs no GPU; only running would."""
    weights = {n: torch.empty(w.shape, dtype=w.dtype) for n, w in graph.weights.items()}
    return bind(graph, weights, pools_of(graph), torch.device("cuda"), torch.bfloat16)


def test_a_warning_for_each_missing_package(
    config: MiniQwenConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = compile_model(config, torch.bfloat16, CompilerOptions(mode="eager"))
    monkeypatch.setattr(op_module, "is_importable", lambda name: name in ("fla", "triton"))
    step = for_cuda(eager.decode)
    assert step.implementations == {
        "causal_conv1d_decode": "fla",
        "gated_delta_rule_decode": "fla",
        "paged_kv_write": "triton",
        "paged_attention_decode": "triton",
    }
    assert step.warnings == []
    assert for_cuda(eager.prefill).warnings == []
    monkeypatch.setattr(op_module, "is_importable", lambda name: name in ("fla", "flash_attn"))
    step = for_cuda(eager.prefill)
    assert step.implementations["paged_attention_prefill"] == "flash_attn"
    write, attention = sorted(step.warnings, reverse=True)
    assert write.startswith("paged_kv_write: triton needs the package triton")
    assert attention == (
        "paged_attention_prefill: triton needs the package triton, which is not installed; "
        "flash_attn is used, which is slower"
    )


@pytest.mark.parametrize("phase", PHASES)
def test_the_compiled_graph_for_cuda(
    half_compiled: CompiledModel, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Our own kernels wherever there is one, the substitutes of those whose package is missing."""
    monkeypatch.setattr(op_module, "is_importable", lambda name: True)
    step = for_cuda(half_compiled.graphs[phase])
    assert step.implementations == dict.fromkeys(OPS_OF[phase], "triton")
    assert step.warnings == []
    monkeypatch.setattr(op_module, "is_importable", lambda name: False)
    step = for_cuda(half_compiled.graphs[phase])
    assert step.implementations == dict.fromkeys(OPS_OF[phase], "torch")
    assert len(step.warnings) == len(OPS_OF[phase])


def test_a_missing_weight(source: Graph) -> None:
    graph = toy(source, lambda b: b.call(aten.relu.default, b.hidden()))
    with pytest.raises(KeyError, match=r"embed_tokens\.weight"):
        bind(graph, {}, {}, CPU, torch.float32)


def test_an_op_used_twice_is_chosen_once(source: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(b: Builder) -> Node:
        x, weight = b.hidden(), b.weight("w", 8, 4)
        for _ in range(3):
            x = b.call(OPS["causal_conv1d"].overload, x, weight)
        return x

    asked = []
    choose = op_module.Op.choose
    monkeypatch.setattr(
        op_module.Op, "choose", lambda self, *a: asked.append(self.name) or choose(self, *a)
    )
    weights = {"embed_tokens.weight": randn(61, 8), "w": randn(8, 4)}
    step = bind(toy(source, body), weights, {}, CPU, torch.float32)
    assert asked == ["causal_conv1d"]
    assert step.implementations == {"causal_conv1d": "torch"}
