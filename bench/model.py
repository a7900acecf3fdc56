"""One model's weights and trace, which all rows of `compile_vs_eager.py` share, and its oracle.

    model = Model.load(config)
    compiled = model.lower("eager")
    model.oracle(ids, continuation)

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minivllm.compiler.compile import CompiledModel
from minivllm.compiler.cost import Cost, Sizes, call_cost
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import PassContext
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.runner import run_passes
from minivllm.compiler.trace import meta_model, trace
from minivllm.config import EngineConfig
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen, constants
from minivllm.model.weights import dummy_weights, load_weights, parameter_shapes
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.resolve import (
    find_model,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
    resolve_state_dtype,
)


@dataclass
class Model:
    """What all rows share.

    Attributes:
        folder: of the checkpoint; None for dummy weights of a shape.
        weights: by the plain model's names, on `device` in `dtype`, its constants among them.
        source: the traced graph.
        trace_seconds: what tracing it took.
    """

    config: MiniQwenConfig
    folder: Path | None
    device: torch.device
    dtype: torch.dtype
    state_dtype: torch.dtype
    weights: dict[str, Tensor]
    source: Graph
    trace_seconds: float
    implementations: dict[str, str]

    @classmethod
    def load(cls, options: EngineConfig) -> Model:
        """Load the weights once, on the device; on a CPU it sets torch's number of threads."""
        device = resolve_device(options.runtime.device)
        folder, config = find_model(options.model)
        dtype = resolve_dtype(options.model.dtype, config, device)
        if device.type == "cpu":
            torch.set_num_threads(resolve_num_threads(options.runtime, config))
        if dtype == torch.float32 and device.type == "cuda":
            torch.set_float32_matmul_precision("highest")
        shapes = parameter_shapes(config)
        if options.model.load_format == "dummy":
            weights = dummy_weights(shapes, dtype, device, options.model.seed)
        else:
            assert folder is not None, "checked by ModelOptions"
            weights = load_weights(folder, shapes, dtype, device)
        weights |= {name: x.to(device) for name, x in constants(config).items()}
        start = time.perf_counter()
        source = trace(config, dtype)
        seconds = time.perf_counter() - start
        return cls(
            config,
            folder,
            device,
            dtype,
            resolve_state_dtype(options.runtime, config),
            weights,
            source,
            seconds,
            dict(options.compiler.implementations),
        )

    def lower(self, mode: str, disable: Sequence[str] = ()) -> CompiledModel:
        """The graphs of a mode, from the one trace."""
        context = PassContext(self.config, self.state_dtype, BLOCK_SIZE, frozenset(disable))
        graphs, reports, seconds = {}, [], {"trace": self.trace_seconds}
        for phase in PHASES:
            start = time.perf_counter()
            graphs[phase] = self.source.clone(phase)
            reports += run_passes(graphs[phase], select_passes(mode, phase, disable), context)
            seconds[phase] = time.perf_counter() - start
        return CompiledModel(self.source, graphs, reports, seconds)

    def plain(self, dtype: torch.dtype) -> MiniQwen:
        """The plain model over these weights, cast if need be."""
        model = meta_model(self.config, dtype)
        names = dict(model.named_parameters())
        model.load_state_dict({n: self.weights[n].to(dtype) for n in names}, assign=True)
        model.rotary_emb.inv_freq = self.weights["rotary_emb.inv_freq"]
        return model

    @torch.inference_mode()
    def oracle(self, ids: Sequence[int], continuation: Sequence[int]) -> Tensor:
        """As `Contender.forced`, of the plain model in float32."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            logits = whole_sequence(self.plain(torch.float32), [*ids, *continuation], self.device)
            return logits[len(ids) - 1 :].cpu()
        finally:
            torch.set_float32_matmul_precision(precision)

    def least_bytes(self, compiled: CompiledModel, batch: int, context: int) -> int:
        """What a decode step must move at least: weights once, states in and out, keys, values."""
        graph = compiled.decode
        weights = sum(
            spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in graph.weights.values()
        )
        if not self.config.tie_word_embeddings:  # then a step reads only rows of it
            weights -= self.weights["embed_tokens.weight"].nbytes
        slots = sum(s.bytes_per_entry for s in graph.states.values() if s.kind == "slot")
        blocks = sum(s.bytes_per_entry for s in graph.states.values() if s.kind == "block")
        return weights + batch * (2 * slots + blocks * context // BLOCK_SIZE)


def planned(graph: Graph, tokens: int, seqs: int, context: int) -> Cost:
    """The planned cost of a step."""
    sizes = Sizes(graph, {"tokens": tokens, "seqs": seqs, "rows": seqs})
    return sum((call_cost(graph, node, sizes, context) for node in graph.nodes()), Cost())


@torch.inference_mode()
def whole_sequence(model: MiniQwen, ids: Sequence[int], device: torch.device) -> Tensor:
    """`[T, V]`: logits behind every token."""
    return model(torch.tensor(ids, device=device), torch.arange(len(ids), device=device))
