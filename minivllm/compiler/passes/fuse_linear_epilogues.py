"""fuse_linear_epilogues: a linear does what stands behind it: SwiGLU's activation, or add and norm.

    %both = linear(%h, gate+up)                     %y = linear_silu_mul(%h, gate+up, 3584)
    %g, %u = split_with_sizes(%both, [3584, 3584])
    %y = silu_mul(%g, %u)                     ->

    %y = linear(%h, %w)                       ->    %both = linear_add_rms_norm(%h, %w, %x, %n, ...)
    %both = add_rms_norm(%y, %x, %n, ...)

In decode only: a prefill's linears have rows enough for the vendor's product.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.ops import OPS

aten = torch.ops.aten


class FuseLinearEpilogues(GraphPass):
    """Let linears do the activation, or the addition and the norm, behind them."""

    name = "fuse_linear_epilogues"
    phases = ("decode",)
    after = ("fuse_norms", "fuse_residual_add", "merge_linears", "fuse_silu_mul")

    def expected(self, phase: str, context: PassContext) -> list[str]:
        if phase not in self.phases:
            return []
        layers = [f"layers.{i}" for i in range(context.config.num_hidden_layers)]
        sites = [f"{layer}.mlp{part}" for layer in layers for part in ("", ".down_proj")]
        sites += [f"layers.{i}.mixer.out_proj" for i in context.config.linear_layers]
        if not context.config.attention_bias:
            sites += [f"layers.{i}.mixer.o_proj" for i in context.config.attention_layers]
        return sites

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        silu_muls = graph.nodes(OPS["silu_mul"].overload)
        norms = graph.nodes(OPS["add_rms_norm"].overload)
        context.misses.looked_for(*(OPS[name].overload for name in ("silu_mul", "add_rms_norm")))
        sites = [_fuse_silu_mul(graph, node, context.misses) for node in silu_muls]
        sites += [_fuse_add_rms_norm(graph, node, context.misses) for node in norms]
        return [site for site in sites if site is not None]


def _fuse_silu_mul(graph: Graph, node: Node, misses: Misses) -> str | None:
    gate, up = node.args
    assert isinstance(gate, Node) and isinstance(up, Node)
    miss = functools.partial(misses.add, graph, node, total=3)
    halves = "getitem of split_with_sizes(linear(x, gate+up), [N, N], -1)"
    split = gate.args[0] if gate.target is operator.getitem else None
    if not isinstance(split, Node) or split.target is not aten.split_with_sizes.default:
        miss(halves, at=split or gate, reason="another op: gate is no half of a merged linear")
        return None
    if up.target is not operator.getitem or up.args[0] is not split or gate is up:
        miss(halves, at=up, reason="another operand: up is not the other half of gate's linear")
        return None
    whole, sizes, dim = split.args
    weight = _weight_of(graph, whole, split, node, misses)
    if weight is None:
        return None
    if dim not in (-1, 1):
        miss(halves, at=split, reason=f"another constant: {dim} in place of -1", matched=2)
        return None
    readers = [(split, gate, up), (gate, node), (up, node)]
    for value, *known in readers:
        if set(value.users) != set(known):
            misses.extra_user(graph, node, value, *known)
            return None
    assert isinstance(whole, Node) and isinstance(sizes, (list, tuple))
    (first, second), size = (int(n.args[1]) for n in (gate, up)), sizes[int(gate.args[1])]  # type: ignore[arg-type]
    starts = [sum(sizes[:i]) for i in (first, second)]
    rows = weight.meta["val"].shape[0]
    if starts != [0, rows // 2] or rows % 2:  # as merge_linears lays out two of one width
        miss(halves, at=split, reason="swapped operands, or halves of two widths", matched=2)
        return None
    fused = OPS["linear_silu_mul"].overload
    new = graph.call(fused, whole.args[0], weight, size, like=node)
    graph.replace(node, new)
    return str(new.meta["module"])


def _fuse_add_rms_norm(graph: Graph, node: Node, misses: Misses) -> str | None:
    y, *rest = node.args
    weight = _weight_of(graph, y, node, node, misses)
    if weight is None:
        return None
    if y in rest:
        wanted, reason = "a value to add the linear to", "another operand: it is added to itself"
        misses.add(graph, node, wanted, at=y, reason=reason)
        return None
    assert isinstance(y, Node)
    fused = OPS["linear_add_rms_norm"].overload
    new = graph.call(fused, y.args[0], weight, *rest, like=node)
    site = str(y.meta["module"])
    graph.replace(node, new)
    return site


def _weight_of(
    graph: Graph, node: object, user: Node, candidate: Node, misses: Misses
) -> Node | None:
    """The weight of a linear `[tokens, K] -> [tokens, N]` without bias that only `user` reads.

    None, and a miss of `candidate`, if there is none.
    """
    site = None
    if isinstance(node, Node) and candidate is user:
        site = node.meta["module"]  # a projection is told by its own name, not by its reader's
    miss = functools.partial(misses.add, graph, candidate, "linear(x, w) without bias", site=site)
    if not isinstance(node, Node) or node.target is not aten.linear.default:
        miss(at=node, reason="another op")
        return None
    if len(node.args) != 2 or node.kwargs or node.meta["val"].ndim != 2:
        miss(at=node, reason="other arguments: a bias, or not two dims")
        return None
    if set(node.users) != {user}:
        misses.extra_user(graph, candidate, node, user, site=site)
        return None
    weight = node.args[1]
    if isinstance(weight, Node) and weight.target in graph.weights:
        return weight
    miss(at=weight, reason="another operand: the weight is computed")
    return None
