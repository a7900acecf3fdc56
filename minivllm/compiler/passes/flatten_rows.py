"""flatten_rows: our ops get the rows that they are defined for, whatever rank a module works in.

    %y = rms_norm(%x, %w, ...)     # [B, S, D]  ->  %rows = flatten(%x, 0, -2)          # [T, D]
                                                    %new  = rms_norm(%rows, %w, ...)
                                                    %y    = view_as(%new, %x)

The dims in front become one, so that a kernel is compiled neither for the length of a sequence nor
for a rank. A norm of four dims or more keeps its heads, `[T, H, D]`: they may be columns of a wider
row, and so do not lie one behind the other. In a user's own module only: MiniQwen's tokens are in
rows from the start.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext, shape_of
from minivllm.ops import OPS

aten = torch.ops.aten

ROW_ARGUMENTS = {  # op -> how many of its first arguments have a row a token
    OPS["rms_norm"].overload: 1,
    OPS["add_rms_norm"].overload: 2,
    OPS["gated_rms_norm"].overload: 2,
    OPS["silu_mul"].overload: 2,
    OPS["sigmoid_mul"].overload: 2,
}
NORMS = tuple(OPS[name].overload for name in ("rms_norm", "add_rms_norm", "gated_rms_norm"))


class FlattenRows(GraphPass):
    """Let the ops of the fusions work on rows, and give their results the shape of before."""

    name = "flatten_rows"
    mandatory = True

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        for node in graph.nodes(*ROW_ARGUMENTS):
            x = node.args[0]
            assert isinstance(x, Node)
            rank = _rank_of_rows(node.target, x)
            count = ROW_ARGUMENTS[node.target]  # type: ignore[index]
            rows = [_rows(graph, a, rank, node) for a in node.args[:count]]
            if rows == list(node.args[:count]):
                continue
            new = graph.call(node.target, *rows, *node.args[count:], like=node)  # type: ignore[arg-type]
            pieces = list(node.users) if isinstance(node.meta["val"], tuple) else [node]
            for piece in pieces:
                part = new
                if piece is not node:
                    part = graph.call(operator.getitem, new, piece.args[1], like=piece)
                graph.replace(piece, graph.call(aten.view_as.default, part, x, like=piece))
            sites.append(node.meta["module"])
        return sites


def _rank_of_rows(target: object, x: Node) -> int:
    """Dims of the rows: 3 for a norm of heads whose number is known, else 2."""
    shape = x.meta["val"].shape
    return 3 if target in NORMS and len(shape) > 3 and isinstance(shape[-2], int) else 2


def _rows(graph: Graph, value: object, rank: int, like: Node) -> Node:
    """A value with its first dims made one."""
    assert isinstance(value, Node)
    if value.target is aten.view_as.default:
        flat = value.args[0]
        assert isinstance(flat, Node)
        if shape_of(graph, flat)[1:] == shape_of(graph, value)[1 - rank :]:
            return flat  # what an op before this one made
    rows = value
    if value.meta["val"].ndim < rank:
        rows = graph.call(aten.unsqueeze.default, value, 0, like=like)
    elif value.meta["val"].ndim > rank:
        rows = graph.call(aten.flatten.using_ints, value, 0, -rank, like=like)
    step = rows.meta["val"].stride(-1)
    if isinstance(step, int) and step == 1:
        return rows
    return graph.call(aten.contiguous.default, rows, like=like)  # kernels read rows in one piece
