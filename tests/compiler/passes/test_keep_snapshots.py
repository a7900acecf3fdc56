"""keep_snapshots: a prefill leaves the states that it had between, and computes what it did."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_graphs import targets

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.passes.keep_snapshots import KINDS, KeepSnapshots
from minivllm.compiler.recipe import assemble
from minivllm.compiler.verify import Batch, Pools, run
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights, parameter_shapes
from minivllm.ops.chunks import chunk_metadata

BLOCK_SIZE, ENTRIES, LENGTHS = 16, 12, (150, 64, 3)
SLOTS, KEPT = (5, 2, 9), {0: 7, 1: 3, 3: 11}  # chunks 0 to 2 are the first sequence's


@pytest.fixture(scope="module")
def without(config: MiniQwenConfig) -> CompiledModel:
    options = CompilerOptions(disable=("keep_snapshots",))
    return compile_model(config, torch.float32, options, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def weights(config: MiniQwenConfig, compiled: CompiledModel) -> dict[str, Tensor]:
    plain = dummy_weights(parameter_shapes(config), torch.float32, "cpu", seed=0)
    return assemble(compiled.prefill.weights, plain | constants(config))


def prefill(
    graph: Graph, weights: dict[str, Tensor], parts: list[list[tuple[int, int]]], kept: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the last step's rows and the pools, after steps that run parts of sequences."""
    pools = Pools(
        {
            n: torch.full((ENTRIES if s.kind == "slot" else 60, *s.shape), torch.nan, dtype=s.dtype)
            for n, s in graph.states.items()
        }
    )
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(60, (n,), generator=generator) for n in LENGTHS]
    table = torch.arange(1, 46, dtype=torch.int32).view(3, 15)
    for step in parts:
        lengths = [b - a for a, b in step]
        used = [-(-b // BLOCK_SIZE) for _, b in step]
        cu_seqlens, chunk_indices = chunk_metadata(lengths)
        chunk_slots = torch.zeros(len(chunk_indices), dtype=torch.int32)
        for chunk, entry in kept.items():
            chunk_slots[chunk] = entry
        inputs = {
            "input_ids": torch.cat([x[a:b] for x, (a, b) in zip(ids, step, strict=True)]),
            "positions": torch.cat([torch.arange(a, b) for a, b in step]),
            "state_slots": torch.tensor(SLOTS),
            "num_computed_tokens": torch.tensor([a for a, _ in step], dtype=torch.int32),
            "cu_seqlens": cu_seqlens,
            "chunk_indices": chunk_indices,
            "chunk_slots": chunk_slots,
            "kv_indptr": torch.tensor([0, *itertools.accumulate(used)], dtype=torch.int32),
            "kv_indices": torch.cat([row[:n] for row, n in zip(table, used, strict=True)]),
            "seq_lens": torch.tensor([b for _, b in step], dtype=torch.int32),
            "slot_mapping": torch.tensor(
                [
                    int(table[n, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
                    for n, (a, b) in enumerate(step)
                    for p in range(a, b)
                ]
            ),
            "logits_rows": cu_seqlens[1:].long() - 1,
        }
        logits = run(graph, weights, pools, Batch(inputs, lengths))
    return logits, pools.states


def test_counts_and_ops(compiled: CompiledModel, without: CompiledModel) -> None:
    (report,) = [r for r in compiled.reports if r.name == "keep_snapshots"]
    assert (report.phase, report.matches, report.expected) == ("prefill", 2, 2)
    assert targets(compiled.prefill) == targets(without.prefill)
    chunk_slots = compiled.prefill.input("chunk_slots")
    assert len(chunk_slots.users) == 2
    conv, rule = nodes = compiled.prefill.nodes(*KINDS)
    assert [KINDS[node.target] for node in nodes] == ["conv", "recurrent"]
    assert conv.args[-1] is chunk_slots and rule.args[-2:] == (chunk_slots, True)
    assert {node.meta["pass"] for node in nodes} == {"keep_snapshots"}
    for graph in (without.prefill, compiled.decode):
        assert "chunk_slots" not in graph.input_names


def test_kept_states_are_those_of_a_prompt_cut_there(
    compiled: CompiledModel, without: CompiledModel, weights: dict[str, Tensor]
) -> None:
    """Chunks 0, 1 (of three) and 3: the first sequence at 64 and 128 tokens, the second at 64."""
    whole = [(0, n) for n in LENGTHS]
    logits, states = prefill(compiled.prefill, weights, [whole], KEPT)
    expected, final = prefill(without.prefill, weights, [whole], {})
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for at, entry, n in ((64, 7, 0), (128, 3, 0), (64, 11, 1)):
        cut = [(0, at if n == i else size) for i, size in enumerate(LENGTHS)]
        _, there = prefill(without.prefill, weights, [cut], {})
        for name, spec in compiled.prefill.states.items():
            if spec.kind == "slot":
                kept, wanted = states[name][entry], there[name][SLOTS[n]]
                torch.testing.assert_close(kept, wanted, rtol=1e-5, atol=1e-6)
    written = {*SLOTS, *KEPT.values()}
    for name, spec in compiled.prefill.states.items():
        if spec.kind == "slot":
            untouched = [entry for entry in range(ENTRIES) if entry not in written]
            assert states[name][untouched].isnan().all()
            torch.testing.assert_close(states[name][[*SLOTS]], final[name][[*SLOTS]])


def test_a_kept_state_goes_on(
    compiled: CompiledModel, without: CompiledModel, weights: dict[str, Tensor]
) -> None:
    """A chunk of a later step keeps what its sequence is by then."""
    steps = [[(0, 64), (0, 1), (0, 1)], [(64, 150), (1, 64), (1, 3)]]
    _, states = prefill(compiled.prefill, weights, steps, {0: 7})
    _, there = prefill(without.prefill, weights, [[(0, 128), (0, 1), (0, 1)]], {})
    for name, spec in compiled.prefill.states.items():
        if spec.kind == "slot":
            torch.testing.assert_close(states[name][7], there[name][5], rtol=1e-5, atol=1e-6)


def test_all_states_or_none(config: MiniQwenConfig) -> None:
    """A state that only a scatter writes has no place between: nothing is kept, and it is said."""
    options = CompilerOptions(disable=("fold_gate",))
    model = compile_model(config, torch.float32, options, block_size=BLOCK_SIZE)
    assert "chunk_slots" not in model.prefill.input_names
    context = PassContext(config, torch.float32, BLOCK_SIZE, disabled=frozenset({"fold_gate"}))
    before = targets(model.prefill)
    assert KeepSnapshots().run(model.prefill, context) == []
    assert targets(model.prefill) == before
    (miss,) = context.misses.noted
    assert miss.site == "layers.0.recurrent" and "all states or none" in miss.reason
