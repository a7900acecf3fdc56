"""inplace_state: gather, op and scatter become one op that takes the slot index.

    %old = index_select(%state.layers.0.recurrent, 0, %state_slots)
    %both = fused_gated_delta_rule_decode(..., %old)
    %o, %new = getitem(%both, 0), getitem(%both, 1)
    index_copy_(%state.layers.0.recurrent, 0, %state_slots, %new)
                                       |
                                       v
    %o = fused_gated_delta_rule_decode_slots(..., %state.layers.0.recurrent, %state_slots)

In prefill the mask of starting sequences goes with it (`num_computed_tokens`). A decode step
then moves each state once in and once out, where the gather and scatter moved it three times.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.text import target_text
from minivllm.ops import OPS

aten = torch.ops.aten

FORMS = {
    OPS[f"{op}_{phase}"].overload: OPS[f"{op}_{phase}_slots"].overload
    for op in ("causal_conv1d", "fused_gated_delta_rule")
    for phase in ("prefill", "decode")
}


class InplaceState(GraphPass):
    """Let the stateful ops read and write their slots themselves."""

    name = "inplace_state"
    after = ("fold_gate",)
    mutates = True

    def expected(self, phase: str, context: PassContext) -> list[str]:
        layers = [f"layers.{i}" for i in context.config.linear_layers]
        return [f"{layer}.{kind}" for layer in layers for kind in ("conv", "recurrent")]

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        sites = []
        context.misses.looked_for(aten.index_copy_.default)
        for scatter in graph.nodes(aten.index_copy_.default):
            pool, _, slots, new = scatter.args
            assert isinstance(pool, Node) and isinstance(slots, Node) and isinstance(new, Node)
            site = str(pool.target).removeprefix("state.")
            miss = functools.partial(context.misses.add, graph, scatter, site=site)
            if _replace(graph, scatter, pool, slots, new, miss):
                sites.append(site)
        return sites


def _replace(
    graph: Graph, scatter: Node, pool: Node, slots: Node, new: Node, miss: Callable[..., None]
) -> bool:
    """Replace one gather, op and scatter; False if the op has no such form."""
    op = new.args[0] if new.target is operator.getitem else None
    if not isinstance(op, Node) or op.target not in FORMS:
        wanted = "an element of " + " or ".join(map(target_text, FORMS))
        miss(wanted, at=op or new, reason="the op has no form that takes slots")
        return False
    state, started = _gathered(graph, op, scatter)
    if state is None:
        wanted = f"index_select({pool.target}, 0, {slots.name}), masked or as it is"
        reason = "no argument is the state that only this op reads and only this scatter writes"
        miss(wanted, at=op, reason=reason, matched=2, total=3)
        return False
    position = op.args.index(state)
    extra = [] if started is None else [started]
    arguments = [*op.args[:position], pool, slots, *extra, *op.args[position + 1 :]]
    inplace = graph.call(FORMS[op.target], *arguments, like=op)
    (output,) = (u for u in op.users if u is not new)
    graph.replace(output, inplace)
    graph.fx.erase_node(scatter)
    return True


def _gathered(graph: Graph, op: Node, scatter: Node) -> tuple[Node | None, Node | None]:
    """The op's state argument and, if starts are masked, `num_computed_tokens`."""
    pool, dim, slots, _ = scatter.args
    for argument in op.args:
        if not isinstance(argument, Node):
            continue
        gather = argument
        started: Node | None = None
        if argument.target is aten.where.ScalarOther and argument.args[2] == 0:
            view, gather = argument.all_input_nodes
            (compared,) = view.all_input_nodes
            started = graph.input("num_computed_tokens")
            if compared.target is not aten.gt.Scalar or compared.args != (started, 0):
                continue
        if gather.target is not aten.index_select.default or gather.args != (pool, dim, slots):
            continue
        assert isinstance(pool, Node)
        if set(pool.users) == {gather, scatter}:  # or another reader would see the write too early
            return argument, started
    return None, None
