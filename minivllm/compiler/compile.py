"""The compiler's front door: a config becomes a prefill graph and a decode graph.

Owns the sequence trace, clone, passes, and when graphs that an earlier start has kept may stand
for it. Does not own weights, devices or pools (bind.py, runtime).

    compiled = compile_model(config, torch.bfloat16, CompilerOptions(mode="compiled"))
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minivllm.compiler.bisect import NumericsBisection, bisect_speed
from minivllm.compiler.dump import Dump
from minivllm.compiler.explain import Explain
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.graph_cache import GraphCache, graph_key
from minivllm.compiler.pass_check import load_passes
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import check_name, select_passes
from minivllm.compiler.runner import Observer, PassReport, run_passes
from minivllm.compiler.trace import trace
from minivllm.compiler.verify import Verifier
from minivllm.config import CompilerOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.ops.paged_attention import BLOCK_SIZE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledModel:
    """The result of a compilation.

    Attributes:
        source: the graph as traced; None where the graphs were kept by an earlier compilation.
        graphs: phase to its graph after the last pass.
        reports: one for each pass and phase, in the order they ran.
        seconds: time by part: "trace" and each phase, or "graphs from cache".
    """

    source: Graph | None
    graphs: dict[str, Graph]
    reports: list[PassReport]
    seconds: dict[str, float]

    @property
    def prefill(self) -> Graph:
        """The graph for packed chunks of prompts."""
        return self.graphs["prefill"]

    @property
    def decode(self) -> Graph:
        """The graph for one token a sequence."""
        return self.graphs["decode"]


def compile_model(
    config: MiniQwenConfig,
    dtype: torch.dtype,
    options: CompilerOptions,
    *,
    state_dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK_SIZE,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = logger.info,
    device: torch.device | None = None,
    passes: Sequence[GraphPass] = (),
    cache_folder: Path | None = None,
) -> CompiledModel:
    """Trace the model once and lower it for both phases.

    Finished graphs are read from `cache_folder` if an earlier compilation of the same has kept
    them, unless something is to be seen of the stages before them: by `observers`, by `dump_dir`,
    `verify`, `explain` or `bisect`. With passes of a user nothing is read or kept: their source is
    not known.

    Args:
        config: the architecture.
        dtype: of weights and activations.
        options: mode, passes to leave out, where to dump, what to verify and to explain.
        state_dtype: of the recurrent states.
        block_size: tokens in a KV block.
        observers: called with each graph and the stage's name, first for the source.
        say: takes the texts of `explain` and `bisect`.
        device: where `bisect=speed` runs; None: CUDA if there is one.
        passes: a user's own, beside those of `options.extra_passes`; each is placed by its
            `before`.
        cache_folder: where finished graphs are kept; None: nowhere.

    Raises:
        UserError: reference mode, which has no graph; an option names an unknown pass, or one that
            does not run; one of `passes` is no pass.
        CompileError: a pass failed, or a stage left the tolerance of `verify`.
    """
    if options.mode == "reference":
        raise UserError(
            "compiler.mode='reference' runs the plain model: there are no graphs and no passes; "
            "choose compiler.mode=eager or compiled"
        )
    extra = [*load_passes(options.extra_passes), *passes]
    selected = {
        phase: select_passes(options.mode, phase, options.disable, options.stop_after, extra)
        for phase in PHASES
    }
    explain = None
    if options.explain is not None:
        check_name("explain", options.explain, extra)
        explain = Explain(options.explain, say)
    start = time.perf_counter()
    seen = (options.dump_dir, options.verify, options.explain, options.bisect)
    cache = key = None
    if cache_folder is not None and not (observers or extra or any(seen)):
        cache = GraphCache(cache_folder)
        key = graph_key(config, dtype, state_dtype, block_size, options, selected)
    if cache is not None and key is not None and (kept := cache.load(key)) is not None:
        seconds = {"graphs from cache": time.perf_counter() - start}
        return CompiledModel(None, kept.graphs, kept.reports, seconds)
    source = trace(config, dtype)
    seconds = {"trace": time.perf_counter() - start}
    watching = list(observers)
    dump: Dump | None = None
    if options.dump_dir is not None:
        dump = Dump(Path(options.dump_dir), config, options.dump_layers)
        watching.append(dump.observe)
    if options.verify:
        watching.append(Verifier(config, source).check_stage)
    numerics = None
    if options.bisect == "numerics":
        numerics = NumericsBisection(Verifier(config, source))
        watching.append(numerics.observe)
    context = PassContext(config, state_dtype, block_size, frozenset(options.disable))
    graphs: dict[str, Graph] = {}
    reports: list[PassReport] = []
    try:
        for phase in PHASES:
            start = time.perf_counter()
            graphs[phase] = source.clone(phase)
            if explain is not None and explain.name not in {p.name for p in selected[phase]}:
                say(f"{explain.name} does not run on the {phase} graph of this pipeline")
            reports += run_passes(graphs[phase], selected[phase], context, watching, explain)
            seconds[phase] = time.perf_counter() - start
    finally:
        if numerics is not None:
            say(numerics.report())
    if dump is not None:
        dump.finish(reports, seconds)
    if options.bisect == "speed":
        say(bisect_speed(source, options, context, device, extra=extra).report())
    if cache is not None and key is not None:
        cache.store(key, graphs, reports)
    return CompiledModel(source, graphs, reports, seconds)
