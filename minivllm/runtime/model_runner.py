"""Runs a step of the schedule on the model: copies, the prefill graph, the decode graph.

Owns the pools, the bound graphs and the graphs' inputs. Does not own the schedule, who has which
slot and block (`scheduler`), nor sampling.

    runner = ModelRunner(compiled, weights, device, dtype, sizes)
    logits = runner.execute(scheduler.schedule()).sampled
    logits = runner.prefill([Row(ids, 0, len(ids), slot=1, blocks=[1, 2])])      # by hand

Shapes: N sequences, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.compiler.bind import Executable, bind
from minivllm.compiler.compile import CompiledModel
from minivllm.compiler.skeleton import skeleton
from minivllm.model.miniqwen import MiniQwen
from minivllm.runtime.decode_runner import DecodeRunner
from minivllm.runtime.newest_tokens import NewestTokens
from minivllm.runtime.pools import EntryPool, meta_views, of_kind
from minivllm.runtime.prefill_inputs import Bucket, Row
from minivllm.runtime.prefill_runner import PrefillRunner
from minivllm.runtime.step import BlockCopy, Chunk, StateCopy, Step


@dataclass(frozen=True)
class PoolSizes:
    """Entries of the pools; entry 0 of slots and blocks belongs to padding rows.

    Attributes:
        num_slots, num_blocks: padding's entry included.
        num_snapshots: in device memory.
        num_host_snapshots: in page-locked host memory.
    """

    num_slots: int
    num_blocks: int
    num_snapshots: int = 0
    num_host_snapshots: int = 0


@dataclass(frozen=True)
class StepLogits:
    """What a step computed.

    Attributes:
        parts: `[rows, V]` each, valid until the next step; one behind the other they are `sampled`.
        prompt: for each chunk whose prompt's log-probabilities are wanted, `[tokens, V]`.
        greedy: the most probable tokens, `[len(step.sampled)]` int64, -1 where the logits hold NaN
            or infinity; the next step of these rows begins with them. None: nobody looked.
    """

    parts: Sequence[Tensor]
    prompt: list[tuple[Chunk, Tensor]]
    greedy: Tensor | None = None

    @functools.cached_property
    def sampled(self) -> Tensor:
        """`[len(step.sampled), V]`, in that order. Put together when first asked for: who takes
        `greedy` needs no copy of wide logits."""
        return _joined(self.parts)


class ModelRunner:
    """Executes the prefill and the decode graph over pools of state.

    Args:
        compiled: both graphs, finished.
        weights: every weight of the graphs, on `device`.
        device, dtype: what the graphs run on and in.
        sizes: entries of the pools.
        max_num_seqs: rows of the largest decode step; None: as many as there are slots.
        max_blocks: blocks of the longest sequence; None: as many as there are.
        vocab_limit: see `NewestTokens`.
        implementations: op name to the implementation forced on it.
        checked: see `DecodeRunner`.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        sizes: PoolSizes,
        *,
        max_num_seqs: int | None = None,
        max_blocks: int | None = None,
        vocab_limit: int | None = None,
        implementations: Mapping[str, str] | None = None,
        checked: bool = False,
    ) -> None:
        self.device = device
        assert compiled.prefill.states == compiled.decode.states, "the phases share their state"
        states = compiled.decode.states
        slot_states = of_kind(states, "slot")
        self._num_slots = sizes.num_slots
        states_pool = EntryPool(slot_states, sizes.num_slots + sizes.num_snapshots, device)
        self.slots = states_pool.part(0, sizes.num_slots)
        self.snapshots = states_pool.part(sizes.num_slots, len(states_pool.storage))
        self.blocks = EntryPool(of_kind(states, "block"), sizes.num_blocks, device)
        self.host_snapshots = EntryPool(
            slot_states, sizes.num_host_snapshots, torch.device("cpu"), pin=device.type == "cuda"
        )
        self._state_pools = {
            "slot": self.slots,
            "snapshot": self.snapshots,
            "host": self.host_snapshots,
        }
        pools = states_pool.views | self.blocks.views
        self._compiled = compiled
        self._bind = functools.partial(
            bind, weights=weights, states=pools, device=device, dtype=dtype, forced=implementations
        )
        self.graphs: dict[str, Executable] = {
            phase: self._bind(graph) for phase, graph in compiled.graphs.items()
        }
        self.newest = NewestTokens(sizes.num_slots, device, vocab_limit, implementations)
        self.prefiller = PrefillRunner(self.graphs["prefill"], device, self.newest)
        self.decoder = DecodeRunner(
            self.graphs["decode"],
            device,
            self.newest,
            max_num_seqs=max_num_seqs or sizes.num_slots - 1,
            max_blocks=max_blocks or sizes.num_blocks - 1,
            implementations=implementations,
            checked=checked,
        )

    @property
    def snapshots_on_the_way(self) -> bool:
        """Whether the prefill graph leaves snapshots within a chunk (`Chunk.snapshots`)."""
        return "chunk_slots" in self.graphs["prefill"].inputs

    @property
    def implementations(self) -> dict[str, str]:
        """Op name to the name of its implementation."""
        prefill, decode = (self.graphs[phase].implementations for phase in ("prefill", "decode"))
        return prefill | decode | self.decoder.implementations | self.newest.implementations

    @property
    def warnings(self) -> list[str]:
        """A line for each op that runs on a substitute for a missing package."""
        return list(dict.fromkeys(w for g in self.graphs.values() for w in g.warnings))

    def capture(self, prefill_buckets: Sequence[Bucket]) -> int:
        """Capture these prefills and decode at every batch size, as far as the chosen
        implementations allow; the GPU only. Returns the number of graphs."""
        with self.on_device():
            graphs = 0
            if self.graphs["prefill"].capturable and prefill_buckets:
                self.prefiller.capture(prefill_buckets, self._rehearsal("prefill"))
                graphs += len(prefill_buckets)
            if self.graphs["decode"].capturable:
                self.decoder.capture(self._rehearsal("decode"))
                graphs += len(self.decoder.buckets)
            return graphs

    def _rehearsal(self, phase: str) -> Executable:
        """Of all kernels that a phase's graph launches, each once."""
        graph = self._compiled.graphs[phase]
        return self._bind(skeleton(graph, meta_views(graph.states)))

    def execute(self, step: Step) -> StepLogits:
        """Run a step: copies, prefill, decode, copies."""
        with self.on_device():
            if step.before:
                self.copy(step.before)
            parts: list[Tensor] = []
            greedy: list[Tensor] = []
            prompt: list[tuple[Chunk, Tensor]] = []
            if step.prefill:
                rows = [_row(chunk, self._num_slots) for chunk in step.prefill]
                logits, best = self.prefiller.run(rows), self.prefiller.greedy
                at = 0
                for chunk, row in zip(step.prefill, rows, strict=True):
                    at += row.num_logits
                    if row.all_logits:
                        prompt.append((chunk, logits[at - row.num_logits : at - row.copies]))
                    parts.append(logits[at - row.copies : at])
                    greedy.append(best[at - row.copies : at])
            if step.decode:
                parts.append(
                    self.decoder.run(
                        [r.num_computed_tokens for r in step.decode],
                        [r.state_slot for r in step.decode],
                        [r.blocks for r in step.decode],
                    )
                )
                greedy.append(self.decoder.greedy[: len(step.decode)])
            if step.after:
                self.copy(step.after)
            return StepLogits(parts, prompt, _joined(greedy))

    def store_tokens(self, step: Step, token_ids: Tensor) -> None:
        """Let the rows of `step.sampled` go on with these tokens, `[len(step.sampled)]` int64."""
        with self.on_device():
            self.newest.store([r.state_slot for r in step.sampled], token_ids)

    def prefill(self, rows: Sequence[Row]) -> Tensor:
        """Run a part of each sequence, of any lengths; the wanted logits, row after row."""
        with self.on_device():
            return self.prefiller.run(rows)

    def decode(self, rows: Sequence[Row]) -> Tensor:
        """Run one token of each sequence; `[N, V]`, valid until the next call."""
        assert all(r.end - r.start == 1 for r in rows), "one token each"
        with self.on_device():
            slots = [r.slot for r in rows]
            self.newest.store(slots, torch.tensor([r.token_ids[r.start] for r in rows]))
            return self.decoder.run(
                [r.start for r in rows],
                slots,
                [list(r.blocks) for r in rows],
            )

    @torch.inference_mode()
    def copy(self, copies: Iterable[StateCopy | BlockCopy]) -> None:
        """Copy states and blocks between entries, in order."""
        for copy in copies:
            if isinstance(copy, BlockCopy):
                self.blocks.copy_(copy.target, self.blocks, copy.source)
            else:
                (from_pool, source), (to_pool, target) = copy.source, copy.target
                self._state_pools[to_pool].copy_(target, self._state_pools[from_pool], source)

    def on_device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, which need not be the one that was named."""
        named = self.device.type == "cuda" and self.device.index is not None
        return torch.cuda.device(self.device) if named else nullcontext()


def _row(chunk: Chunk, num_slots: int) -> Row:
    """A chunk as the prefill graph takes it; snapshots lie behind the slots."""
    request = chunk.request
    return Row(
        request.pack(),
        chunk.start,
        chunk.end,
        request.state_slot,
        request.blocks,
        copies=1 + len(request.forks) if chunk.last else 0,
        all_logits=request.params.prompt_logprobs is not None,
        snapshots=[(end, num_slots + index) for end, index in chunk.snapshots],
        fork_slots=[fork.state_slot for fork in request.forks],
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) != 1 else parts[0]


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
        self.snapshots_on_the_way = False

    @torch.inference_mode()
    def execute(self, step: Step) -> StepLogits:
        """The logits of a step; copies have nothing to copy."""
        sampled: list[Tensor] = []
        prompt: list[tuple[Chunk, Tensor]] = []
        for chunk in step.prefill:
            request = chunk.request
            all_logits = request.params.prompt_logprobs is not None
            if not all_logits and not chunk.last:
                continue
            logits = self.model_logits(request.token_ids[: chunk.end])
            if all_logits:
                prompt.append((chunk, logits[chunk.start :]))
            if chunk.last:
                sampled += [logits[-1]] * (1 + len(request.forks))
        sampled += [self.model_logits(request.token_ids)[-1] for request in step.decode]
        vocabulary = self.model.config.vocab_size
        return StepLogits(
            [torch.stack(sampled) if sampled else torch.empty(0, vocabulary, device=self.device)],
            prompt,
        )

    def store_tokens(self, step: Step, token_ids: Tensor) -> None:
        """Nothing to do: every step begins with the whole sequence."""

    def model_logits(self, token_ids: Sequence[int]) -> Tensor:
        """`[T, V]`: the logits behind every token of a sequence."""
        ids = torch.tensor(token_ids, device=self.device)
        return self.model(ids, torch.arange(len(token_ids), device=self.device))
