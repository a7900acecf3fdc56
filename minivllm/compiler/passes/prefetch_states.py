"""prefetch_states: a decode step reads its states while the kernels in front still run.

    %o = fused_gated_delta_rule_decode_slots(..., %state.layers.0.recurrent, %state_slots)
                                       |
                                       v
    %o = fused_gated_delta_rule_decode_slots(..., %state.layers.0.recurrent, %state_slots, True)

The states are most of what the op moves, and only the op itself writes them: what it reads was
there before the step began. With programmatic dependent launch its programs can ask for them
before they wait for q, k and v. That is a promise of the graph, which an op alone cannot make, so
the pass checks it: no other node touches the state, and one before it is a kernel that waits for
everything earlier (the embedding, like all of torch's, knows no dependent launch).
"""

from __future__ import annotations

import torch

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext, layer_of
from minivllm.ops import OPS

OP = OPS["fused_gated_delta_rule_decode_slots"].overload
BARRIER = torch.ops.aten.embedding.default


class PrefetchStates(GraphPass):
    """Let the delta rule read its state early."""

    name = "prefetch_states"
    phases = ("decode",)
    after = ("fold_gate", "inplace_state")
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}" for i in context.config.linear_layers]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        context.misses.looked_for(OP)
        sites = []
        behind_barrier = False
        for node in graph.nodes():
            behind_barrier |= node.target is BARRIER
            if node.target is not OP:
                continue
            (state,) = (n for n in node.all_input_nodes if n.target in graph.states)
            if not behind_barrier or set(state.users) != {node}:
                reason = "the state may be written by a kernel that still runs"
                context.misses.add(graph, node, "the only reader and writer", reason=reason)
                continue
            early = graph.call(OP, *node.args, True, like=node)
            graph.replace(node, early)
            sites.append(layer_of(early))
        return sites
