"""The ways to run one model that `compile_vs_eager.py` compares, with one interface.

Owns building each over shared weights, and one prefill or decode step of each. Does not own the
clock's discipline nor the numbers made of it. transformers is in `hugging_face.py`.

    model = Model.load(config)
    row = build("eager", model, sizes)
    row.prefill(ids); row.start(prompts); row.decode(len(prompts), steps=8)

Shapes: T tokens, N sequences of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bench.model import Model, planned, whole_sequence
from bench.samples import working_time
from bench.stock import separate_states, stock
from minivllm.compiler.compile import CompiledModel
from minivllm.compiler.cost import Cost
from minivllm.compiler.pipeline import PIPELINE
from minivllm.compiler.recipe import allocate
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.model_runner import ModelRunner, PoolSizes
from minivllm.runtime.prefill_inputs import Row
from minivllm.runtime.prefill_runner import PrefillRunner, prefill_buckets
from minivllm.runtime.resolve import use_no_cublas_workspace

ROWS = {
    "hf": "transformers' generate",
    "reference": "the plain model over the whole sequence, for every token",
    "eager": "the lowered graph op by op",
    "torch_compile": "torch.compile of that graph",
    "torch_compile_reduce_overhead": "the same, mode=reduce-overhead (CUDA)",
    "compiled_no_graphs": "all passes, without CUDA Graphs (CUDA)",
    "compiled": "all passes, under CUDA Graphs where there is CUDA",
}
CUDA_ONLY = ("torch_compile_reduce_overhead", "compiled_no_graphs")  # on a CPU they are others
PREFILL_TOKENS = 8192  # of one call while a batch is being started


@dataclass(frozen=True)
class Lengths:
    """Lengths and batches.

    Attributes:
        prefill: tokens of the prompt whose prefill is timed.
        context: tokens of each sequence before the timed decode steps.
        steps: most decode steps behind a prompt or a context.
        batches: ascending.
    """

    prefill: int
    context: int
    steps: int
    batches: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """KV blocks of a sequence of a batch."""
        return -(-(self.context + self.steps) // BLOCK_SIZE)

    @property
    def prefill_blocks(self) -> int:
        """KV blocks of the prefilled one."""
        return -(-(self.prefill + self.steps) // BLOCK_SIZE)


class Contender(Protocol):
    """A way to run the model.

    Attributes:
        name: its row.
        batches: those that it can run.
        shared_bytes: of the weights that it did not allocate itself.
    """

    name: str
    batches: tuple[int, ...]
    shared_bytes: int

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Run a prompt; the logits behind it, `[V]`."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Bring a batch of contexts to where its decode steps begin."""

    def decode(self, batch: int, steps: int) -> float:
        """Decode greedily from there, each time anew; seconds a step."""

    def forced(self, ids: Sequence[int], continuation: Sequence[int]) -> Tensor:
        """Logits behind `ids` and behind each forced token after it, `[1 + len, V]` float32."""


def optional_passes() -> list[str]:
    """Names of the passes that `ablation` leaves out, one at a time."""
    return [p.name for p in PIPELINE if not p.mandatory]


class GraphContender:
    """A pair of graphs over its own pools.

    Args:
        capture: put prefill and decode under CUDA Graphs.
        stock_mode: hand both graphs to `torch.compile` in this mode; None: run them as they are.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        sizes: Lengths,
        compiled: CompiledModel,
        *,
        capture: bool = False,
        stock_mode: str | None = None,
    ) -> None:
        self.name, self.sizes, self.compiled = name, sizes, compiled
        self.batches = sizes.batches
        self.device = model.device
        if model.device.type == "cuda":
            use_no_cublas_workspace()  # as an engine
        specs = compiled.prefill.weights | compiled.decode.weights
        own, targets = allocate({n: s for n, s in specs.items() if s.parts}, model.device)
        for target_name, target in targets.items():
            target.copy_(model.weights[target_name])
        shared = {n: model.weights[n] for n, s in specs.items() if not s.parts}
        self.shared_bytes = sum(w.nbytes for w in shared.values())
        largest = max(sizes.batches)
        self.runner = ModelRunner(
            compiled,
            own | shared,
            model.device,
            model.dtype,
            PoolSizes(largest + 1, 1 + max(largest * sizes.blocks, sizes.prefill_blocks)),
            max_num_seqs=largest,
            max_blocks=max(sizes.blocks, sizes.prefill_blocks),
            vocab_limit=model.config.vocab_size,
            implementations=model.implementations,
        )
        self.runner.decoder.buckets = list(sizes.batches)  # of other sizes there is no need
        self.prefiller = self.runner.prefiller
        if stock_mode is not None:
            graphs = self.runner.graphs
            separate_states(list(graphs.values()), compiled.decode.states)
            prefill = stock(graphs["prefill"], stock_mode)
            self.prefiller = PrefillRunner(prefill, model.device, self.runner.newest)
            self.runner.decoder.decode = stock(graphs["decode"], stock_mode)
        if capture:
            fitting = prefill_buckets(PREFILL_TOKENS, largest)
            buckets = [b for b in fitting if b.tokens >= sizes.prefill and b.seqs == 2][:1]
            self.runner.capture(buckets)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Through slot 1."""
        with self.runner.on_device():
            return self.prefiller.run([self._row(ids, 1, self.sizes.prefill_blocks)])[0]

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Sequence i has slot i + 1, where its prefill leaves the first token; as many prompts run
        together as a step holds."""
        rows = [self._row(p, i + 1, self.sizes.blocks) for i, p in enumerate(prompts)]
        together = max(1, PREFILL_TOKENS // max(map(len, prompts)))
        for at in range(0, len(rows), together):
            self.runner.prefill(rows[at : at + together])

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> float:
        """As the engine runs it: the host sends positions and slots, the device knows the rest."""
        slots = list(range(1, batch + 1))
        blocks = [list(self._row((), slot, self.sizes.blocks).blocks) for slot in slots]
        with self.runner.on_device():
            start = working_time(self.device)
            for step in range(steps):
                self.runner.decoder.run([self.sizes.context + step] * batch, slots, blocks)
            return (working_time(self.device) - start) / steps

    @torch.inference_mode()
    def forced(self, ids: Sequence[int], continuation: Sequence[int]) -> Tensor:
        """One sequence, in the smallest batch."""
        found = [self.prefill(ids).float().cpu()]
        blocks = self._row((), 1, self.sizes.prefill_blocks).blocks
        sequence = [*ids, *continuation]
        for at in range(len(ids), len(sequence)):
            row = Row(sequence, at, at + 1, 1, blocks)
            found.append(self.runner.decode([row])[0].float().cpu())
        return torch.stack(found)

    def planned(self, phase: str, batch: int = 1) -> Cost:
        """The planned cost of the timed prefill, or of a decode step."""
        tokens, context = self.sizes.prefill, self.sizes.prefill
        if phase == "decode":
            tokens, context = batch, self.sizes.context
        return planned(self.compiled.graphs[phase], tokens, batch, context)

    def _row(self, ids: Sequence[int], slot: int, blocks: int) -> Row:
        first = 1 + (slot - 1) * blocks
        return Row(ids, 0, len(ids), slot, range(first, first + blocks))


class ReferenceContender:
    """The plain model, one sequence, all of it for every token."""

    def __init__(self, model: Model, sizes: Lengths) -> None:
        self.name = "reference"
        self.batches = tuple(b for b in sizes.batches if b == 1)
        self.device = model.device
        self.shared_bytes = sum(w.nbytes for w in model.weights.values())
        self.plain = model.plain(model.dtype)
        self._context: Sequence[int] = ()

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """The whole prompt."""
        return whole_sequence(self.plain, ids, self.device)[-1]

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is kept but the prompt."""
        (self._context,) = prompts

    def decode(self, batch: int, steps: int) -> float:
        """A forward of a sequence that grows by a token."""
        sequence = list(self._context)
        start = working_time(self.device)
        for _ in range(steps):
            sequence.append(int(whole_sequence(self.plain, sequence, self.device)[-1].argmax()))
        return (working_time(self.device) - start) / steps

    def forced(self, ids: Sequence[int], continuation: Sequence[int]) -> Tensor:
        """All at once: that is what it does for every token."""
        logits = whole_sequence(self.plain, [*ids, *continuation], self.device)
        return logits[len(ids) - 1 :].float().cpu()


def build(name: str, model: Model, sizes: Lengths) -> Contender:
    """The row of this name, of `ROWS`; nothing has run yet."""
    if name == "hf":
        from bench.hugging_face import HuggingFaceContender

        return HuggingFaceContender(model, sizes)
    if name == "reference":
        return ReferenceContender(model, sizes)
    compiled = model.lower("compiled" if name.startswith("compiled") else "eager")
    stock_mode = {"torch_compile": "default", "torch_compile_reduce_overhead": "reduce-overhead"}
    return GraphContender(
        name,
        model,
        sizes,
        compiled,
        capture=name == "compiled" and model.device.type == "cuda",
        stock_mode=stock_mode.get(name),
    )


def ablated(left_out: str, model: Model, sizes: Lengths) -> GraphContender:
    """All passes but one; captured where the full row is."""
    compiled = model.lower("compiled", (left_out,))
    capture = model.device.type == "cuda"
    return GraphContender(f"without {left_out}", model, sizes, compiled, capture=capture)
