"""fold_gate: decay, write strength and L2 norms go into the delta rule, or all of them stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_graphs import IDS, apply, aten, code, evaluate, targets, traced

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.fold_gate import FoldGate
from minivllm.compiler.passes.merge_linears import MergeLinears
from minivllm.compiler.runner import run_passes
from minivllm.model.miniqwen import l2_normalize, log_decay
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
RULE, FUSED = OPS["gated_delta_rule"].overload, OPS["fused_gated_delta_rule"].overload


class Mixer(nn.Module):
    """Two key heads of two, four value heads of two, all of them parts of the embedding.

    Args:
        change: what differs from the model's delta rule.
    """

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.A_log = nn.Parameter(torch.empty(4))
        self.dt_bias = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        change = self.change
        q, k = (t.unflatten(-1, (2, 2)) for t in x.split([4, 4], dim=-1))
        v = x.sin().unflatten(-1, (4, 2))
        a, b = x.cos().split([4, 4], dim=-1)
        q = k if change == "shared" else q
        qn = q if change == "q_as_it_is" else l2_normalize(q)
        kn = l2_normalize(k, 1e-3) if change == "another_epsilon" else l2_normalize(k)
        kn = kn * 1.0 if change == "scaled" else kn
        vn = l2_normalize(v) if change == "v_too" else v
        beta = b.sigmoid() * 2.0 if change == "twice_beta" else b.sigmoid()
        beta = b.tanh() if change == "tanh" else beta
        g = log_decay(a, self.A_log, self.dt_bias)
        if change == "positive":
            g = -g
        if change == "no_bias":
            g = -self.A_log.float().exp() * nn.functional.softplus(a.float())
        if change == "sharper":
            steps = nn.functional.softplus(a.float() + self.dt_bias, beta=2.0)
            g = -self.A_log.float().exp() * steps
        if change == "reordered":
            g = nn.functional.softplus(self.dt_bias + a.float()) * -self.A_log.float().exp()
        o = torch.ops.minivllm.gated_delta_rule(qn, kn, vn, g, beta).flatten(-2)
        read = {"read_q": qn.flatten(-2).repeat(1, 2), "read_beta": beta.repeat(1, 2),
                "read_g": g.repeat(1, 2), "read_o": o, "read_a": x.cos()}  # fmt: skip
        return o + read[change].to(x.dtype) if change in read else o


def fused(
    context: PassContext, body: nn.Module, sites: int, dtype: torch.dtype
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of `body` behind the pass; its output is the same to the bit."""
    graph, weights = traced(body, dtype)
    before = code(graph)
    expected = evaluate(graph, {"input_ids": IDS}, weights)
    assert expected.isfinite().all() and expected.abs().max() > 0.1
    assert apply(graph, FoldGate(), context) == sites
    assert torch.equal(evaluate(graph, {"input_ids": IDS}, weights), expected)
    assert (code(graph) == before) == (sites == 0)
    return graph, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", ["", "reordered", "read_o", "read_a", "v_too"])
def test_one(context: PassContext, change: str, dtype: torch.dtype) -> None:
    graph, _ = fused(context, Mixer(change), 1, dtype)
    (rule,) = graph.nodes(FUSED)
    assert graph.nodes(RULE) == []
    assert not {"aten.softplus", "aten.sigmoid", "aten.exp", "aten.neg"} & set(targets(graph))
    assert targets(graph).count("aten.rsqrt") == (1 if change == "v_too" else 0)
    names = [str(a.target) for a in rule.args]
    assert names[:2] == ["aten.unflatten.int"] * 2
    assert names[-2:] == ["body.A_log", "body.dt_bias"]
    a, b = rule.args[3:5]
    assert [n.args[1] for n in (a, b)] == [0, 1]
    assert rule.meta["module"] == "body"


@pytest.mark.parametrize("dtype", DTYPES)
def test_q_and_k_may_be_one_value(context: PassContext, dtype: torch.dtype) -> None:
    """Then their norm is computed once and read twice by the rule, which is inside the match."""
    graph, _ = fused(context, Mixer("shared"), 1, dtype)
    (rule,) = graph.nodes(FUSED)
    assert rule.args[0] is rule.args[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", ["read_q", "read_beta", "read_g"])
def test_an_inner_value_that_is_read_elsewhere(
    context: PassContext, change: str, dtype: torch.dtype
) -> None:
    fused(context, Mixer(change), 0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [
    "q_as_it_is", "another_epsilon", "scaled", "twice_beta", "tanh", "no_bias", "sharper",
])  # fmt: skip
def test_what_the_op_does_not_compute_stays(
    context: PassContext, change: str, dtype: torch.dtype
) -> None:
    graph, _ = fused(context, Mixer(change), 0, dtype)
    assert len(graph.nodes(RULE)) == 1


def test_a_positive_decay_stays(context: PassContext) -> None:
    """Its states grow, so that only the graph is looked at."""
    graph, _ = traced(Mixer("positive"), torch.float32)
    assert apply(graph, FoldGate(), context) == 0


class Chain(nn.Module):
    """Delta rules that read each other's output, one of which cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Mixer(), Mixer("tanh"), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(context: PassContext, dtype: torch.dtype) -> None:
    graph, _ = fused(context, Chain(), 2, dtype)
    assert [n.meta["module"] for n in graph.nodes(FUSED)] == ["body.first", "body.third"]
    assert [n.meta["module"] for n in graph.nodes(RULE)] == ["body.second"]


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
    graph = (canonical if dtype == torch.float32 else half_canonical).clone(phase)
    if merged:
        run_passes(graph, [MergeLinears()], context)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [FoldGate()], context)
    assert (report.matches, report.expected) == (1, 1)
    after = Counter(targets(graph))
    gone: Any = before - after
    casts = gone.pop("aten.to.dtype", 0)
    assert (casts == 0) == (dtype == torch.float32)
    assert gone == {
        "aten.pow.Tensor_Scalar": 2, "aten.sum.dim_IntList": 2, "aten.add.Tensor": 3,
        "aten.rsqrt": 2, "aten.mul.Tensor": 3, "aten.sigmoid": 1, "aten.exp": 1, "aten.neg": 1,
        "aten.softplus": 1, "minivllm.gated_delta_rule": 1,
    }  # fmt: skip
    assert after - before == {"minivllm.fused_gated_delta_rule": 1}
    (rule,) = graph.nodes(FUSED)
    source = aten.linear.default if not merged else None
    a, b = rule.args[3:5]
    if source is not None:
        assert [n.args[1].target for n in (a, b)] == [
            f"layers.0.mixer.in_proj_{name}.weight" for name in "ab"
        ]
    assert rule.meta["module"] == "layers.0.mixer"
