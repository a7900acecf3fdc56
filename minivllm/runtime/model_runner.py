"""Runs the model for the rows of a step: the only part of the runtime that feeds the graphs.

Owns the state pools and the inputs of the graphs. Does not own which sequence has which slot and
blocks, nor sampling.

    runner = ModelRunner(
        compiled, weights, device, dtype, num_slots=2, num_blocks=9, block_size=256
    )
    logits = runner.prefill([Row(token_ids, 0, state_slot=1, blocks=[1, 2])])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.compile import CompiledModel
from minivllm.model.miniqwen import MiniQwen
from minivllm.ops.fla import chunk_metadata


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step.

    Attributes:
        token_ids: the whole sequence up to and including this step's tokens.
        num_computed_tokens: how many of them earlier steps have run.
        state_slot: its entry in the slot pools; never 0.
        blocks: its KV blocks in order, enough for `token_ids`; never 0.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    state_slot: int
    blocks: Sequence[int]


class ModelRunner:
    """Executes the prefill and the decode graph over pools of state.

    Args:
        compiled: both graphs, finished.
        weights: every weight of the graphs, on `device`.
        device, dtype: what the graphs run on and in.
        num_slots, num_blocks: entries of the pools; entry 0 of each belongs to padding rows.
        implementations: op name to the implementation forced on it.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        implementations: Mapping[str, str] | None = None,
    ) -> None:
        self.device = device
        self.block_size = block_size
        specs = compiled.prefill.states | compiled.decode.states
        assert compiled.prefill.states == compiled.decode.states, "the phases share their state"
        entries = {"slot": num_slots, "block": num_blocks}
        self.states = {
            name: torch.zeros(entries[s.kind], *s.shape, dtype=s.dtype, device=device)
            for name, s in specs.items()
        }
        self.graphs: dict[str, Executable] = {
            phase: bind(graph, weights, self.states, device, dtype, implementations)
            for phase, graph in compiled.graphs.items()
        }

    @property
    def implementations(self) -> dict[str, str]:
        """Op name to the name of its implementation."""
        return self.graphs["prefill"].implementations | self.graphs["decode"].implementations

    @property
    def warnings(self) -> list[str]:
        """A line for each op that runs on a substitute for a missing package."""
        return list(dict.fromkeys(w for g in self.graphs.values() for w in g.warnings))

    def prefill(self, rows: Sequence[Row]) -> Tensor:
        """Run a chunk of each sequence, of any lengths; `[N, vocab]`, each one's last logits."""
        return self._run("prefill", rows)

    def decode(self, rows: Sequence[Row]) -> Tensor:
        """Run one token of each sequence; `[N, vocab]`."""
        assert all(len(r.token_ids) - r.num_computed_tokens == 1 for r in rows), "one token each"
        return self._run("decode", rows)

    @torch.inference_mode()
    def _run(self, phase: str, rows: Sequence[Row]) -> Tensor:
        graph = self.graphs[phase]
        inputs = self.inputs(rows)
        # Triton launches on the current device, which need not be the one that was named
        named = self.device.type == "cuda" and self.device.index is not None
        on_device = torch.cuda.device(self.device) if named else nullcontext()
        with on_device:
            return graph(**{n: inputs[n].to(self.device, non_blocking=True) for n in graph.inputs})

    def inputs(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The inputs of a step on the CPU, in the vocabulary of `compiler.graph.INPUTS`."""
        lengths = [len(r.token_ids) - r.num_computed_tokens for r in rows]
        cu_seqlens, chunk_indices = chunk_metadata(lengths)
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for row in rows:
            start, end = row.num_computed_tokens, len(row.token_ids)
            ids += row.token_ids[start:end]
            positions += range(start, end)
            size = self.block_size
            places += [row.blocks[p // size] * size + p % size for p in range(start, end)]
        widest = max(len(r.blocks) for r in rows)
        return {
            "input_ids": torch.tensor(ids),
            "positions": torch.tensor(positions),
            "state_slots": torch.tensor([r.state_slot for r in rows]),
            "num_computed_tokens": torch.tensor(
                [r.num_computed_tokens for r in rows], dtype=torch.int32
            ),
            "cu_seqlens": cu_seqlens,
            "chunk_indices": chunk_indices,
            "block_table": torch.tensor(
                [[*r.blocks, *[0] * (widest - len(r.blocks))] for r in rows], dtype=torch.int32
            ),
            "seq_lens": torch.tensor([len(r.token_ids) for r in rows], dtype=torch.int32),
            "slot_mapping": torch.tensor(places),
            "logits_rows": cu_seqlens[1:].long() - 1,
        }


class ReferenceRunner:
    """The oracle: the plain model over the whole sequence, at every step, without any state.

    Args:
        model: MiniQwen with its weights, on `device`.
    """

    def __init__(self, model: MiniQwen, device: torch.device) -> None:
        self.model = model
        self.device = device
        opaque = ("attention", "causal_conv1d", "gated_delta_rule")
        self.implementations = dict.fromkeys(opaque, "torch")
        self.warnings: list[str] = []

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Row]) -> Tensor:
        """`[N, vocab]`: the logits behind each sequence."""
        logits = []
        for row in rows:
            ids = torch.tensor(row.token_ids, device=self.device)
            positions = torch.arange(len(row.token_ids), device=self.device)
            logits.append(self.model(ids, positions)[-1])
        return torch.stack(logits)

    decode = prefill
