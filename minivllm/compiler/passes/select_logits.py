"""select_logits: in prefill, the head runs on the wanted tokens only.

    %h = ...              # [tokens, D]           %h = ...
    %logits = linear(%h, %head)            ->     %rows = index_select(%h, 0, %logits_rows)
    return %logits        # [tokens, vocab]       %logits = linear(%rows, %head)
                                                  return %logits        # [rows, vocab]

The head of the 0.8B is 248,320 rows wide: for a prompt of 8,192 tokens its output in float32
would be 8 GB, and one row is read.
"""

from __future__ import annotations

import torch

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext

aten = torch.ops.aten


class SelectLogits(GraphPass):
    """Gather the rows named by `logits_rows` in front of the head."""

    name = "select_logits"
    phases = ("prefill",)
    mandatory = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return ["head"]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        head = graph.output
        if head.target is not aten.linear.default:
            reason = "the graph's output is no linear, so its rows are not those of its input"
            context.misses.add(graph, head, "linear(x, w)", reason=reason, site="head")
            return []
        hidden, *weights = head.args
        rows = graph.call(
            aten.index_select.default, hidden, 0, graph.input("logits_rows"), like=head
        )
        logits = graph.call(aten.linear.default, rows, *weights, like=head)
        head.replace_all_uses_with(logits)
        graph.fx.erase_node(head)
        return ["head"]
