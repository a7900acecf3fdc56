"""fuse_silu_mul: SwiGLU's activation, and nothing that looks like it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_graphs import IDS, apply, aten, code, evaluate, targets, traced

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.fuse_silu_mul import FuseSiluMul
from minivllm.compiler.passes.merge_linears import MergeLinears
from minivllm.compiler.runner import run_passes
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
SILU_MUL = OPS["silu_mul"].overload
Function = Callable[[Tensor], Tensor]


class Body(nn.Module):
    """A function of the embedding."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def fused(context: PassContext, function: Function, sites: int, dtype: torch.dtype) -> Graph:
    """The graph of `function` behind the pass; its output is the same to the bit."""
    graph, weights = traced(Body(function), dtype)
    before = code(graph)
    expected = evaluate(graph, {"input_ids": IDS}, weights)
    assert apply(graph, FuseSiluMul(), context) == sites
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, weights), expected)
    assert (code(graph) == before) == (sites == 0)
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", ["gate", "up"])
def test_one(context: PassContext, first: str, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        gate, up = x.sin(), x.cos()
        return F.silu(gate) * up if first == "gate" else up * F.silu(gate)

    graph = fused(context, function, 1, dtype)
    assert targets(graph) == ["aten.embedding", "aten.sin", "aten.cos", "minivllm.silu_mul"]
    gate, up = graph.output.args
    assert (gate.target, up.target) == (aten.sin.default, aten.cos.default)


@pytest.mark.parametrize("dtype", DTYPES)
def test_column_slices_of_one_row(context: PassContext, dtype: torch.dtype) -> None:
    """As merge_linears leaves them."""

    def function(x: Tensor) -> Tensor:
        gate, up = x.split([4, 4], dim=-1)
        return F.silu(gate) * up

    fused(context, function, 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_sides_may_be_one(context: PassContext, dtype: torch.dtype) -> None:
    graph = fused(context, lambda x: F.silu(x) * x, 1, dtype)
    assert graph.output.args[0] is graph.output.args[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_activations(context: PassContext, dtype: torch.dtype) -> None:
    """Either could be the gate; one of them is, and the other one stays."""
    graph = fused(context, lambda x: F.silu(x.sin()) * F.silu(x), 1, dtype)
    assert len(graph.nodes(aten.silu.default)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(context: PassContext, dtype: torch.dtype) -> None:
    """Each reads the one before, in the gate's place, in the other one, and in both."""

    def function(x: Tensor) -> Tensor:
        y = F.silu(x.sin()) * x
        y = F.silu(y) * x
        y = F.silu(x) * y
        return F.silu(y) * y

    graph = fused(context, function, 4, dtype)
    assert targets(graph)[2:] == ["minivllm.silu_mul"] * 4
    nodes = graph.nodes(SILU_MUL)
    assert nodes[1].args[0] is nodes[0] and nodes[2].args[1] is nodes[1]
    assert nodes[3].args == (nodes[2], nodes[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_readers(context: PassContext, dtype: torch.dtype) -> None:
    """The product may be read by many; an activation that is read again stays."""

    def result(x: Tensor) -> Tensor:
        y = F.silu(x.sin()) * x
        return y.exp() + y * y

    def activation(x: Tensor) -> Tensor:
        a = F.silu(x.sin())
        return a * x + a

    def two_products(x: Tensor) -> Tensor:
        a = F.silu(x.sin())
        return a * x + a * x.cos()

    fused(context, result, 1, dtype)
    fused(context, activation, 0, dtype)
    fused(context, two_products, 0, dtype)


OTHERS: dict[str, Function] = {
    "gelu": lambda x: F.gelu(x) * x.sin(),
    "sigmoid": lambda x: x.sigmoid() * x.sin(),
    "sum": lambda x: F.silu(x) + x.sin(),
    "quotient": lambda x: F.silu(x) / x.sin(),
    "number": lambda x: F.silu(x) * 2.0,
    "column": lambda x: F.silu(x) * x[:, :1],
    "column_gate": lambda x: F.silu(x[:, :1]) * x,
    "row": lambda x: F.silu(x) * x.new_ones(8),
    "heads": lambda x: F.silu(x.unflatten(-1, (2, 4))) * x.unflatten(-1, (2, 4)).sin(),
    # what a gated norm ends with, which rounds after the product
    "wide_gate": lambda x: (F.silu(x.double()) * x.sin()).to(x.dtype),
    "wide_both": lambda x: (F.silu(x.double()) * x.double().sin()).to(x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_swiglu_stays(context: PassContext, name: str, dtype: torch.dtype) -> None:
    fused(context, OTHERS[name], 0, dtype)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model(
    canonical: Graph,
    half_canonical: Graph,
    context: PassContext,
    phase: str,
    dtype: torch.dtype,
    merged: bool,
) -> None:
    """Before fuse_norms, too, when a gated norm still ends with silu and a product."""
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    if merged:
        run_passes(graph, [MergeLinears()], context)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [FuseSiluMul()], context)
    assert (report.matches, report.expected) == (2, 2)
    after = Counter(targets(graph))
    assert before - after == {"aten.silu": 2, "aten.mul.Tensor": 2}
    assert after - before == {"minivllm.silu_mul": 2}
    assert after["aten.silu"] == 1, "the gated norm's"
