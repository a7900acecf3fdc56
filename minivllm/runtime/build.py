"""From a config to a model that is ready to run: compiled, loaded, measured, captured.

Owns the order of loading and the measuring of memory. Does not own requests (`engine`), the
division of memory (`memory`) nor what the options leave open (`resolve`).

    built = build(config)
    built.runner.execute(step)
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from minivllm.compiler.compile import CompiledModel, compile_model
from minivllm.compiler.graph_cache import cache_folder
from minivllm.compiler.pipeline import PIPELINE
from minivllm.compiler.recipe import allocate
from minivllm.compiler.trace import meta_model
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import MiniQwen, constants
from minivllm.model.weights import dummy_weights, load_weights, parameter_shapes, read_ahead
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.decode_runner import bucket_sizes
from minivllm.runtime.kernel_builds import KernelBuilds, StepSizes, kernel_builds
from minivllm.runtime.memory import MemoryNeeds, MemoryPlan, memory_table, plan_memory
from minivllm.runtime.model_runner import ModelRunner, PoolSizes, ReferenceRunner
from minivllm.runtime.pools import entry_bytes, of_kind
from minivllm.runtime.prefill_inputs import Bucket
from minivllm.runtime.prefill_runner import prefill_buckets
from minivllm.runtime.resolve import (
    find_model,
    find_tokenizer,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
    resolve_state_dtype,
    use_no_cublas_workspace,
)
from minivllm.runtime.tokenizer import Tokenizer
from minivllm.runtime.warmup import (
    counted_builds,
    largest_prefill,
    measured_bytes,
    prefills,
    run_largest_decode,
    run_largest_prefill,
    run_largest_sampling,
    warm_up_decode,
    warm_up_prefill,
)

logger = logging.getLogger(__name__)

CONTEXT_PER_TOKEN = 8  # tokens of history that a step's prompts may have for each new one
GRAPH_BYTES = 8 * 2**20  # of one captured bucket beside its share of activations: an allowance


@dataclass(frozen=True)
class Built:
    """A model ready to run.

    Attributes:
        config: the architecture.
        device, dtype: where and in what it runs.
        tokenizer: None where it was skipped, or where dummy weights came without one.
        vocab_limit: ids from here on (a padded head's) have no token.
        compiled: the graphs and their reports; None in reference mode.
        runner: executes steps.
        plan: the division of memory.
        needs: what the plan was made from.
    """

    config: MiniQwenConfig
    device: torch.device
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    vocab_limit: int
    compiled: CompiledModel | None
    runner: ModelRunner | ReferenceRunner
    plan: MemoryPlan
    needs: MemoryNeeds


def build(options: EngineConfig) -> Built:
    """Build everything that `options` describe.

    It sets torch's number of threads on a CPU, and on CUDA cuBLAS's workspace.

    Raises:
        UserError: a model that cannot be loaded, an option that cannot be honoured, or too little
            memory.
    """
    device = resolve_device(options.runtime.device)
    folder, config = find_model(options.model)
    dtype = resolve_dtype(options.model.dtype, config, device)
    tokenizer = find_tokenizer(options.model, folder)
    if folder is not None and options.model.load_format != "dummy":
        read_ahead(folder)  # from disk, while the graphs are compiled
    if device.type == "cpu":
        torch.set_num_threads(resolve_num_threads(options.runtime, config))
    else:
        use_no_cublas_workspace()
    if dtype == torch.float32 and device.type == "cuda":
        # float32 means float32: products must not be rounded to TF32
        torch.set_float32_matmul_precision("highest")
    compiled = _compile(options, config, dtype, device)
    limit = tokenizer.vocab_limit if tokenizer else config.vocab_size
    vocab_limit = min(limit, config.vocab_size)
    builder = _Builder(options, config, device, dtype, compiled, vocab_limit)
    seconds = {} if compiled is None else dict(compiled.seconds)
    with builder.kernel_builds() as builds:
        start = time.perf_counter()
        builder.load_weights(folder)
        seconds["weights"] = time.perf_counter() - start
        if builds is not None:
            start = time.perf_counter()
            builds.wait()
            what = f"{builds.count} kernels built in {builds.seconds:.1f} s, waited"
            seconds[what] = time.perf_counter() - start
    runner, plan, needs = builder.runner(seconds)
    logger.info("start: %s", ", ".join(f"{part} {s:.1f} s" for part, s in seconds.items()))
    for line in (*plan.notes, *runner.warnings):
        logger.warning(line)
    if compiled is not None:
        ops = ", ".join(f"{op}={name}" for op, name in sorted(runner.implementations.items()))
        logger.info("memory:\n%s\n  ops: %s", memory_table(plan, needs, BLOCK_SIZE), ops)
    return Built(config, device, dtype, tokenizer, vocab_limit, compiled, runner, plan, needs)


def _compile(
    options: EngineConfig, config: MiniQwenConfig, dtype: torch.dtype, device: torch.device
) -> CompiledModel | None:
    if options.compiler.mode == "reference":
        return None
    compiled = compile_model(
        config,
        dtype,
        options.compiler,
        state_dtype=resolve_state_dtype(options.runtime, config),
        block_size=BLOCK_SIZE,
        device=device,
        cache_folder=cache_folder(options.compiler.cache_dir),
    )
    ran = {report.name for report in compiled.reports}
    missing = [p.name for p in PIPELINE if p.mandatory and p.name not in ran]
    if missing:
        raise UserError(
            f"compiler.stop_after={options.compiler.stop_after!r} leaves out "
            f"{', '.join(missing)}, without which a graph cannot run; to look at it: "
            "python -m minivllm.inspect with the same arguments"
        )
    return compiled


class _Builder:
    """The parts of a build that share the weights."""

    def __init__(
        self,
        options: EngineConfig,
        config: MiniQwenConfig,
        device: torch.device,
        dtype: torch.dtype,
        compiled: CompiledModel | None,
        vocab_limit: int,
    ) -> None:
        self.vocab_limit = vocab_limit
        self.options = options
        self.config = config
        self.device = device
        self.dtype = dtype
        self.compiled = compiled
        self.weights: dict[str, torch.Tensor] = {}
        self.buffers = {n: c.to(device) for n, c in constants(config).items()}

    def kernel_builds(self) -> AbstractContextManager[KernelBuilds | None]:
        """The builds of all kernels, in threads, of what will run here and in later steps."""
        runtime = self.options.runtime
        model_len = runtime.max_model_len or self.config.max_position_embeddings
        buckets = self._prefill_buckets()
        largest = [runtime.max_num_batched_tokens, largest_bucket(buckets)]
        sizes = StepSizes(
            decode=bucket_sizes(runtime.max_num_seqs),
            buckets=buckets,
            prefills=[*prefills(model_len), *(largest_prefill(n, model_len) for n in largest)],
            max_blocks=-(-model_len // BLOCK_SIZE),
            vocab_limit=self.vocab_limit,
        )
        forced = self.options.compiler.implementations
        return kernel_builds(self.compiled, self.device, self.dtype, sizes, forced)

    def load_weights(self, folder: Path | None) -> None:
        """The weights by the graphs' names, each read into its place; plain in reference mode."""
        shapes = parameter_shapes(self.config)
        storage: dict[str, torch.Tensor] | None = None
        targets: dict[str, torch.Tensor] = {}
        if self.compiled is not None:
            specs = self.compiled.prefill.weights | self.compiled.decode.weights
            held = {n: spec for n, spec in specs.items() if n not in self.buffers}
            storage, targets = allocate(held, self.device)
        if self.options.model.load_format == "dummy":
            seed = self.options.model.seed
            plain = dummy_weights(shapes, self.dtype, self.device, seed, targets)
        else:
            assert folder is not None, "checked by ModelOptions"
            plain = load_weights(folder, shapes, self.dtype, self.device, targets=targets)
        self.weights = plain if storage is None else storage

    def runner(
        self, seconds: dict[str, float]
    ) -> tuple[ModelRunner | ReferenceRunner, MemoryPlan, MemoryNeeds]:
        """The runner over pools that fill the memory; adds the time of its parts to `seconds`."""
        if self.compiled is None:
            needs = MemoryNeeds(self._weight_bytes(), 0, 0, 0, 0)
            return ReferenceRunner(self._plain_model(), self.device), self._plan(needs), needs
        activations = graphs = 0
        if self.device.type == "cuda":
            start = time.perf_counter()
            with counted_builds() as builds:
                largest = self._measure(self.compiled)
            activations = max(largest.values()) + self._gathered_bytes(self.compiled)
            seconds[f"first run, {builds.count} kernels built"] = time.perf_counter() - start
            graphs = self._graph_bytes(largest)
        states = self.compiled.decode.states
        needs = MemoryNeeds(
            weights=self._weight_bytes(),
            activations=activations,
            graphs=graphs,
            block=entry_bytes(of_kind(states, "block")),
            slot=entry_bytes(of_kind(states, "slot")),
        )
        plan = self._plan(needs)
        runner = self._model_runner(
            self.compiled,
            plan.sizes,
            plan.max_num_seqs,
            -(-plan.max_model_len // BLOCK_SIZE),
            checked=self.options.runtime.check_integrity,
        )
        if self.device.type == "cuda":
            start = time.perf_counter()
            with counted_builds() as builds:
                warm_up_prefill(runner)
                captured = runner.capture(self._prefill_buckets()) if self._captures else 0
                warm_up_decode(runner)  # replays, if there are any
                torch.cuda.synchronize(self.device)
            what = f"warm-up, {captured} graphs captured, {builds.count} kernels built"
            seconds[what] = time.perf_counter() - start
        return runner, plan, needs

    @property
    def _captures(self) -> bool:
        """Whether steps are captured; eager mode is there to show what op by op costs."""
        compiled = self.options.compiler.mode == "compiled"
        return self.options.runtime.cuda_graph and compiled and self.device.type == "cuda"

    def _plan(self, needs: MemoryNeeds) -> MemoryPlan:
        runtime = self.options.runtime
        return plan_memory(
            runtime,
            needs,
            free_bytes=_free_bytes(self.device),
            model_len=self.config.max_position_embeddings,
            block_size=BLOCK_SIZE,
        )

    def _weight_bytes(self) -> int:
        return sum(w.numel() * w.element_size() for w in self.weights.values())

    def _plain_model(self) -> MiniQwen:
        model = meta_model(self.config, self.dtype)
        model.load_state_dict(self.weights, assign=True)
        model.rotary_emb.inv_freq = self.buffers["rotary_emb.inv_freq"]
        return model

    def _model_runner(
        self,
        compiled: CompiledModel,
        sizes: PoolSizes,
        max_num_seqs: int,
        max_blocks: int,
        checked: bool,
    ) -> ModelRunner:
        forced = self.options.compiler.implementations
        runner = ModelRunner(
            compiled,
            self.weights | self.buffers,
            self.device,
            self.dtype,
            sizes,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            vocab_limit=self.vocab_limit,
            implementations=forced,
            checked=checked,
        )
        used = runner.implementations
        unused = [op for op in forced if op not in used]
        if unused:
            raise UserError(
                f"compiler.implementations.{unused[0]}: no graph of this mode has that op; "
                f"choose from {', '.join(sorted(used))}"
            )
        return runner

    def _gathered_bytes(self, compiled: CompiledModel) -> int:
        """Keys and values of a prefill's sequences, which one layer after another copies."""
        blocks = of_kind(compiled.decode.states, "block")
        largest = max((spec.bytes_per_entry for spec in blocks.values()), default=0)
        runtime = self.options.runtime
        model_len = runtime.max_model_len or self.config.max_position_embeddings
        tokens = max_context_tokens(runtime, model_len)
        return 2 * largest * -(-tokens // BLOCK_SIZE)

    def _prefill_buckets(self) -> list[Bucket]:
        runtime = self.options.runtime
        return prefill_buckets(runtime.max_num_batched_tokens, runtime.max_num_seqs)

    def _graph_bytes(self, largest: dict[str, int]) -> int:
        """An estimate: a phase's graphs share what its largest one takes, save their outputs."""
        if not self._captures:
            return 0
        decode = bucket_sizes(self.options.runtime.max_num_seqs)
        prefill = [bucket.rows for bucket in self._prefill_buckets()]
        outputs = (sum(decode) + sum(prefill)) * self.config.vocab_size * self.dtype.itemsize
        graphs = (len(decode) + len(prefill)) * GRAPH_BYTES
        return largest["decode"] + largest["captured prefill"] + outputs + graphs

    def _measure(self, compiled: CompiledModel) -> dict[str, int]:
        """Bytes that the largest step of each kind takes.

        Run over pools that are just large enough; their content means nothing.
        """
        runtime = self.options.runtime
        model_len = runtime.max_model_len or self.config.max_position_embeddings
        tokens = runtime.max_num_batched_tokens
        blocks = -(-min(tokens, model_len) // BLOCK_SIZE)
        probe = self._model_runner(
            compiled,
            PoolSizes(num_slots=2, num_blocks=blocks + 1),
            runtime.max_num_seqs,
            blocks,
            checked=False,  # its rows share a slot
        )
        captured = largest_bucket(self._prefill_buckets())
        runs: dict[str, Callable[[], object]] = {
            "prefill": lambda: run_largest_prefill(probe, tokens, model_len),
            "captured prefill": lambda: run_largest_prefill(probe, captured, model_len),
            "decode": lambda: run_largest_decode(probe),
            "sampling": lambda: run_largest_sampling(run_largest_decode(probe)),
        }
        return {name: measured_bytes(run, self.device) for name, run in runs.items()}


def largest_bucket(buckets: Sequence[Bucket]) -> int:
    """Tokens of the largest captured prefill; 1 if there is none."""
    return max((bucket.tokens for bucket in buckets), default=1)


def max_context_tokens(options: RuntimeOptions, max_model_len: int) -> int:
    """Most tokens, history included, of the sequences that share a prefill: their keys and values
    are copied side by side."""
    return max(max_model_len, CONTEXT_PER_TOKEN * options.max_num_batched_tokens)


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, what torch holds unused given back first; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
