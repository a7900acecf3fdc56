"""Verification: every stage of a compilation, run on the same inputs as the plain model.

Owns the scenario and the comparison. Does not own when it runs (an observer of runner.py).

    run_passes(graph, passes, context, observers=(Verifier(config, source).check_stage,))

A stage is run node by node on the CPU with dummy weights: ragged prompts in two chunks through
the prefill graph, single tokens through the decode graph, in scattered slots and blocks, with
NaN wherever a sequence has written nothing. Ops that a stage has not lowered yet know no state;
the interpreter keeps their sequences' inputs and applies them to each whole sequence, so every
prefix of the pipeline can be compared.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import layer_of
from minivllm.compiler.passes.canonicalize import ASSERTIONS
from minivllm.compiler.recipe import assemble
from minivllm.compiler.trace import trace
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import dummy_weights
from minivllm.ops import OPS
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.paged_attention import BLOCK_SIZE

# how many leading arguments of an opaque op have a row per token
OPAQUE_OPS: dict[Any, int] = {
    OPS["causal_conv1d"].overload: 1,
    OPS["gated_delta_rule"].overload: 5,
    OPS["fused_gated_delta_rule"].overload: 5,
    OPS["attention"].overload: 3,
}
PREFILL_CHUNKS = ((70, 1, 5), (3, 66, 1))  # tokens of each sequence in the first and second step
DECODE_STEPS = 5
SLOTS = (5, 2, 9)  # of the three sequences
LONGEST = max(map(sum, zip(*PREFILL_CHUNKS, strict=True)))  # tokens of a sequence


class VerificationError(RuntimeError):
    """A stage's logits differ from the plain model's by more than the tolerance."""


@dataclass
class Batch:
    """A step of the scenario: the inputs and the tokens of each sequence before it."""

    inputs: dict[str, Tensor]
    lengths: Sequence[int]


@dataclass
class Pools:
    """State pools of a scenario, and the history of ops that are not lowered yet."""

    states: dict[str, Tensor] = field(default_factory=dict)
    history: dict[tuple[str, Any, int], list[Tensor]] = field(default_factory=dict)


RELATIVE_TOLERANCE = 1e-5  # float32, of the largest logit: the same sums in another order
ULP = 2.0**-24


@dataclass(frozen=True)
class Comparison:
    """Of a stage's logits with the plain model's: the largest difference, what is allowed, and
    the largest logit."""

    error: float
    allowed: float
    scale: float

    @property
    def ok(self) -> bool:
        """Whether the stage is within the tolerance; NaN is not."""
        return self.error <= self.allowed


class Verifier:
    """Compares each stage of both graphs with the source graph."""

    def __init__(self, config: MiniQwenConfig, source: Graph) -> None:
        self.config = config
        self.source = source
        self.dtype = source.weights["embed_tokens.weight"].dtype

    def check_stage(self, graph: Graph, stage: str) -> None:
        """Run a stage and compare.

        Raises:
            VerificationError: naming the stage, the error found and the one allowed.
        """
        result = self.compare(graph)
        if not result.ok:
            raise VerificationError(
                f"after {stage} the logits differ by {result.error:.2e} from the plain model's, "
                f"more than {result.allowed:.2e} (largest logit {result.scale:.2e}, {self.dtype})"
            )

    def compare(self, graph: Graph) -> Comparison:
        """Run a stage over the scenario of its phase."""
        expected = self._expected(graph.phase)
        scale = float(expected.abs().max())
        error = self._error(self._run(graph, self.weights), expected)
        if self.dtype == torch.float32:
            # deep models amplify rounding; what they do to an ulp in their weights is allowed too
            allowed = max(RELATIVE_TOLERANCE * scale, 4 * self._amplified_ulp(graph.phase))
        else:
            # at most twice what rounding costs the unchanged graph
            allowed = 2 * self._source_error(graph.phase)
        return Comparison(error, allowed, scale)

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """Dummy weights in the graph's dtype."""
        names = {n: w.shape for n, w in self.source.weights.items() if n not in self._constants}
        return dummy_weights(names, self.dtype, "cpu", seed=0) | self._constants

    @functools.cached_property
    def _constants(self) -> dict[str, Tensor]:
        return constants(self.config)

    @functools.cache  # noqa: B019  (a Verifier lives as long as one compilation)
    def _expected(self, phase: str) -> Tensor:
        """The plain model's logits in float32."""
        if self.dtype == torch.float32:
            return self._run(self.source.clone(phase), self.weights)
        return self._run(self._exact.clone(phase), {n: w.float() for n, w in self.weights.items()})

    @functools.cached_property
    def _exact(self) -> Graph:
        """The plain model traced in float32."""
        return trace(self.config, torch.float32)

    @functools.cache  # noqa: B019
    def _source_error(self, phase: str) -> float:
        return self._error(self._run(self.source.clone(phase), self.weights), self._expected(phase))

    @functools.cache  # noqa: B019
    def _amplified_ulp(self, phase: str) -> float:
        """How far the plain model's logits move when every weight moves by about an ulp."""
        generator = torch.Generator().manual_seed(0)
        moved = {
            name: w * (1 + ULP * torch.randn(w.shape, generator=generator))
            for name, w in self.weights.items()
        }
        logits = self._run(self.source.clone(phase), moved)
        return self._error(logits, self._expected(phase))

    @staticmethod
    def _error(logits: Tensor, expected: Tensor) -> float:
        return float((logits.float() - expected).abs().max())

    def _run(self, graph: Graph, weights: Mapping[str, Tensor]) -> Tensor:
        """The logits of the whole scenario of the graph's phase, at the rows it wants."""
        sizes = (s.shape[0] for s in graph.states.values() if s.kind == "block")
        block_size = next(sizes, BLOCK_SIZE)
        weights = assemble(graph.weights, weights)
        entries = pool_entries(block_size)
        pools = Pools(
            {
                name: torch.full((entries, *spec.shape), torch.nan, dtype=spec.dtype)
                for name, spec in graph.states.items()
            }
        )
        if graph.phase == "decode":
            for name, spec in graph.states.items():
                if spec.kind == "slot":
                    pools.states[name][list(SLOTS)] = 0
        logits = []
        for batch in scenario(graph.phase, self.config.vocab_size, block_size):
            output = run(graph, weights, pools, batch)
            rows = batch.inputs["logits_rows"]
            wanted = output if output.shape[0] == rows.shape[0] else output[rows]
            logits.append(wanted)
        return torch.cat(logits)


def pool_entries(block_size: int) -> int:
    """Slots and blocks of the scenario's pools: some more than it uses, entry 0 for nobody."""
    return max(16, 3 * -(-LONGEST // block_size) + 1)


def scenario(phase: str, vocab: int, block_size: int) -> list[Batch]:
    """The steps of a phase: three sequences in scattered slots, blocks in no order.

    Args:
        phase: "prefill" (two chunks, the second with history) or "decode".
        vocab: token ids are drawn below it.
    """
    generator = torch.Generator().manual_seed(0)
    steps = PREFILL_CHUNKS if phase == "prefill" else ((1, 1, 1),) * DECODE_STEPS
    blocks = (torch.randperm(pool_entries(block_size) - 1, generator=generator) + 1).to(torch.int32)
    per_sequence = -(-LONGEST // block_size)
    block_table = blocks[: 3 * per_sequence].view(3, per_sequence)
    computed = [0, 0, 0]
    batches = []
    for lengths in steps:
        positions, places, rows = [], [], []
        for n, length in enumerate(lengths):
            for position in range(computed[n], computed[n] + length):
                positions.append(position)
                block = int(block_table[n, position // block_size])
                places.append(block * block_size + position % block_size)
            rows.append(len(positions) - 1)
        cu_seqlens, chunk_indices = chunk_metadata(lengths)
        ends = [c + length for c, length in zip(computed, lengths, strict=True)]
        used = [-(-end // block_size) for end in ends]
        inputs = {
            "input_ids": torch.randint(vocab, (len(positions),), generator=generator),
            "positions": torch.tensor(positions),
            "state_slots": torch.tensor(SLOTS),
            "num_computed_tokens": torch.tensor(computed, dtype=torch.int32),
            "cu_seqlens": cu_seqlens,
            "chunk_indices": chunk_indices,
            "chunk_slots": _snapshot_places(len(chunk_indices)),
            "block_table": block_table,
            "kv_indptr": torch.tensor([0, *itertools.accumulate(used)], dtype=torch.int32),
            "kv_indices": torch.cat([block_table[n, :count] for n, count in enumerate(used)]),
            "seq_lens": torch.tensor(ends, dtype=torch.int32),
            "slot_mapping": torch.tensor(places),
            "logits_rows": torch.tensor(rows),
        }
        batches.append(Batch(inputs, lengths))
        computed = ends
    return batches


def _snapshot_places(chunks: int) -> Tensor:
    """`[chunks]` int32: every other chunk leaves a snapshot in a slot that no sequence has."""
    free = [slot for slot in range(1, pool_entries(BLOCK_SIZE)) if slot not in SLOTS]
    entries = [free[i // 2] if i % 2 == 0 and i // 2 < len(free) else 0 for i in range(chunks)]
    return torch.tensor(entries, dtype=torch.int32)


def run(graph: Graph, weights: Mapping[str, Tensor], pools: Pools, batch: Batch) -> Tensor:
    """Interpret a graph of any stage for one step; changes `pools`."""
    values: dict[Node, Any] = {}
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            values[node] = batch.inputs[str(node.target)]
        elif node.op == "get_attr":
            name = str(node.target)
            values[node] = weights[name] if name in graph.weights else pools.states[name]
        elif node.op == "call_function" and node.target not in ASSERTIONS:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
            with torch.no_grad():
                if node.target in OPAQUE_OPS:
                    values[node] = _whole_sequences(node, args, pools, batch.lengths)
                else:
                    assert callable(node.target)
                    values[node] = node.target(*args, **kwargs)
    return values[graph.output]


def _whole_sequences(
    node: Node, args: tuple[Any, ...], pools: Pools, lengths: Sequence[int]
) -> Tensor:
    """Apply an opaque op to each sequence with its history; returns the new tokens' rows."""
    assert callable(node.target)
    count = OPAQUE_OPS[node.target]
    outputs = []
    start = 0
    for n, length in enumerate(lengths):
        key = (layer_of(node), node.target, n)
        new = [a[start : start + length] for a in args[:count]]
        past = pools.history.get(key)
        whole = new if past is None else [torch.cat(p) for p in zip(past, new, strict=True)]
        pools.history[key] = whole
        outputs.append(node.target(*whole, *args[count:])[-length:])
        start += length
    return torch.cat(outputs)
