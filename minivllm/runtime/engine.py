"""The engine: from a config to a loaded, compiled model, and requests run one after another.

Owns loading order, the resolution of every `auto`, and a request's life. Does not own prompts'
forms (`inputs`), the graphs' inputs (`model_runner`) or sampling (`sampler`).

    engine = Engine(config)
    for output in engine.run(prompt, params): ...
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.pipeline import PIPELINE
from minivllm.compiler.recipe import allocate
from minivllm.compiler.trace import meta_model
from minivllm.config import EngineConfig, ModelOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import (
    dummy_weights,
    load_config,
    load_weights,
    parameter_shapes,
    read_ahead,
    resolve_model,
)
from minivllm.ops.paged_attention import FLASH_ATTENTION_PAGE
from minivllm.runtime.detokenizer import IncrementalDetokenizer
from minivllm.runtime.inputs import Prompt
from minivllm.runtime.memory import plan_memory
from minivllm.runtime.model_runner import ModelRunner, ReferenceRunner, Row
from minivllm.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.runtime.sampler import sample
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.stop import StopChecker
from minivllm.runtime.tokenizer import Tokenizer, load_tokenizer
from minivllm.runtime.warmup import warm_up

logger = logging.getLogger(__name__)

TORCH_THREADS = torch.get_num_threads()  # before any engine sets another number
SMALL_MODEL = 2**26  # weights, below which an op is too short to be shared among threads
SLOT = 1  # of the one sequence that runs; slot 0 and block 0 belong to padding rows


class Engine:
    """A model ready to run.

    Attributes:
        config: the architecture.
        device, dtype: where and in what the model runs.
        tokenizer: None where it was skipped, or where dummy weights came without one.
        max_model_len: longest sequence in tokens.
        compiled: the graphs and their reports; None in reference mode.
        runner: executes a step.
    """

    def __init__(self, options: EngineConfig) -> None:
        self.options = options
        self.device = resolve_device(options.runtime.device)
        folder, self.config = find_model(options.model)
        self.dtype = resolve_dtype(options.model.dtype, self.config, self.device)
        self.tokenizer = _tokenizer(options.model, folder)
        self.block_size = options.runtime.block_size or FLASH_ATTENTION_PAGE
        if folder is not None and options.model.load_format != "dummy":
            read_ahead(folder)  # from disk, while the graphs are compiled
        self._threads_before = torch.get_num_threads()
        if self.device.type == "cpu":
            torch.set_num_threads(resolve_num_threads(options.runtime, self.config))
        self.compiled: CompiledModel | None = None
        self.runner: ModelRunner | ReferenceRunner
        if self.dtype == torch.float32 and self.device.type == "cuda":
            # float32 means float32: products must not be rounded to TF32
            torch.set_float32_matmul_precision("highest")
        if options.compiler.mode != "reference":
            self.compiled = compile_model(
                self.config,
                self.dtype,
                options.compiler,
                state_dtype=resolve_state_dtype(options.runtime, self.config),
                block_size=self.block_size,
            )
            ran = {report.name for report in self.compiled.reports}
            missing = [p.name for p in PIPELINE if p.mandatory and p.name not in ran]
            if missing:
                raise UserError(
                    f"compiler.stop_after={options.compiler.stop_after!r} leaves out "
                    f"{', '.join(missing)}, without which a graph cannot run; to look at it: "
                    "python -m minivllm.inspect with the same arguments"
                )
        start = time.perf_counter()
        self.weights = self._load_weights(folder)
        seconds = {"weights": time.perf_counter() - start}
        self._build_runner()
        if self.compiled is not None:
            seconds = self.compiled.seconds | seconds
        if isinstance(self.runner, ModelRunner) and self.device.type == "cuda":
            builds = warm_up(self.runner, SLOT, self._blocks(self.max_model_len))
            seconds[f"first run, {builds.count} kernels built"] = builds.seconds
        logger.info("start: %s", ", ".join(f"{part} {s:.1f} s" for part, s in seconds.items()))
        for line in self.runner.warnings:
            logger.warning(line)
        known = self.config.eos_token_ids
        self.eos_token_ids = known or (self.tokenizer.eos_token_ids if self.tokenizer else ())
        limit = self.tokenizer.vocab_limit if self.tokenizer else self.config.vocab_size
        self.vocab_limit = min(limit, self.config.vocab_size)
        self._request_ids = itertools.count()
        self._running = False

    def close(self) -> None:
        """Give back what the engine changed in the process: torch's number of threads."""
        torch.set_num_threads(self._threads_before)

    def _load_weights(self, folder: Path | None) -> dict[str, torch.Tensor]:
        """The weights by the graphs' names, each read into its place; plain in reference mode."""
        shapes = parameter_shapes(self.config)
        storage: dict[str, torch.Tensor] | None = None
        targets: dict[str, torch.Tensor] = {}
        if self.compiled is not None:
            specs = self.compiled.prefill.weights | self.compiled.decode.weights
            held = {n: spec for n, spec in specs.items() if n not in constants(self.config)}
            storage, targets = allocate(held, self.device)
        if self.options.model.load_format == "dummy":
            seed = self.options.model.seed
            plain = dummy_weights(shapes, self.dtype, self.device, seed, targets)
        else:
            assert folder is not None, "checked by ModelOptions"
            plain = load_weights(folder, shapes, self.dtype, self.device, targets=targets)
        return plain if storage is None else storage

    def _build_runner(self) -> None:
        buffers = {n: c.to(self.device) for n, c in constants(self.config).items()}
        states = self.compiled.decode.states.values() if self.compiled else ()
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None
        plan = plan_memory(
            self.options.runtime,
            sum(s.bytes_per_entry for s in states if s.kind == "block"),
            self.block_size,
            self.config.max_position_embeddings,
            free,
        )
        self.max_model_len = plan.max_model_len
        if plan.note:
            logger.warning(plan.note)
        if self.compiled is None:
            model = meta_model(self.config, self.dtype)
            model.load_state_dict(self.weights, assign=True)
            model.rotary_emb.inv_freq = buffers["rotary_emb.inv_freq"]
            self.runner = ReferenceRunner(model, self.device)
            return
        self.runner = ModelRunner(
            self.compiled,
            self.weights | buffers,
            self.device,
            self.dtype,
            num_slots=SLOT + 1,
            num_blocks=plan.num_blocks,
            block_size=self.block_size,
            implementations=self.options.compiler.implementations,
        )
        used = self.runner.implementations
        unused = [op for op in self.options.compiler.implementations if op not in used]
        if unused:
            raise UserError(
                f"compiler.implementations.{unused[0]}: no graph of this mode has that op; "
                f"choose from {', '.join(sorted(used))}"
            )
        paged = "flash_attn" in used.values()
        if paged and self.block_size % FLASH_ATTENTION_PAGE:
            raise UserError(
                f"runtime.block_size={self.block_size}: flash-attn's paged attention takes "
                f"multiples of {FLASH_ATTENTION_PAGE}; or force its substitute with "
                "compiler.implementations.paged_attention_prefill=torch and "
                "compiler.implementations.paged_attention_decode=torch"
            )

    def run(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """Run one request to its end; yields its state after every token.

        Raises:
            UserError: another request has begun and is not at its end; the two would share a slot.
        """
        if self._running:
            raise UserError(
                "another request of this engine is running: finish its stream, or close it, first"
            )
        self._running = True
        try:
            yield from self._run(prompt, params)
        finally:
            self._running = False

    def _run(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        start = time.perf_counter()
        number = next(self._request_ids)
        seed = params.seed
        if seed is None:
            seed = (self.options.runtime.seed * 0x9E3779B97F4A7C15 + number) % 2**64
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer, prompt.token_ids, params.skip_special_tokens
            )
        room = self.max_model_len - len(prompt.token_ids)
        stop = StopChecker(params, self.eos_token_ids, detokenizer, room)
        ids = list(prompt.token_ids)
        text = ""
        first: float | None = None
        logits = self._prefill(ids)
        while True:
            token = int(sample(logits, [params], [seed], [len(ids)], self.vocab_limit))
            now = time.perf_counter()
            first = now if first is None else first
            ids.append(token)
            step = stop.update(token)
            text += step.text
            completion = CompletionOutput(
                index=0,
                text=text,
                token_ids=ids[len(prompt.token_ids) :],
                delta=step.text,
                finish_reason=step.finish_reason,
                stop_reason=step.stop_reason,
            )
            yield RequestOutput(
                request_id=str(number),
                prompt=prompt.text,
                prompt_token_ids=prompt.token_ids,
                outputs=[completion],
                finished=step.finish_reason is not None,
                metrics=RequestMetrics(first - start, now - first),
            )
            if step.finish_reason is not None:
                return
            logits = self.runner.decode([self._row(ids, len(ids) - 1)])

    def _prefill(self, ids: list[int]) -> torch.Tensor:
        """The logits behind a prompt, run in chunks of at most `max_num_batched_tokens`."""
        budget = self.options.runtime.max_num_batched_tokens
        for start in range(0, len(ids), budget):
            logits = self.runner.prefill([self._row(ids[: start + budget], start)])
        return logits

    def _row(self, ids: list[int], num_computed_tokens: int) -> Row:
        return Row(ids, num_computed_tokens, SLOT, self._blocks(len(ids)))

    def _blocks(self, tokens: int) -> range:
        """The KV blocks of a sequence of this many tokens."""
        return range(1, -(-tokens // self.block_size) + 1)


def resolve_device(name: str) -> torch.device:
    """`auto`: CUDA if there is one, else CPU; a CUDA device that is not there is a UserError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(
                f"runtime.device={name!r}: this machine has {count} CUDA devices; choose auto, "
                + ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
            )
    return device


def resolve_dtype(name: str, config: MiniQwenConfig, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's dtype on CUDA (bfloat16 if it says none), float32 on CPU."""
    if name == "auto":
        name = (config.dtype or "bfloat16") if device.type == "cuda" else "float32"
    return getattr(torch, name)


def resolve_state_dtype(options: RuntimeOptions, config: MiniQwenConfig) -> torch.dtype:
    """`auto`: what the checkpoint asks for (`mamba_ssm_dtype`), else float32."""
    name = options.state_dtype
    return getattr(torch, (config.mamba_ssm_dtype or "float32") if name == "auto" else name)


def resolve_num_threads(options: RuntimeOptions, config: MiniQwenConfig) -> int:
    """`None`: one thread for a small model, whose threads would wait longer than they work."""
    if options.num_threads is not None:
        return options.num_threads
    weights = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    return 1 if weights < SMALL_MODEL else TORCH_THREADS


def find_model(options: ModelOptions) -> tuple[Path | None, MiniQwenConfig]:
    """The checkpoint's folder, if the options name one that counts, and the architecture.

    Raises:
        UserError: there is no such folder or hub id, or its config is of another architecture.
    """
    folder = _folder(options)
    return folder, _architecture(options, folder)


def _folder(options: ModelOptions) -> Path | None:
    """The checkpoint's folder; None for dummy weights whose shape the options tell."""
    if options.path is None:
        return None
    dummy = options.load_format == "dummy"
    local = options.path.startswith(("/", ".", "~")) or Path(options.path).is_dir()
    if dummy and options.architecture and not local:
        return None  # a preset's hub id: its shape stands in the options
    return resolve_model(options.path, options.revision, weights=not dummy)


def _architecture(options: ModelOptions, folder: Path | None) -> MiniQwenConfig:
    if folder is not None:
        config = load_config(folder)
        if options.architecture is not None:
            asked = MiniQwenConfig.from_hf(options.architecture)
            differing = [
                f.name
                for f in dataclasses.fields(config)
                if getattr(config, f.name) != getattr(asked, f.name)
            ]
            if differing:
                logger.warning(
                    "model.architecture is not used: the checkpoint's config.json tells the shape, "
                    "and differs in %s",
                    ", ".join(differing),
                )
        return config
    assert options.architecture is not None, "checked by ModelOptions"
    return MiniQwenConfig.from_hf(options.architecture)


def _tokenizer(options: ModelOptions, folder: Path | None) -> Tokenizer | None:
    if options.skip_tokenizer_init:
        return None
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    if folder is None or (
        options.load_format == "dummy" and not (folder / "tokenizer.json").is_file()
    ):
        return None
    return load_tokenizer(folder, options.revision)
