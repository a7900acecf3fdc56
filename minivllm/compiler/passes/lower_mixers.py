"""lower_mixers: convolution and delta rule get their state, visibly read and written.

Prefill (packed sequences; a sequence that starts reads zeros, whatever its slot held):

    %y = causal_conv1d(%x, %w)      ->   %old  = index_select(%state.layers.0.conv, 0, %state_slots)
                                         %init = where(%num_computed_tokens > 0, %old, 0)
                                         %y, %new = causal_conv1d_prefill(%x, %w, %init,
                                                        %cu_seqlens, %chunk_indices)
                                         index_copy_(%state.layers.0.conv, 0, %state_slots, %new)

Decode (one token a sequence, its state always live):

    %o = gated_delta_rule(%q, ...)   ->   %old = index_select(%state.layers.0.recurrent, 0, ...)
                                          %o, %new = gated_delta_rule_decode(%q, ..., %old)
                                          index_copy_(%state.layers.0.recurrent, 0, ..., %new)

The start is masked with `where`: multiplying by zero would keep a NaN of the slot's last owner.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph, StateSpec
from minivllm.compiler.passes.base import GraphPass, PassContext, layer_of
from minivllm.ops import OPS

aten = torch.ops.aten


class LowerMixers(GraphPass):
    """Replace the opaque convolution and delta rule by their stateful forms."""

    name = "lower_mixers"
    mandatory = True
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        layers = [f"layers.{i}" for i in context.config.linear_layers]
        return [f"{layer}.{kind}" for layer in layers for kind in ("conv", "recurrent")]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        opaque = ("causal_conv1d", "gated_delta_rule", "fused_gated_delta_rule")
        context.misses.looked_for(*(OPS[name].overload for name in opaque))
        return [
            *(self._lower_conv(graph, n) for n in graph.nodes(OPS["causal_conv1d"].overload)),
            *(
                self._lower_delta_rule(graph, n, context)
                for name in ("gated_delta_rule", "fused_gated_delta_rule")
                for n in graph.nodes(OPS[name].overload)
            ),
        ]

    def _lower_conv(self, graph: Graph, node: Node) -> str:
        weight = node.args[1]
        assert isinstance(weight, Node)
        value = node.meta["val"]
        spec = StateSpec("slot", tuple(weight.meta["val"].shape), value.dtype)
        return _lower(graph, node, "causal_conv1d", "conv", spec)

    def _lower_delta_rule(self, graph: Graph, node: Node, context: PassContext) -> str:
        q, _, v, *_ = node.args
        assert isinstance(q, Node) and isinstance(v, Node)
        _, heads, value_dim = v.meta["val"].shape
        shape = (heads, value_dim, q.meta["val"].shape[-1])
        spec = StateSpec("slot", shape, context.state_dtype)
        folded = node.target is OPS["fused_gated_delta_rule"].overload
        op = "fused_gated_delta_rule" if folded else "gated_delta_rule"
        return _lower(graph, node, op, "recurrent", spec)


def _lower(graph: Graph, node: Node, op: str, kind: str, spec: StateSpec) -> str:
    """Replace `node` by gather, `<op>_<phase>` and scatter; returns the state's name."""
    name = f"{layer_of(node)}.{kind}"
    pool, slots = graph.state(name, spec), graph.input("state_slots")
    state = graph.call(aten.index_select.default, pool, 0, slots, like=node)
    extra: list[Node] = []
    if graph.phase == "prefill":
        started = _started(graph, len(spec.shape), node)
        state = graph.call(aten.where.ScalarOther, started, state, 0.0, like=node)
        extra = [graph.input("cu_seqlens"), graph.input("chunk_indices")]
    stateful = OPS[f"{op}_{graph.phase}"].overload
    both = graph.call(stateful, *node.args, state, *extra, like=node)
    output = graph.call(operator.getitem, both, 0, like=node)
    new_state = graph.call(operator.getitem, both, 1, like=node)
    graph.call(aten.index_copy_.default, pool, 0, slots, new_state, like=node)
    graph.replace(node, output)
    return name


def _started(graph: Graph, rank: int, like: Node) -> Node:
    """`num_computed_tokens > 0` as `[seqs, 1, ...]`, made at its first use for each rank."""
    computed = graph.input("num_computed_tokens")
    shape = [-1, *[1] * rank]
    for compared in computed.users:
        for view in compared.users:
            if view.target is aten.view.default and view.args[1:] == (shape,):
                return view
    compared = graph.call(aten.gt.Scalar, computed, 0, like=like)
    return graph.call(aten.view.default, compared, shape, like=like)
