"""Near misses: a fusion that was broken on purpose is explained at the node that breaks it.

The broken line of each module below carries a mark, and the explanation must point to that line.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_graphs import Builder, aten, toy, traced

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Miss, Misses
from minivllm.compiler.near_miss import near_misses
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.passes.fold_gate import FoldGate
from minivllm.compiler.passes.fuse_norms import FuseNorms
from minivllm.compiler.passes.fuse_silu_mul import FuseSiluMul
from minivllm.compiler.pattern import Pattern, find
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.model.miniqwen import l2_normalize, log_decay

BF16 = torch.bfloat16
EPS = 1e-6


rule = torch.ops.minivllm.gated_delta_rule


class Norm(nn.Module):
    """A norm of eight features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))


class Rule(nn.Module):
    """A delta rule of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(2)) for _ in range(2))

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (y.unflatten(-1, (2, 4)) for y in (x.neg(), x.exp(), x))
        return q, k, v, x[:, :2].cos(), x[:, 2:4].sin()


class NormCast(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.half()  # broken
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class NormOp(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        mean = x32.pow(2).mean(-1, keepdim=True)
        x32 = x32 * torch.sqrt(mean + EPS).reciprocal()  # broken
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class NormExtraUser(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        mean = x32.pow(2).mean(-1, keepdim=True)  # broken
        x32 = x32 * torch.rsqrt(mean + EPS)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype) + mean.to(x.dtype)


class NormEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * (torch.rsqrt(x32.pow(2).mean(-1, keepdim=True)) + EPS)  # broken
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class NormOperand(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        other = x.neg().float()  # broken
        x32 = x32 * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + EPS)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class NormWithoutCast(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
        return (x32 * (1.0 + self.weight)).to(x.dtype)  # broken


class RuleCast(Rule):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a, b = self.inputs(x)
        decay = F.softplus(a + self.dt_bias).float()  # broken
        g = -self.A_log.float().exp() * decay
        return rule(l2_normalize(q), l2_normalize(k), v, g, b.sigmoid())


class RuleOp(Rule):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a, b = self.inputs(x)
        decay = torch.log1p((a.float() + self.dt_bias).exp())  # broken
        g = -self.A_log.float().exp() * decay
        return rule(l2_normalize(q), l2_normalize(k), v, g, b.sigmoid())


class RuleExtraUser(Rule):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a, b = self.inputs(x)
        beta = b.sigmoid()  # broken
        g, v = log_decay(a, self.A_log, self.dt_bias), v * beta[..., None]
        return rule(l2_normalize(q), l2_normalize(k), v, g, beta)


class RuleEps(Rule):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a, b = self.inputs(x)
        q32 = q.float()
        root = torch.rsqrt(q32.pow(2).sum(-1, keepdim=True)) + EPS  # broken
        g = log_decay(a, self.A_log, self.dt_bias)
        return rule((q32 * root).to(q.dtype), l2_normalize(k), v, g, b.sigmoid())


class RuleOperand(Rule):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v, a, b = self.inputs(x)
        g = log_decay(a, self.A_log, self.dt_bias)
        return rule(l2_normalize(q), l2_normalize(k), v, b.sigmoid(), g)  # broken


def line_of(module: type) -> str:
    """`compiler/test_near_miss.py:12`, the marked line of a module."""
    lines, start = inspect.getsourcelines(module)
    (index,) = (i for i, line in enumerate(lines) if "# broken" in line)
    return f"compiler/test_near_miss.py:{start + index}"


def unnumbered(text: str) -> str:
    """Without the numbers of nodes, which differ between versions of torch."""
    return re.sub(r"(%[a-z]\w*?)_\d+\b", r"\1", text)


def explained(graph: Graph, graph_pass: GraphPass, context: PassContext) -> tuple[Miss, str]:
    """The most advanced miss of a pass that should have found the module "body", and its error."""
    type_ = type(graph_pass)

    class Expecting(type_):  # type: ignore[misc, valid-type]
        def expected(self, phase: str, context: PassContext) -> list[str]:
            return ["body"]

        def run(self, graph: Graph, context: PassContext) -> list[str]:
            self.misses = context.misses
            return super().run(graph, context)

    running = Expecting()
    with pytest.raises(CompileError) as error:
        run_passes(graph, [running], context)
    return near_misses(graph, running.misses)[0], str(error.value)


NORMS: dict[str, tuple[type, str, str, str]] = {
    "cast": (
        NormCast,
        "aten.to.dtype(%embedding, float16): float16[tokens, 8]",
        "float32 as argument 1 of %to",
        "another cast: float16 in place of float32",
    ),
    "op": (
        NormOp,
        "aten.reciprocal(%sqrt)",
        "aten.rsqrt(aten.add.Tensor(…)) as argument 1 of %mul",
        "another op: aten.reciprocal in place of aten.rsqrt",
    ),
    "extra user": (
        NormExtraUser,
        "aten.mean.dim(%pow, [-1], True)",
        "aten.mean.dim(aten.pow.Tensor_Scalar(…), [-1], True) that only the match reads",
        "an extra user: %to (body) reads it too",
    ),
    "eps": (
        NormEps,
        "aten.add.Tensor(%rsqrt, 1e-06)",
        "aten.rsqrt(aten.add.Tensor(…)) as argument 1 of %mul",
        "another op: aten.add.Tensor in place of aten.rsqrt",
    ),
    "operand": (
        NormOperand,
        "%to = aten.to.dtype(%neg, float32)",
        "aten.to.dtype(x, float32) as argument 0 of %pow",
        "another operand: %to there",
    ),
    "no cast": (
        NormWithoutCast,
        "aten.add.Tensor(body.weight, 1.0): bfloat16[8]",
        "aten.to.dtype(w, float32) as argument 0 of %add",
        "another cast: none to float32 here",
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_broken_norm(context: PassContext, name: str) -> None:
    make, here, expected, reason = NORMS[name]
    graph, _ = traced(make(), BF16)
    miss, error = explained(graph, FuseNorms(), context)
    assert here in unnumbered(miss.here)
    assert (miss.module, miss.source) == ("body", line_of(make))
    assert (miss.made_by, miss.pattern) == ("trace", "one_plus_weight")
    assert unnumbered(miss.expected) == expected and unnumbered(miss.reason) == reason
    assert miss.total == 10 and 5 <= miss.matched <= 10
    assert f"{miss.matched} of 10 nodes of one_plus_weight fit, stopped at {miss.at}\n" in error
    for line in (
        f"expected: {miss.expected}",
        f"here:     {miss.here}",
        f"reason:   {miss.reason}",
    ):
        assert line in error


RULES: dict[str, tuple[type, str, str, str]] = {
    "cast": (
        RuleCast,
        "aten.to.dtype(%softplus, float32)",
        "aten.softplus(aten.add.Tensor(…)) as argument 1 of %mul",
        "a cast between: to float32 behind aten.softplus",
    ),
    "op": (
        RuleOp,
        "aten.log1p(%exp)",
        "aten.softplus(aten.add.Tensor(…)) as argument 1 of %mul",
        "another op: aten.log1p in place of aten.softplus",
    ),
    "extra user": (
        RuleExtraUser,
        "aten.sigmoid(%sin)",
        "aten.sigmoid(b) that only the match reads",
        "an extra user: %unsqueeze (body) reads it too",
    ),
    "eps": (
        RuleEps,
        "aten.add.Tensor(%rsqrt, 1e-06)",
        "aten.rsqrt(aten.add.Tensor(…)) as argument 1 of %mul",
        "another op: aten.add.Tensor in place of aten.rsqrt",
    ),
    "operand": (
        RuleOperand,
        "minivllm.gated_delta_rule(",
        "minivllm.gated_delta_rule(aten.to.dtype(…), aten.to.dtype(…), v, aten.mul.Tensor(…), ",
        "swapped operands: arguments 3 and 4",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_broken_delta_rule(context: PassContext, name: str) -> None:
    make, here, expected, reason = RULES[name]
    graph, _ = traced(make(), BF16)
    miss, error = explained(graph, FoldGate(), context)
    assert here in unnumbered(miss.here)
    assert (miss.module, miss.source) == ("body", line_of(make))
    assert (miss.made_by, miss.pattern) == ("trace", "delta_rule")
    assert unnumbered(miss.reason) == reason
    assert unnumbered(miss.expected).startswith(expected)
    assert 10 <= miss.matched <= miss.total
    assert f"reason:   {miss.reason}" in error and f"here:     {miss.here}" in error


class Meddle(GraphPass):
    """Moves every epsilon out of the root."""

    name = "meddle"

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        for root in graph.nodes(aten.rsqrt.default):
            mean, eps = root.args[0].args
            inner = graph.call(aten.rsqrt.default, mean, like=root)
            graph.replace(root, graph.call(aten.add.Tensor, inner, eps, like=root))
        return []


def test_the_pass_that_made_the_node_is_named(half_canonical: Graph, context: PassContext) -> None:
    graph = half_canonical.clone("decode")
    with pytest.raises(CompileError) as error:
        run_passes(graph, [Meddle(), FuseNorms()], context)
    text = str(error.value)
    message, *details = text.splitlines()
    assert message.startswith("pass fuse_norms on the decode graph: matched 0 of 8 sites; ")
    assert message.endswith("(passes before it: meddle)")
    assert "  layers.0.input_layernorm: nearest miss in layers.0.input_layernorm: " in text
    assert "    the same in layers.1.input_layernorm" in details
    assert text.count("made by meddle") == 4  # the others differ in nothing but their names
    named = [f"layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")]
    for site in (*named, "layers.1.mixer.q_norm", "layers.0.mixer.norm", "norm"):
        assert any(site in line for line in details)


def test_sums_are_read_in_the_order_that_was_meant(source: Graph) -> None:
    """The product's operands are turned, and the one that is another op is told, not its twin."""
    wanted = Pattern(
        lambda x, y: x.relu() * y, {"x": ((2, 8), torch.float32), "y": ((2, 8), torch.float32)}
    )

    def body(b: Builder) -> Any:
        x = b.hidden()
        other, gelu = b.call(aten.add.Tensor, x, x), b.call(aten.sigmoid.default, x)
        return b.call(aten.mul.Tensor, other, gelu)

    graph, misses = toy(source, body), Misses()
    assert find(graph, wanted, misses) == []
    (miss,) = near_misses(graph, misses)
    assert miss.reason == "another op: aten.sigmoid in place of aten.relu"


def test_a_match_that_the_pass_has_no_op_for(source: Graph, context: PassContext) -> None:
    def body(b: Builder) -> Any:
        x = b.hidden()
        up = b.call(aten.sum.dim_IntList, x, [-1], True)
        return b.call(aten.mul.Tensor, b.call(aten.silu.default, x), up, module="body")

    miss, _ = explained(toy(source, body), FuseSiluMul(), context)
    assert miss.reason == "another shape: up is float32[tokens, 1]"
    assert miss.expected == "an up of gate's shape, [tokens, N]"


def test_what_another_pattern_takes_is_no_miss(half_canonical: Graph, context: PassContext) -> None:
    graph, misses = half_canonical.clone("prefill"), Misses()
    FuseNorms().run(graph, PassContext(context.config, torch.float32, 16, misses=misses))
    assert [p.name for p in misses.patterns] == [
        "gated", "one_plus_weight", "plain_weight", "weight_behind_the_cast",
    ]  # fmt: skip
    assert near_misses(graph, misses) == []
