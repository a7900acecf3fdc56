"""fuse_linear_prologues: a mixer's output projection applies the gate, and the norm, before it.

    %g = gated_rms_norm(%o, %z, %n, eps)            %both = gated_rms_norm_linear_add_rms_norm(
    %f = flatten(%g, -2)                      ->                %o, %z, %n, eps, %w, %x, ...)
    %both = linear_add_rms_norm(%f, %w, %x, ...)

    %g = sigmoid_mul(%o, %gate)                     %both = sigmoid_mul_linear_add_rms_norm(
    %f = flatten(%g, -2)                      ->                %o, %gate, %w, %x, ...)
    %both = linear_add_rms_norm(%f, %w, %x, ...)

Each program of the projection repeats the norm for the columns it reads: with few rows that takes
less time than a launch. In decode only.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.text import target_text
from minivllm.ops import OPS

aten = torch.ops.aten

FORMS = {
    OPS[name].overload: OPS[f"{name}_linear_add_rms_norm"].overload
    for name in ("gated_rms_norm", "sigmoid_mul")
}


class FuseLinearPrologues(GraphPass):
    """Let projections behind a gated norm or an output gate do it themselves."""

    name = "fuse_linear_prologues"
    phases = ("decode",)
    after = ("fuse_norms", "fuse_residual_add", "fuse_output_gate", "fuse_linear_epilogues")

    def expected(self, phase: str, context: PassContext) -> list[str]:
        if phase not in self.phases:
            return []
        config = context.config
        attention = () if config.attention_bias else config.attention_layers
        return [f"layers.{i}.mixer" for i in (*config.linear_layers, *attention)]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        context.misses.looked_for(OPS["linear_add_rms_norm"].overload)
        for node in graph.nodes(OPS["linear_add_rms_norm"].overload):
            flat, *rest = node.args
            made = _unflattened(graph, flat, node, context.misses)
            if made is None:
                continue
            new = graph.call(FORMS[made.target], *made.args, *rest, like=node)  # type: ignore[index]
            assert isinstance(flat, Node)
            sites.append(flat.meta["module"])
            graph.replace(node, new)
        return sites


def _unflattened(graph: Graph, flat: object, user: Node, misses: Misses) -> Node | None:
    """`[tokens, H, D]` from one of the ops, whose heads `flat` joins and only `user` reads."""
    joined = "flatten(x, -2) of [tokens, H, D]"
    miss = functools.partial(misses.add, graph, user, total=3)
    if not isinstance(flat, Node) or flat.target is not aten.flatten.using_ints:
        miss(joined, at=flat, reason="another op")
        return None
    made, *dims = flat.args
    if not isinstance(made, Node) or made.target not in FORMS or flat.kwargs:
        miss(" or ".join(map(target_text, FORMS)), at=made, reason="another op", matched=2)
        return None
    start, end = dims[0] if dims else 0, dims[1] if len(dims) > 1 else -1
    if made.meta["val"].ndim != 3 or start not in (1, -2) or end not in (2, -1):
        miss(joined, at=flat, reason="another constant: these are no heads", matched=2)
        return None
    for node, reader in ((made, flat), (flat, user)):
        if set(node.users) != {reader}:
            misses.extra_user(graph, user, node, reader)
            return None
    return made
