"""keep_snapshots: prefill leaves snapshots of its state on the way.

    %y = causal_conv1d_prefill_slots(..., %cu_seqlens, %chunk_indices)
                                       |
                                       v
    %y = causal_conv1d_prefill_slots(..., %cu_seqlens, %chunk_indices, %chunk_slots)

and the same for the convolution that leaves q, k and v apart, and for the delta rule. The prefix
cache wants the state at several places of a prompt, behind its last whole block at least. Without
this pass a prompt is run in as many parts, each a pass over all weights that gives up most of the
GPU; with it, in one.
"""

from __future__ import annotations

import torch

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext, layer_of
from minivllm.ops import OPS

KINDS = {
    OPS["causal_conv1d_prefill_slots"].overload: "conv",
    OPS["causal_conv1d_qkv_prefill_slots"].overload: "conv",
    OPS["fused_gated_delta_rule_prefill_slots"].overload: "recurrent",
}


class KeepSnapshots(GraphPass):
    """Tell the ops that go through a prompt's states where to leave some of them."""

    name = "keep_snapshots"
    phases = ("prefill",)
    after = ("fold_gate", "inplace_state")
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        layers = [f"layers.{i}" for i in context.config.linear_layers]
        return [f"{layer}.{kind}" for layer in layers for kind in ("conv", "recurrent")]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        context.misses.looked_for(*KINDS)
        for scatter in graph.nodes(torch.ops.aten.index_copy_.default):
            reason = "a state that is written at the end only; snapshots hold all states or none"
            site = str(scatter.all_input_nodes[0].target).removeprefix("state.")
            context.misses.add(graph, scatter, "an op on slots", reason=reason, site=site)
        if len(graph.nodes(*KINDS)) != sum(spec.kind == "slot" for spec in graph.states.values()):
            return []
        sites = []
        for op, kind in KINDS.items():
            at = [argument.name for argument in op._schema.arguments].index("chunk_slots")
            for node in graph.nodes(op):
                chunk_slots = graph.input("chunk_slots")
                arguments = [*node.args[:at], chunk_slots, *node.args[at + 1 :]]
                kept = graph.call(op, *arguments, like=node)
                graph.replace(node, kept)
                sites.append(f"{layer_of(kept)}.{kind}")
        return sites
