"""fuse_output_gate: attention's output times the sigmoid of its gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toy_graphs import IDS, apply, aten, code, evaluate, targets, traced

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.fuse_output_gate import FuseOutputGate
from minivllm.compiler.runner import run_passes
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
SIGMOID_MUL = OPS["sigmoid_mul"].overload
Function = Callable[[Tensor], Tensor]


class Body(nn.Module):
    """A function of the embedding in two heads of four."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.unflatten(-1, (2, 4)))


def fused(context: PassContext, function: Function, sites: int, dtype: torch.dtype) -> Graph:
    """The graph of `function` behind the pass; its output is the same to the bit."""
    graph, weights = traced(Body(function), dtype)
    before = code(graph)
    expected = evaluate(graph, {"input_ids": IDS}, weights)
    assert apply(graph, FuseOutputGate(), context) == sites
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, weights), expected)
    assert (code(graph) == before) == (sites == 0)
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", ["o", "gate"])
def test_one(context: PassContext, first: str, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        o, gate = x.sin(), x.cos()
        return o * gate.sigmoid() if first == "o" else gate.sigmoid() * o

    graph = fused(context, function, 1, dtype)
    assert targets(graph)[-1] == "minivllm.sigmoid_mul"
    assert "aten.sigmoid" not in targets(graph) and "aten.mul.Tensor" not in targets(graph)
    o, gate = graph.output.args
    assert (o.target, gate.target) == (aten.sin.default, aten.cos.default)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_that_is_half_of_each_head(context: PassContext, dtype: torch.dtype) -> None:
    """As q_proj yields it: its heads lie apart."""

    def function(x: Tensor) -> Tensor:
        q, gate = x.chunk(2, dim=-1)
        return q.sin() * gate.sigmoid()

    fused(context, function, 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(context: PassContext, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin() * x.sigmoid()
        y = x * y.sigmoid()
        return y * y.sigmoid()

    graph = fused(context, function, 3, dtype)
    assert targets(graph)[-3:] == ["minivllm.sigmoid_mul"] * 3
    first, second, third = graph.nodes(SIGMOID_MUL)
    assert second.args[1] is first and third.args == (second, second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_readers(context: PassContext, dtype: torch.dtype) -> None:
    def result(x: Tensor) -> Tensor:
        y = x.sin() * x.sigmoid()
        return y.exp() + y * y

    def gate(x: Tensor) -> Tensor:
        s = x.sigmoid()
        return x.sin() * s + s

    fused(context, result, 1, dtype)
    fused(context, gate, 0, dtype)


OTHERS: dict[str, Function] = {
    "silu": lambda x: x.sin() * nn.functional.silu(x),
    "tanh": lambda x: x.sin() * x.tanh(),
    "sum": lambda x: x.sin() + x.sigmoid(),
    "number": lambda x: x.sigmoid() * 0.5,
    "one_gate_a_head": lambda x: x.sin() * x[..., :1].sigmoid(),
    "one_gate_a_feature": lambda x: x.sin() * x[:, :1].sigmoid(),
    "one_value_a_head": lambda x: x[..., :1] * x.sigmoid(),
    "rows": lambda x: x.flatten(-2).sin() * x.flatten(-2).sigmoid(),
    "wide_gate": lambda x: (x.sin() * x.double().sigmoid()).to(x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_output_gate_stays(context: PassContext, name: str, dtype: torch.dtype) -> None:
    fused(context, OTHERS[name], 0, dtype)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model(
    canonical: Graph, half_canonical: Graph, context: PassContext, phase: str, dtype: torch.dtype
) -> None:
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [FuseOutputGate()], context)
    assert (report.matches, report.expected) == (1, 1)
    after = Counter(targets(graph))
    assert before - after == {"aten.sigmoid": 1, "aten.mul.Tensor": 1}
    assert after - before == {"minivllm.sigmoid_mul": 1}
    assert after["aten.sigmoid"] == 1, "beta's"
    assert graph.nodes(SIGMOID_MUL)[0].args[0].target is OPS["attention"].overload
