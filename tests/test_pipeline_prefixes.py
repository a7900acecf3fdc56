"""After every prefix of the pipeline the graphs compute what the plain model computes.

The plain model runs each sequence by itself, in one piece. A prefix of the pipeline runs it in
chunks beside others, in scattered slots and blocks, first through the prefill graph and then
through the decode graph over the same state. Wherever nobody has written there is NaN.

In float32 the two may differ by 1e-5 of the largest logit (2e-5 for 24 layers): they add in
another order. That asks for well-conditioned models: hidden sizes of 64 and more, heads of 32 and
more; in smaller ones a norm over a few values, or a delta rule whose keys nearly cancel, blows
rounding up by more than that, whatever computes it.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.pipeline import PIPELINE, select_passes
from minivllm.compiler.recipe import assemble
from minivllm.compiler.runner import run_passes
from minivllm.compiler.trace import trace
from minivllm.compiler.verify import Batch, Pools, run
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen, constants
from minivllm.model.weights import dummy_weights, load_config, load_weights, parameter_shapes
from minivllm.ops.fla import chunk_metadata

BLOCK_SIZE = 16
SLOTS, BLOCKS = 12, 40  # of the pools; 0 of each belongs to nobody
TINY = Path(str(importlib.resources.files("minivllm") / "assets" / "tiny"))


def small(**changes: Any) -> MiniQwenConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ("linear_attention", "full_attention"),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    return MiniQwenConfig(**(sizes | changes))


def drawn(seed: int) -> MiniQwenConfig:
    """A config of random sizes, with at least one layer of each kind."""
    rng = random.Random(seed)
    key_heads, kv_heads = rng.randint(1, 3), rng.randint(1, 3)
    kinds = ["linear_attention", "full_attention", rng.choice(["linear", "full"]) + "_attention"]
    rng.shuffle(kinds)
    return small(
        vocab_size=rng.randint(50, 150),
        hidden_size=rng.randint(64, 100),
        intermediate_size=rng.randint(64, 130),
        num_hidden_layers=3,
        num_attention_heads=kv_heads * rng.randint(1, 3),
        num_key_value_heads=kv_heads,
        head_dim=rng.randrange(32, 60, 4),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * rng.randint(1, 3),
        linear_key_head_dim=rng.randint(32, 48),
        linear_value_head_dim=rng.randint(32, 48),
        linear_conv_kernel_dim=rng.randint(2, 5),
        layer_types=tuple(kinds),
        partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]),
        tie_word_embeddings=rng.random() < 0.5,
        attention_bias=rng.random() < 0.5,
    )


CONFIGS: dict[str, MiniQwenConfig] = {
    "tiny": load_config(TINY),
    "one_of_each": small(),
    "equal_heads": small(linear_num_key_heads=4, num_key_value_heads=4, tie_word_embeddings=False),
    "drawn_1": drawn(1),
    "drawn_2": drawn(2),
    "24_layers": small(
        num_hidden_layers=24, layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 6
    ),
}


@dataclass(frozen=True)
class Scenario:
    """Steps of some sequences: tokens of each in every prefill, then decode steps."""

    prefills: tuple[tuple[int, ...], ...]
    decodes: int
    slots: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence at the end."""
        return [sum(column) + self.decodes for column in zip(*self.prefills, strict=True)]


SCENARIOS = (
    Scenario(((70, 1, 5), (3, 66, 1)), 2, (5, 2, 9)),  # ragged, with one-token chunks
    Scenario(((1,),), 2, (7,)),  # one sequence, one token
    Scenario(((65,), (1,)), 1, (11,)),  # one sequence, one token with a history
    Scenario(((2, 1, 33, 4, 1),), 1, (3, 10, 1, 8, 4)),  # no multiple of anything
)


def tokens(scenario: Scenario, vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(scenario.slots))
    return [torch.randint(vocab, (n,), generator=generator) for n in scenario.lengths]


def batches(scenario: Scenario, vocab: int) -> list[tuple[str, Batch]]:
    """The steps with their phase; every token's logits are wanted, in no order."""
    generator = torch.Generator().manual_seed(0)
    sequences = tokens(scenario, vocab)
    count = len(sequences)
    per_sequence = -(-max(scenario.lengths) // BLOCK_SIZE)
    free = torch.randperm(BLOCKS - 1, generator=generator)[: count * per_sequence] + 1
    table = free.view(count, per_sequence).int()
    steps = [("prefill", lengths) for lengths in scenario.prefills]
    steps += [("decode", (1,) * count)] * scenario.decodes
    computed = [0] * count
    result = []
    for phase, lengths in steps:
        ends = [c + n for c, n in zip(computed, lengths, strict=True)]
        spans = list(zip(computed, ends, strict=True))
        cu_seqlens, chunk_indices = chunk_metadata(lengths)
        inputs = {
            "input_ids": torch.cat([s[a:b] for s, (a, b) in zip(sequences, spans, strict=True)]),
            "positions": torch.cat([torch.arange(a, b) for a, b in spans]),
            "state_slots": torch.tensor(scenario.slots),
            "num_computed_tokens": torch.tensor(computed, dtype=torch.int32),
            "cu_seqlens": cu_seqlens,
            "chunk_indices": chunk_indices,
            "block_table": table,
            "seq_lens": torch.tensor(ends, dtype=torch.int32),
            "slot_mapping": torch.tensor([
                int(table[n, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
                for n, (a, b) in enumerate(spans) for p in range(a, b)
            ]),
            "logits_rows": torch.randperm(sum(lengths), generator=generator),
        }  # fmt: skip
        result.append((phase, Batch(inputs, lengths)))
        computed = ends
    return result


def stage_logits(graphs: Mapping[str, Graph], config: MiniQwenConfig, plain: Mapping[str, Tensor]):
    """Logits of all tokens of all scenarios, sequence by sequence, through both graphs."""
    merged = {phase: assemble(graph.weights, plain) for phase, graph in graphs.items()}
    logits = []
    for scenario in SCENARIOS:
        states = graphs["prefill"].states
        sizes = {"slot": SLOTS, "block": BLOCKS}
        pools = Pools(
            {
                name: torch.full((sizes[s.kind], *s.shape), torch.nan, dtype=s.dtype)
                for name, s in states.items()
            }
        )
        steps = batches(scenario, config.vocab_size)
        parts: list[list[Tensor]] = [[] for _ in scenario.slots]
        for phase, batch in steps:
            graph = graphs[phase]
            output = run(graph, merged[phase], pools, batch)
            rows = batch.inputs["logits_rows"]
            if "logits_rows" in graph.input_names:
                output = torch.empty_like(output).index_copy_(0, rows, output)
            assert output.shape[0] == rows.shape[0]
            for part, piece in zip(parts, output.split(list(batch.lengths)), strict=True):
                part.append(piece)
        logits += [torch.cat(part) for part in parts]
        check_pools(states, pools, scenario, steps)
    return torch.cat(logits).float()


def check_pools(states: Any, pools: Pools, scenario: Scenario, steps: Any) -> None:
    """What belongs to no sequence was not written."""
    for name, spec in states.items():
        pool = pools.states[name]
        if spec.kind == "slot":
            written = set((~pool.flatten(1).isnan()).any(1).nonzero().flatten().tolist())
            assert written == set(scenario.slots), name
        else:
            written = set((~pool.flatten(0, 1).flatten(1).isnan()).any(1).nonzero().flatten().tolist())
            places = {p for _, batch in steps for p in batch.inputs["slot_mapping"].tolist()}
            assert written == places, name


@torch.no_grad()
def plain_logits(config: MiniQwenConfig, weights: Mapping[str, Tensor]) -> Tensor:
    """The plain model in float32, each sequence by itself and in one piece."""
    model = MiniQwen(config)
    model.load_state_dict({n: weights[n].float() for n in parameter_shapes(config)})
    logits = []
    for scenario in SCENARIOS:
        for ids in tokens(scenario, config.vocab_size):
            logits.append(model(ids, torch.arange(len(ids))))
    return torch.cat(logits)


def stages(config: MiniQwenConfig, source: Graph) -> dict[str, dict[str, Graph]]:
    """Both graphs after every prefix of the pipeline; the empty one is called "source"."""
    seen: dict[str, dict[str, Graph]] = {"source": {}} | {p.name: {} for p in PIPELINE}
    context = PassContext(config, torch.float32, BLOCK_SIZE)
    for phase in PHASES:
        run_passes(
            source.clone(phase),
            select_passes("compiled", phase),
            context,
            [lambda graph, stage: seen[stage].update({graph.phase: graph.clone(graph.phase)})],
        )
    for before, after in itertools.pairwise(seen):
        for phase in PHASES:  # a pass of the other phase changes nothing
            seen[after].setdefault(phase, seen[before][phase])
    return seen


@functools.cache
def weights_of(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    config = CONFIGS[name]
    shapes = parameter_shapes(config)
    if name == "tiny":
        loaded = load_weights(TINY, shapes, dtype, "cpu", progress=False)
    else:
        loaded = dummy_weights(shapes, dtype, "cpu", seed=0)
    return loaded | constants(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_prefix_in_float32(name: str) -> None:
    config, weights = CONFIGS[name], weights_of(name, torch.float32)
    expected = plain_logits(config, weights)
    scale = float(expected.abs().max())
    assert scale > 1, "logits near zero would prove nothing"
    allowed = 2e-5 if config.num_hidden_layers == 24 else 1e-5
    errors = {}
    for stage, graphs in stages(config, trace(config, torch.float32)).items():
        logits = stage_logits(graphs, config, weights)
        errors[stage] = float((logits - expected).abs().max()) / scale
    print(name, {stage: f"{error:.1e}" for stage, error in errors.items()})
    wrong = {stage: error for stage, error in errors.items() if not error <= allowed}
    assert wrong == {}


# Rounding to bfloat16 happens in as many places behind a fusion as before it, but not always to
# the same numbers: a merged linear adds in another order, a decode step rounds what it is given
# instead of what a longer sum gave. Two equally long chains of roundings have errors of equal
# size, but not equal errors: MEASURED
MARGIN = 1.25


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "24_layers"])
def test_every_prefix_in_bfloat16(name: str) -> None:
    config, weights = CONFIGS[name], weights_of(name, torch.bfloat16)
    expected = plain_logits(config, weights)
    ratios = {}
    for stage, graphs in stages(config, trace(config, torch.bfloat16)).items():
        error = stage_logits(graphs, config, weights) - expected
        size = float(error.square().mean().sqrt()), float(error.abs().max())
        if stage == "source":
            unfused = size
        ratios[stage] = size[0] / unfused[0], size[1] / unfused[1]
    print(name, unfused, {stage: f"{a:.3f} {b:.3f}" for stage, (a, b) in ratios.items()})
    wrong = {stage: ratio for stage, ratio in ratios.items() if not ratio[0] <= MARGIN}
    assert wrong == {}
