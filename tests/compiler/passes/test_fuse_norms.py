"""fuse_norms: the spellings of a norm, each found for what it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_graphs import IDS, apply, aten, code, evaluate, targets, traced
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.fuse_norms import FuseNorms
from minivllm.compiler.runner import run_passes
from minivllm.model.miniqwen import GatedRMSNorm, RMSNorm
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
EPS = 3e-3  # large enough to show in the numbers
RMS_NORM, GATED = OPS["rms_norm"].overload, OPS["gated_rms_norm"].overload


class Norm(nn.Module):
    """A norm spelled by one of the functions below."""

    def __init__(self, function: Any, size: int = 8) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def power(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt((x32**2).mean(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def float_power(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.to(torch.float32)
    x32 = torch.rsqrt(torch.pow(x32, 2.0).mean(dim=-1, keepdim=True) + EPS) * x32
    return ((w.float() + 1.0) * x32).type_as(x)


def square(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def product(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def integer_one(x: Tensor, w: Tensor) -> Tensor:
    """Gemma as Google published it."""
    x32 = x.float()
    output = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (output * (1 + w.float())).type_as(x)


def plain(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)


def llama_square(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)).type_as(x) * w


# name: module, offset, cast_first
SPELLINGS: dict[str, tuple[Any, float, bool]] = {
    "ours": (lambda: RMSNorm(8, EPS), 1.0, False),
    "transformers_qwen3_5": (lambda: Qwen3_5RMSNorm(8, EPS), 1.0, False),
    "transformers_llama": (lambda: LlamaRMSNorm(8, EPS), 0.0, True),
    "transformers_gemma": (lambda: GemmaRMSNorm(8, EPS), 1.0, False),
    "gemma_integer_one": (lambda: Norm(integer_one), 1.0, False),
    "power": (lambda: Norm(power), 1.0, False),
    "float_power": (lambda: Norm(float_power), 1.0, False),
    "square": (lambda: Norm(square), 1.0, False),
    "product": (lambda: Norm(product), 1.0, False),
    "plain": (lambda: Norm(plain), 0.0, False),
    "llama_square": (lambda: Norm(llama_square), 0.0, True),
}


def convention(graph: Graph) -> list[tuple[Any, ...]]:
    """(weight, eps, offset, cast_first) of each norm, in program order."""
    return [(str(n.args[1].target), *n.args[2:]) for n in graph.nodes(RMS_NORM)]  # type: ignore[union-attr]


def check(graph: Graph, weights: dict[str, Tensor], context: PassContext, sites: int) -> None:
    """Fuse, and compare the output to the bit: the op makes the same casts in the same order."""
    expected = evaluate(graph, {"input_ids": IDS}, weights)
    assert apply(graph, FuseNorms(), context) == sites
    result = evaluate(graph, {"input_ids": IDS}, weights)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(context: PassContext, name: str, dtype: torch.dtype) -> None:
    make, offset, cast_first = SPELLINGS[name]
    graph, weights = traced(make(), dtype)
    check(graph, weights, context, 1)
    assert targets(graph) == ["aten.embedding", "minivllm.rms_norm"]
    # in float32 there is no cast for the weight to stand behind
    cast_first = cast_first and dtype != torch.float32
    assert convention(graph) == [("body.weight", EPS, offset, cast_first)]
    assert graph.output.meta["module"] == "body"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_conventions_give_different_numbers(context: PassContext, dtype: torch.dtype) -> None:
    """Or the test above would not tell one from another."""
    results = []
    for name in ("ours", "plain", "transformers_llama"):
        graph, weights = traced(SPELLINGS[name][0](), dtype)
        apply(graph, FuseNorms(), context)
        results.append(evaluate(graph, {"input_ids": IDS}, weights))
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2]) == (dtype == torch.float32)


class Two(nn.Module):
    """Two arguments for a gated norm, from one."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, (x * 3.0).sin())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [GatedRMSNorm, Qwen3_5RMSNormGated])
def test_gated_norms(context: PassContext, norm: Any, dtype: torch.dtype) -> None:
    graph, weights = traced(Two(norm(8, EPS)), dtype)
    check(graph, weights, context, 1)
    assert targets(graph)[-1] == "minivllm.gated_rms_norm"
    assert graph.nodes(RMS_NORM) == []
    x, gate, weight, eps = graph.output.args
    assert (x.target, gate.target) == (aten.embedding.default, aten.sin.default)
    assert (weight.target, eps) == ("body.norm.weight", EPS)


class Several(nn.Module):
    """Norms of every convention in one chain, with a gated one before, between or behind them."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.order = order
        self.ours = RMSNorm(8, 1e-2)
        self.llama = LlamaRMSNorm(8, 2e-2)
        self.plain = Norm(plain)
        self.gated = Two(GatedRMSNorm(8, 4e-2))
        self.gemma = GemmaRMSNorm(8, 5e-2)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x) + x
        return x


ORDERS = [
    ("gated", "llama", "plain", "ours", "gemma"),
    ("ours", "plain", "llama", "gated", "gemma"),
    ("llama", "gemma", "gated", "ours", "plain"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_variants_do_not_steal_each_others_matches(
    context: PassContext, order: tuple[str, ...], dtype: torch.dtype
) -> None:
    graph, weights = traced(Several(order), dtype)
    check(graph, weights, context, 5)
    (gated,) = graph.nodes(GATED)
    assert (gated.args[2].target, gated.args[3]) == ("body.gated.norm.weight", 4e-2)
    behind = dtype != torch.float32
    expected = {
        "ours": ("body.ours.weight", 1e-2, 1.0, False),
        "llama": ("body.llama.weight", 2e-2, 0.0, behind),
        "plain": ("body.plain.weight", EPS, 0.0, False),
        "gemma": ("body.gemma.weight", 5e-2, 1.0, False),
    }
    assert convention(graph) == [expected[name] for name in order if name != "gated"]
    assert Counter(targets(graph)) == {
        "aten.embedding": 1, "minivllm.rms_norm": 4, "minivllm.gated_rms_norm": 1,
        "aten.mul.Tensor": 1, "aten.sin": 1, "aten.add.Tensor": 5,
    }  # fmt: skip


class Then(nn.Module):
    """A Llama norm, then a gate that is no gated norm's in bfloat16: applied without a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(8, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * F.silu(x.sin())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_with_a_gate_in_half_precision_is_not_the_gated_norm(
    context: PassContext, dtype: torch.dtype
) -> None:
    graph, weights = traced(Then(), dtype)
    check(graph, weights, context, 1)
    # in float32 the two are the same thing
    assert len(graph.nodes(GATED)) == int(dtype == torch.float32)
    assert len(graph.nodes(RMS_NORM)) == int(dtype != torch.float32)


class Chain(nn.Module):
    """Norms that read each other's output."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.a, self.b, self.c = (RMSNorm(8, eps) for eps in (1e-1, 1e-2, 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(context: PassContext, dtype: torch.dtype) -> None:
    graph, weights = traced(Chain("cab"), dtype)
    check(graph, weights, context, 3)
    assert targets(graph) == ["aten.embedding", *["minivllm.rms_norm"] * 3]
    assert [args[0] for args in convention(graph)] == [f"body.{n}.weight" for n in "cab"]
    assert [n.meta["module"] for n in graph.nodes(RMS_NORM)] == [f"body.{n}" for n in "cab"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_used_twice(context: PassContext, dtype: torch.dtype) -> None:
    """Its `1 + w` is computed once and read by both, so it stays: in float32 as their weight."""
    graph, weights = traced(Chain("abcb"), dtype)
    check(graph, weights, context, 4 if dtype == torch.float32 else 2)
    offsets = [n.args[3] for n in graph.nodes(RMS_NORM)]
    assert offsets == ([1.0, 0.0, 1.0, 0.0] if dtype == torch.float32 else [1.0, 1.0])


class Heads(nn.Module):
    """A norm of each head, and one of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.row = RMSNorm(4, EPS), RMSNorm(8, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.head(x.unflatten(-1, (2, 4))).flatten(-2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(context: PassContext, dtype: torch.dtype) -> None:
    graph, weights = traced(Heads(), dtype)
    check(graph, weights, context, 2)


class Readers(nn.Module):
    """A norm some of whose values are read again outside it."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.weight = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        root = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        normalized = x32 * root
        weight = 1.0 + self.weight.float()
        y = (normalized * weight).to(x.dtype)
        extra = {"root": root, "normalized": normalized, "weight": weight, "y": y, "x32": x32}
        return y + extra[self.which].to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["root", "normalized", "weight", "x32", "y"])
def test_several_readers(context: PassContext, which: str, dtype: torch.dtype) -> None:
    """An inner value that is read outside must stay, and so must the norm; the result may be."""
    graph, weights = traced(Readers(which), dtype)
    # in float32 x32 is x itself and 1 + w a weight like any other: both may be read by anyone
    fusible = which == "y" or (which in ("x32", "weight") and dtype == torch.float32)
    before = code(graph)
    check(graph, weights, context, int(fusible))
    assert (code(graph) == before) == (not fusible)


class GatedReaders(nn.Module):
    """A gated norm whose value before the gate is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        y = self.weight * x32.to(x.dtype)
        return (y * F.silu(x.sin().float())).to(x.dtype) + y


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_norm_whose_inside_is_read_is_a_norm(
    context: PassContext, dtype: torch.dtype
) -> None:
    graph, weights = traced(GatedReaders(), dtype)
    check(graph, weights, context, 1)
    assert graph.nodes(GATED) == []
    assert convention(graph) == [("body.weight", EPS, 0.0, dtype != torch.float32)]


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float() - x.float().mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_is_the_norm_of_a_difference(context: PassContext, dtype: torch.dtype) -> None:
    """In float32. In bfloat16 what is normalised was never rounded, as the op would do it."""
    graph, weights = traced(Norm(layer_norm), dtype)
    check(graph, weights, context, int(dtype == torch.float32))


def l2_norm(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def epsilon_outside(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * (torch.rsqrt(x32.pow(2).mean(-1, keepdim=True)) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def over_tokens(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(0, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def another_power(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(4).mean(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def another_value(x: Tensor, w: Tensor) -> Tensor:
    """Scaled by the root of something else."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.sin().pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * (1.0 + w.float())).to(x.dtype)


def two_plus_weight(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * (w.float().exp() - 2.0)[None]).to(x.dtype)


def value_for_weight(x: Tensor, w: Tensor) -> Tensor:
    """The place of the weight is taken by a value of each token."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return x32.to(x.dtype) * (x * w)


def one_number_for_weight(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * w[:1].float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [
    l2_norm, epsilon_outside, over_tokens, another_power, another_value,
    two_plus_weight, value_for_weight, one_number_for_weight,
])  # fmt: skip
def test_what_is_no_norm_stays(context: PassContext, function: Any, dtype: torch.dtype) -> None:
    graph, weights = traced(Norm(function), dtype)
    before = code(graph)
    check(graph, weights, context, 0)
    assert code(graph) == before


class GatedBroadcast(nn.Module):
    """One gate for all features of a token, or one weight for all features."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.norm = GatedRMSNorm(1 if what == "weight" else 8, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, (x[:, :1] if self.what == "gate" else x).sin())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("what", "norms"), [("gate", 1), ("weight", 0)])
def test_a_gated_norm_with_a_broadcast(
    context: PassContext, what: str, norms: int, dtype: torch.dtype
) -> None:
    graph, weights = traced(GatedBroadcast(what), dtype)
    check(graph, weights, context, norms)
    assert graph.nodes(GATED) == [] and len(graph.nodes(RMS_NORM)) == norms


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model(
    canonical: Graph, half_canonical: Graph, context: PassContext, phase: str, dtype: torch.dtype
) -> None:
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [FuseNorms()], context)
    assert (report.matches, report.expected) == (8, 8)
    after = Counter(targets(graph))
    assert after - before == {"minivllm.rms_norm": 7, "minivllm.gated_rms_norm": 1}
    gone = {"aten.mean.dim": 8, "aten.rsqrt": 8, "aten.pow.Tensor_Scalar": 8}
    assert {name: (before - after)[name] for name in gone} == gone
    # the L2 norms of queries and keys are none of these
    assert after["aten.pow.Tensor_Scalar"] == after["aten.rsqrt"] == 2
    assert {args[2:] for args in convention(graph)} == {(1.0, False)}
    modules = [n.meta["module"] for n in graph.nodes(RMS_NORM, GATED)]
    assert sorted(modules) == sorted(FuseNorms().expected(phase, context))
