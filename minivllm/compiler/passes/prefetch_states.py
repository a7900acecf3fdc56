"""prefetch_states: a decode step reads its states while the kernels in front still run.

    %o = fused_gated_delta_rule_decode_slots(..., %state.layers.0.recurrent, %state_slots)
                                       |
                                       v
    %o = fused_gated_delta_rule_decode_slots(..., %state.layers.0.recurrent, %state_slots, True)

and the same of the convolution. The states are most of what these ops move, and only the op itself
writes them: what it reads was there before the step began. With programmatic dependent launch its
programs can ask for them before they wait for the new token. That is a promise of the graph, which
an op alone cannot make, so the pass checks it: no other node touches the state, slots and weights
are no other node's result, and one before it is a kernel that waits for everything earlier (the
embedding, like all of torch's, knows no dependent launch).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.ops import OPS

CONV = OPS["causal_conv1d_decode_slots"].overload
RULE = OPS["fused_gated_delta_rule_decode_slots"].overload
BARRIER = torch.ops.aten.embedding.default
LEAVES = ("placeholder", "get_attr")
READ = ("slots", "weight", "A_log", "dt_bias")  # early, beside the state
# their places among an op's arguments
EARLY = {
    op: [i for i, a in enumerate(op._schema.arguments) if a.name in READ] for op in (CONV, RULE)
}


class PrefetchStates(GraphPass):
    """Let convolution and delta rule read their states early."""

    name = "prefetch_states"
    phases = ("decode",)
    after = ("fold_gate", "inplace_state")
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        layers = [f"layers.{i}" for i in context.config.linear_layers]
        return [f"{layer}.{kind}" for layer in layers for kind in ("conv", "recurrent")]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        context.misses.looked_for(CONV, RULE)
        sites = []
        behind_barrier = False
        for node in graph.nodes():
            behind_barrier |= node.target is BARRIER
            if node.target not in EARLY:
                continue
            (state,) = (n for n in node.all_input_nodes if n.target in graph.states)
            site = str(state.target).removeprefix("state.")
            if not behind_barrier or set(state.users) != {node}:
                reason = "the state may be written by a kernel that still runs"
                wanted = "the only reader and writer"
                context.misses.add(graph, node, wanted, reason=reason, site=site)
                continue
            read = [node.args[i] for i in EARLY[node.target]]
            computed = [n for n in read if isinstance(n, Node) and n.op not in LEAVES]
            if computed:
                reason = "a kernel that still runs may compute it"
                wanted = "a weight or an input of the graph"
                context.misses.add(graph, node, wanted, at=computed[0], reason=reason, site=site)
                continue
            early = graph.call(node.target, *node.args, True, like=node)
            graph.replace(node, early)
            sites.append(site)
        return sites
