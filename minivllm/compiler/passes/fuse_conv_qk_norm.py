"""fuse_conv_qk_norm: a prefill's convolution leaves q, k and v as the delta rule takes them.

    %y = causal_conv1d_prefill_slots(%x, ...)
    %parts = split_with_sizes(%y, [16, 16, 48], -1)
    %q = unflatten(getitem(%parts, 0), -1, [-1, 8])          and %k and %v of the others
    %o = fused_gated_delta_rule_prefill_slots(%q, %k, %v, ...)
                                       |
                                       v
    %qkv = causal_conv1d_qkv_prefill_slots(%x, ..., 2, 8, 12)
    %q, %k, %v = getitem(%qkv, 0), getitem(%qkv, 1), getitem(%qkv, 2)
    %o = fused_gated_delta_rule_prefill_slots(%q, %k, %v, ..., None, True)

The chunked rule takes contiguous tensors in which each row of q and k has length 1. Without this
pass the delta rule makes them: it reads all that the convolution wrote, and writes it again. With
it the convolution divides by the length what it has in registers. So nobody but the delta rule may
read its output.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import GraphPass, PassContext, layer_of
from minivllm.ops import OPS

aten = torch.ops.aten

CONV = OPS["causal_conv1d_prefill_slots"].overload
CONV_QKV = OPS["causal_conv1d_qkv_prefill_slots"].overload
RULE = OPS["fused_gated_delta_rule_prefill_slots"].overload
SPLIT, VIEW = aten.split_with_sizes.default, aten.unflatten.int
CHUNK_SLOTS = [a.name for a in CONV._schema.arguments].index("chunk_slots")
NORMALIZED = [a.name for a in RULE._schema.arguments].index("normalized")


class FuseConvQkNorm(GraphPass):
    """Let the convolution bring q and k to length 1, for the delta rule."""

    name = "fuse_conv_qk_norm"
    phases = ("prefill",)
    after = ("fold_gate", "inplace_state")
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        return [f"layers.{i}" for i in context.config.linear_layers]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        context.misses.looked_for(RULE)
        sites = []
        for rule in graph.nodes(RULE):
            conv = _convolution(graph, rule, context.misses)
            if conv is None:
                continue
            q, _, v = rule.all_input_nodes[:3]
            heads = (*q.meta["val"].shape[1:], v.meta["val"].shape[2])
            before, behind = conv.args[:CHUNK_SLOTS], conv.args[CHUNK_SLOTS:]
            qkv = graph.call(CONV_QKV, *before, *heads, *behind, like=conv)
            parts = [graph.call(operator.getitem, qkv, i, like=conv) for i in range(3)]
            arguments = [*parts, *rule.args[3:]]
            arguments += [None] * (NORMALIZED - len(arguments))
            new = graph.call(RULE, *arguments, True, like=rule)
            graph.replace(rule, new)
            graph.fx.erase_node(conv)
            sites.append(layer_of(new))
        return sites


def _convolution(graph: Graph, rule: Node, misses: Misses) -> Node | None:
    """The convolution whose parts are q, k and v of a delta rule, and nothing else's."""
    if len(rule.args) > NORMALIZED:
        return None
    views = [view for view in rule.args[:3] if isinstance(view, Node)]
    parts: list[Node] = []
    for i, view in enumerate(views):
        part = view.args[0] if view.target is VIEW and view.args[1] == -1 else None
        if not isinstance(part, Node) or not _is_part(part, i):
            place = f"{'qkv'[i]}: heads of part {i} of a convolution that is split into three"
            reason = "it is not that part of a convolution's output"
            misses.add(graph, rule, place, at=view, reason=reason, matched=1 + i, total=4)
            return None
        parts.append(part)
    split = parts[0].all_input_nodes[0]
    conv = split.all_input_nodes[0]
    readers = [(conv, [split]), (split, parts)]
    readers += [(part, [view]) for part, view in zip(parts, views, strict=True)]
    readers += [(view, [rule]) for view in views]
    for node, known in readers:
        if set(node.users) != set(known):
            misses.extra_user(graph, rule, node, *known)
            return None
    return conv


def _is_part(node: Node, index: int) -> bool:
    """Whether a node is this part of a convolution's output, which is split into three."""
    if node.target is not operator.getitem or node.args[1] != index:
        return False
    split = node.all_input_nodes[0]
    if split.target is not SPLIT or split.args[2] != -1:
        return False
    sizes = split.args[1]
    assert isinstance(sizes, list | tuple)
    return len(sizes) == 3 and split.all_input_nodes[0].target is CONV
