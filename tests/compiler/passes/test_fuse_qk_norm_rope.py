"""fuse_qk_norm_rope: queries and keys from the projections to attention in one op."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from toy_graphs import IDS, apply, aten, code, evaluate, targets, tiny_config, traced

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.fuse_norms import FuseNorms
from minivllm.compiler.passes.fuse_qk_norm_rope import FuseQkNormRope
from minivllm.compiler.passes.merge_linears import MergeLinears
from minivllm.compiler.runner import run_passes
from minivllm.model.miniqwen import RMSNorm, RotaryEmbedding, apply_rotary
from minivllm.ops import OPS

DTYPES = [torch.float32, torch.bfloat16]
ATTENTION, FUSED = OPS["attention"].overload, OPS["qk_norm_rope"].overload
POSITIONS = torch.tensor([0, 1, 2, 3, 40, 41, 42, 1000, 1001])
EPS = 1e-2


def rotary_context(dim: int, share: float) -> PassContext:
    config = tiny_config(head_dim=dim, partial_rotary_factor=share)
    return PassContext(config, torch.float32, 16)


class Mixer(nn.Module):
    """Attention of two query heads over one key head, all of them parts of the input.

    Args:
        change: what differs from the model's attention.
    """

    def __init__(self, dim: int, change: str = "") -> None:
        super().__init__()
        self.dim, self.change = dim, change
        self.q_norm = RMSNorm(dim, EPS)
        self.k_norm = RMSNorm(dim, 2 * EPS if change == "another_epsilon" else EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
        change, dim = self.change, self.dim
        q, k, v = x.split([2 * dim, dim, dim], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
        qn, kn = self.q_norm(q), self.k_norm(k)
        if change == "plain_weight":
            kn = kn - (kn - _plain(k, self.k_norm.weight))
        if change == "q_not_normalized":
            qn = q
        angles = others if change == "other_angles" else (cos, sin)
        if change == "swapped":
            angles = (sin, cos)
        if change == "mixed_angles":
            angles = (cos, others[1])
        qr = apply_rotary(qn, cos, sin)
        kr = kn if change == "k_not_rotated" else apply_rotary(kn, *angles)
        if change == "swapped":
            qr = apply_rotary(qn, sin, cos)
        if change == "mixed_angles":
            qr = apply_rotary(qn, cos, others[1])
        v = kr if change == "v_is_k" else v
        o = torch.ops.minivllm.attention(qr, kr, v, dim**-0.5)
        if change == "read_q":
            o = o + qr
        if change == "read_norm":
            o = o + qn
        if change == "attended_twice":
            o = o + torch.ops.minivllm.attention(qr, kr, v.sin(), 1.0)
        return torch.cat([o.flatten(-2), x[:, : 2 * dim]], dim=-1)


def _plain(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * w.float()).to(x.dtype)


class Layers(nn.Module):
    """Layers of attention under one rotary embedding, and a second embedding."""

    def __init__(self, dim: int, rotary_dim: int, *changes: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(dim, change) for change in changes)
        self.rotary_emb = RotaryEmbedding(SimpleNamespace(rotary_dim=rotary_dim, rope_theta=100.0))  # type: ignore[arg-type]
        self.other = RotaryEmbedding(SimpleNamespace(rotary_dim=rotary_dim, rope_theta=50.0))  # type: ignore[arg-type]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary_emb(positions, x.dtype)
        others = self.other(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, others)
        return x


def fused(
    changes: tuple[str, ...],
    sites: int,
    dtype: torch.dtype,
    dim: int = 4,
    rotary_dim: int = 2,
) -> Graph:
    """The graph behind fuse_norms and the pass; its output is the same to the bit."""
    context = rotary_context(dim, rotary_dim / dim)
    assert context.config.rotary_dim == rotary_dim
    body = Layers(dim, rotary_dim, *changes)
    graph, weights = traced(body, dtype, 4 * dim, positions=True)
    apply(graph, FuseNorms(), context)
    before = code(graph)
    inputs = {"input_ids": IDS, "positions": POSITIONS}
    expected = evaluate(graph, inputs, weights)
    assert apply(graph, FuseQkNormRope(), context) == sites
    assert torch.equal(evaluate(graph, inputs, weights), expected)
    assert (code(graph) == before) == (sites == 0)
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(4, 2), (8, 4), (8, 8)])
def test_one(dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    graph = fused(("",), 1, dtype, dim, rotary_dim)
    (op,) = graph.nodes(FUSED)
    q, k, q_weight, k_weight, positions, inv_freq, eps = op.args
    assert [n.meta["val"].shape[1] for n in (q, k)] == [2, 1]
    assert [n.target for n in (q_weight, k_weight, positions, inv_freq)] == [
        "body.layers.0.q_norm.weight", "body.layers.0.k_norm.weight", "positions",
        "body.rotary_emb.inv_freq",
    ]  # fmt: skip
    assert eps == EPS
    # cos and sin had no other reader
    gone = {"aten.cos", "aten.sin", "minivllm.rms_norm", "aten.neg", "aten.mul.Tensor"}
    assert not gone & set(targets(graph))
    (attention,) = graph.nodes(ATTENTION)
    assert [(n.args[0], n.args[1]) for n in attention.args[:2]] == [(op, 0), (op, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain(dtype: torch.dtype) -> None:
    """Layers share their angles; only with the last one do those go."""
    graph = fused(("", "", ""), 3, dtype)
    assert len(graph.nodes(FUSED)) == 3
    assert graph.nodes(aten.cos.default, aten.sin.default) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_stay_for_a_layer_that_needs_them(dtype: torch.dtype) -> None:
    graph = fused(("", "another_epsilon", ""), 2, dtype)
    assert [n.target for n in graph.nodes(aten.cos.default, aten.sin.default)] == [
        aten.cos.default, aten.sin.default,
    ]  # fmt: skip
    assert len(graph.nodes(OPS["rms_norm"].overload)) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [
    "another_epsilon", "plain_weight", "q_not_normalized", "k_not_rotated", "other_angles",
    "swapped", "mixed_angles", "read_q", "read_norm", "attended_twice",
])  # fmt: skip
def test_what_the_op_does_not_compute_stays(change: str, dtype: torch.dtype) -> None:
    """And what is read elsewhere: a rotated query, a norm."""
    graph = fused((change,), 0, dtype)
    assert len(graph.nodes(ATTENTION)) in (1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_values_too(dtype: torch.dtype) -> None:
    fused(("v_is_k",), 1, dtype)


def test_without_fuse_norms_nothing_is_found(canonical: Graph, context: PassContext) -> None:
    graph = canonical.clone("decode")
    before = code(graph)
    assert apply(graph, FuseQkNormRope(), context) == 0
    assert code(graph) == before
    without = dataclasses.replace(context, disabled=frozenset({"fuse_norms"}))
    (report,) = run_passes(graph, [FuseQkNormRope()], without)
    assert (report.matches, report.expected) == (0, None)


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
    run_passes(graph, [FuseNorms(), MergeLinears()] if merged else [FuseNorms()], context)
    before = Counter(targets(graph))
    (report,) = run_passes(graph, [FuseQkNormRope()], context)
    assert (report.matches, report.expected) == (1, 1)
    after = Counter(targets(graph))
    assert after - before == {"minivllm.qk_norm_rope": 1} | (
        {"<built-in function getitem>": after["<built-in function getitem>"]
         - before["<built-in function getitem>"]}
        if after["<built-in function getitem>"] > before["<built-in function getitem>"] else {}
    )  # fmt: skip
    gone = before - after
    assert gone["minivllm.rms_norm"] == 2
    for name in ("aten.cos", "aten.sin"):
        assert (gone[name], after[name]) == (1, 0)
    assert after["aten.cat"] == 0 and after["aten.slice.Tensor"] == 0
    assert report.calls_after == report.calls_before - (28 if dtype == torch.float32 else 30)
    assert graph.nodes(FUSED)[0].meta["module"] == "layers.1.mixer"
