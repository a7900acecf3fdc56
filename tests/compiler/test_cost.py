"""The planned cost of a step: FLOPs against formulas, and what passes may not change."""

from __future__ import annotations

import pytest
import torch
from toy_graphs import tiny_config

from minivllm.compiler.compile import compile_model
from minivllm.compiler.cost import STEPS, Cost, CostTable, call_costs, planned_context
from minivllm.compiler.graph import INPUTS, PHASES
from minivllm.config import CompilerOptions
from minivllm.ops import OPS


@pytest.fixture(scope="module")
def table() -> CostTable:
    table = CostTable()
    compile_model(tiny_config(), torch.float32, CompilerOptions(), observers=[table.observe])
    return table


def products(tokens: int) -> int:
    """Of the linears of one layer of each kind, without the head."""
    c = tiny_config()
    mlp = 3 * c.hidden_size * c.intermediate_size
    heads = c.linear_num_value_heads
    linear = c.hidden_size * (c.conv_dim + c.value_dim + 2 * heads) + c.value_dim * c.hidden_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    full = c.hidden_size * (2 * q + 2 * kv) + q * c.hidden_size
    conv = c.conv_dim * c.linear_conv_kernel_dim
    return 2 * tokens * (2 * mlp + linear + full + conv)


def mixers(tokens: int, pairs: int) -> int:
    """Of the delta rule and of attention over `pairs` of a query and a key."""
    c = tiny_config()
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return 7 * tokens * state + 4 * c.num_attention_heads * c.head_dim * pairs


@pytest.mark.parametrize("phase", PHASES)
def test_the_flops_of_a_step(table: CostTable, phase: str) -> None:
    tokens, context = STEPS[phase], planned_context(phase)
    c = tiny_config()
    head = 2 * c.hidden_size * c.vocab_size
    own = tokens * (tokens + 1) // 2
    stages = table.stages[phase]
    assert stages[0].cost.flops == products(tokens) + mixers(tokens, own) + tokens * head
    rows = 1 if phase == "prefill" else tokens  # logits of the last token alone
    pairs = own + tokens * (context - tokens)  # the tokens before the step among them
    assert stages[-1].cost.flops == products(tokens) + mixers(tokens, pairs) + rows * head


@pytest.mark.parametrize("phase", PHASES)
def test_fusions_neither_add_nor_drop_flops(table: CostTable, phase: str) -> None:
    changed = [
        after.name
        for before, after in zip(table.stages[phase], table.stages[phase][1:], strict=False)
        if before.cost.flops != after.cost.flops
    ]
    assert changed == (["select_logits"] if phase == "prefill" else ["lower_attention"])


def test_what_is_known_of_states_moves_no_more_bytes(table: CostTable) -> None:
    """An early read is the same read; a planned prefill keeps nothing but reads where it would."""
    decode = {s.name: s for s in table.stages["decode"]}
    assert decode["prefetch_states"].cost == decode["inplace_state"].cost
    prefill = {s.name: s for s in table.stages["prefill"]}
    # a kernel of the delta rule's less, whose copies are memory of its own
    fewer = Cost(launches=-len(tiny_config().linear_layers))
    assert prefill["fuse_conv_qk_norm"].cost == prefill["inplace_state"].cost + fewer
    before, after = (prefill[name].cost for name in ("fuse_conv_qk_norm", "keep_snapshots"))
    entries = 2 * INPUTS["chunk_slots"].dtype.itemsize  # one chunk, read by conv and delta rule
    assert after == before + Cost(bytes=entries)


def test_costs_add_up(table: CostTable) -> None:
    compiled = compile_model(tiny_config(), torch.float32, CompilerOptions())
    for phase, graph in compiled.graphs.items():
        costs = call_costs(graph)
        assert sum(costs.values(), Cost()) == table.stages[phase][-1].cost
        attention = OPS[f"paged_attention_{phase}"].overload
        (node,) = graph.nodes(attention)
        assert costs[node].flops == mixers(0, 1) * (
            STEPS[phase] * (STEPS[phase] + 1) // 2
            + STEPS[phase] * (planned_context(phase) - STEPS[phase])
        )
