"""fuse_qk_norm_rope: from the projections to what attention reads, in one op.

    %q1 = rms_norm(%q, %wq, ...)                 %both = qk_norm_rope(%q, %k, %wq, %wk,
    %q2 = rotated by %cos, %sin  (nine nodes)                         %positions, %inv_freq, eps)
    %k1 = rms_norm(%k, %wk, ...)           ->    %q2 = getitem(%both, 0)
    %k2 = rotated by %cos, %sin  (nine nodes)    %k2 = getitem(%both, 1)
    %o = attention(%q2, %k2, %v, s)              %o = attention(%q2, %k2, %v, s)

cos and sin are shared by all layers; the op computes them from positions itself, and when the
last reader is gone, so are they.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.near_miss import nearest
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pattern import Match, Pattern, match_at
from minivllm.model.miniqwen import RotaryEmbedding, apply_rotary
from minivllm.ops import OPS


def norm_and_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """As in `model.miniqwen.GatedAttention`, behind fuse_norms."""
    return apply_rotary(torch.ops.minivllm.rms_norm(x, w, eps, 1.0, False), cos, sin)


def _angle(index: int, dtype: torch.dtype, positions: Tensor, inv_freq: Tensor) -> Tensor:
    rotary = SimpleNamespace(inv_freq=inv_freq)
    return RotaryEmbedding.forward(rotary, positions, dtype)[index]  # type: ignore[arg-type]


@functools.cache
def _patterns(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> tuple[Pattern, list[Pattern]]:
    angle = ((2, 1, rotary_dim), dtype)
    inputs = {"x": ((2, 2, head_dim), dtype), "w": ((head_dim,), dtype), "cos": angle, "sin": angle}
    sources = {
        "positions": ((2,), torch.int64),
        "inv_freq": ((rotary_dim // 2,), torch.float32),
    }
    angles = [
        Pattern(functools.partial(_angle, index, dtype), sources, shared=True) for index in (0, 1)
    ]
    return Pattern(norm_and_rope, inputs, ("eps",)), angles


class FuseQkNormRope(GraphPass):
    """Fold the norms and the rotation of queries and keys into one op."""

    name = "fuse_qk_norm_rope"
    after = ("fuse_norms",)

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}.mixer" for i in context.config.attention_layers]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        config = context.config
        side, angles = _patterns(graph.dtype, config.head_dim, config.rotary_dim)
        sites = []
        context.misses.looked_for(OPS["attention"].overload)
        for attention in graph.nodes(OPS["attention"].overload):
            q, k = attention.args[:2]
            assert isinstance(q, Node) and isinstance(k, Node)
            miss = functools.partial(_miss, graph, context.misses, attention)
            sides = match_at(q, side), match_at(k, side)
            if sides[0] is None or sides[1] is None:
                miss(q if sides[0] is None else k, side)
                continue
            shared = next((n for n in (q, k) if set(n.users) != {attention}), None)
            if shared is not None:
                context.misses.extra_user(graph, attention, shared, attention)
                continue
            source = _source(sides[0], sides[1], angles, miss)
            if source is None:
                continue
            both = graph.call(
                OPS["qk_norm_rope"].overload,
                sides[0]["x"],
                sides[1]["x"],
                sides[0]["w"],
                sides[1]["w"],
                source["positions"],
                source["inv_freq"],
                sides[0]["eps"],
                like=attention,
            )
            for index, node in enumerate((q, k)):
                graph.replace(node, graph.call(operator.getitem, both, index, like=attention))
            sites.append(attention.meta["module"])
        return sites


def _source(
    q: Match, k: Match, angles: list[Pattern], miss: Callable[[Node, Pattern | str], None]
) -> Match | None:
    """Where the angles of both sides come from, if that is one place and one epsilon."""
    for name in ("cos", "sin"):
        if q[name] is not k[name]:
            miss(k[name], f"the {name} that the queries have")
            return None
    if q["eps"] != k["eps"]:
        miss(k.node, f"the epsilon that the queries' norm has, {q['eps']!r}")
        return None
    cos, sin = (match_at(q[name], p) for name, p in zip(("cos", "sin"), angles, strict=True))
    if cos is None or sin is None:
        miss(*((q["cos"], angles[0]) if cos is None else (q["sin"], angles[1])))
        return None
    if cos.bindings != sin.bindings:
        miss(sin.node, "the angles that cos has")
        return None
    return cos


def _miss(graph: Graph, misses: Misses, attention: Node, node: Node, wanted: Pattern | str) -> None:
    """Note that an attention is not taken for what is not `wanted` at `node`."""
    if isinstance(wanted, str):
        reason = "another operand"
        misses.add(graph, attention, wanted, reason=reason, at=node, matched=2, total=3)
    else:
        stop = nearest(graph, node, wanted)
        assert stop is not None, f"{node} matches"
        misses.add(graph, attention, stop.expected, reason=stop.reason, at=stop.node)
