"""Engines over one small random checkpoint, for tests that compare ways of running requests.

    build = Builder(folder)
    llm = build(blocks=12, max_num_seqs=4)          # pools counted in entries, not in bytes
    expected = build.alone(ids, params)             # cold, at once, with nothing beside it

The checkpoint is in bfloat16, so that a float32 engine is the reference of a bfloat16 one.
Compiling is most of an engine's start, so engines of one kind share their graphs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from oracle import random_model, save
from torch import Tensor

import minivllm.runtime.build as build_module
from minivllm import LLM, SamplingParams
from minivllm.config import (
    CompilerOptions,
    EngineConfig,
    ModelOptions,
    PrefixCacheOptions,
    RuntimeOptions,
)
from minivllm.runtime.model_runner import ModelRunner, StepLogits
from minivllm.runtime.outputs import RequestOutput
from minivllm.runtime.prefill_inputs import Row
from minivllm.runtime.step import Step

VOCAB = 97
MODEL_LEN = 2048
GPU_NAMES = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        len(GPU_NAMES) < 2 or GPU_NAMES[0] != GPU_NAMES[1], reason="needs two CUDA GPUs of one kind"
    ),
]
KINDS = [  # device, dtype
    pytest.param(("cpu", "float32"), id="cpu-float32"),
    pytest.param(("cuda", "float32"), id="cuda-float32", marks=GPU),
    pytest.param(("cuda", "bfloat16"), id="cuda-bfloat16", marks=GPU),
]


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Save a random model of `oracle.SMALL`'s shape in bfloat16."""
    changes = {"max_position_embeddings": MODEL_LEN} | changes
    return save(random_model(torch.bfloat16, **changes), folder)


@dataclass
class Builder:
    """Builds engines over one checkpoint, on one device, in one dtype.

    Attributes:
        folder: the checkpoint, or `asset://NAME`.
        device, dtype: of every engine.
        tolerance: of float32 logits in `assert_result`, relative to the largest one.
        block_bytes, slot_bytes: of an entry of the pools.
        reference: where requests run alone.
    """

    folder: Path | str
    device: str = "cpu"
    dtype: str = "float32"
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        self._graphs: dict[Any, Any] = {}
        self._alone: dict[Any, list[Completed]] = {}
        self.block_bytes = self.slot_bytes = 2**16
        self.reference = self(blocks=MODEL_LEN // 64 + 2, max_num_seqs=8, snapshots=0)
        runner = self.reference.engine.runner
        assert isinstance(runner, ModelRunner)
        self.block_bytes = runner.blocks.storage.shape[1]
        self.slot_bytes = runner.slots.storage.shape[1]

    @functools.cached_property
    def float32(self) -> Builder:
        """Engines that compute in float32 with the same weights."""
        return self if self.dtype == "float32" else Builder(self.folder, self.device, "float32")

    def __call__(
        self,
        *,
        blocks: int = 64,
        snapshots: int = 32,
        host: int = 0,
        mode: str = "compiled",
        interval: int = 2048,
        record: bool = True,
        **runtime: Any,
    ) -> LLM:
        """An engine; `blocks`, `snapshots` and `host` are entries that requests can have.

        With `record` it keeps the logits that it samples from, for `assert_result`.
        """
        sizes: dict[str, Any] = {}  # of what the reference mode does not have
        if mode != "reference":
            sizes["kv_cache_memory_bytes"] = (blocks + 1) * self.block_bytes
            sizes["prefix_cache"] = PrefixCacheOptions(
                enabled=snapshots > 0,
                snapshot_interval=interval,
                memory_bytes=snapshots * self.slot_bytes,
                host_memory_bytes=host * self.slot_bytes,
            )
        config = EngineConfig(
            model=ModelOptions(path=str(self.folder), dtype=self.dtype, skip_tokenizer_init=True),
            compiler=CompilerOptions(mode=mode),
            runtime=RuntimeOptions(
                device=self.device,
                check_integrity=True,
                num_threads=1,
                **{"max_num_seqs": 8} | sizes | runtime,
            ),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_module, "compile_model", self._compile)
            llm = LLM.from_config(config)
        if record:
            llm.engine.runner.execute = Recorder(llm.engine.runner.execute)  # type: ignore[method-assign]
        return llm

    def _compile(self, config: Any, dtype: Any, options: CompilerOptions, **rest: Any) -> Any:
        key = (dtype, options.mode, *rest.values())
        if key not in self._graphs:
            self._graphs[key] = self._original(config, dtype, options, **rest)
        return self._graphs[key]

    _original = staticmethod(build_module.compile_model)

    def alone(self, ids: Sequence[int], params: SamplingParams) -> list[Completed]:
        """Each completion as it is when nothing else runs and nothing is kept.

        A prompt runs at once; the completions of `n` > 1 are as many requests, seeds apart by 1.
        """
        key = (tuple(ids), params)
        if key not in self._alone:
            self._alone[key] = []
            for single in singles(params):
                (output,) = self.reference.generate(list(ids), single, use_tqdm=False)
                (rows,) = logits_behind(self.reference, output)
                ((tokens, reason),) = result(output)
                self._alone[key].append(Completed(tokens, reason, rows))
        return self._alone[key]

    def ends(
        self, ids: Sequence[int], params: SamplingParams
    ) -> list[tuple[list[int], str | None]]:
        """As `alone`, in the form of `result`."""
        return [(completed.tokens, completed.reason) for completed in self.alone(ids, params)]


class Completed(NamedTuple):
    """A completion's end.

    Attributes:
        tokens, reason: its token ids and its finish reason.
        logits: `[tokens, V]`, float32 on the CPU: what each was sampled from.
    """

    tokens: list[int]
    reason: str | None
    logits: Tensor


class Recorder:
    """A runner's `execute` that keeps the logits which are sampled from.

    Attributes:
        rows: `Request.request_id` to its rows, in order.
    """

    def __init__(self, execute: Callable[[Step], StepLogits]) -> None:
        self.execute = execute
        self.rows: dict[str, list[Tensor]] = defaultdict(list)

    def __call__(self, step: Step) -> StepLogits:
        logits = self.execute(step)
        sampled = logits.sampled.float().cpu()
        for request, row in zip(step.sampled, sampled, strict=True):
            self.rows[request.request_id].append(row.clone())
        return logits


def logits_behind(llm: LLM, output: RequestOutput) -> list[Tensor]:
    """What each completion of a request was sampled from; the engine forgets it."""
    recorder = llm.engine.runner.execute
    assert isinstance(recorder, Recorder)
    found = [recorder.rows.pop(f"{output.request_id}.{c.index}", []) for c in output.outputs]
    return [torch.stack(rows) if rows else torch.empty(0) for rows in found]


def singles(params: SamplingParams) -> Iterator[SamplingParams]:
    """The requests of one completion each that a request of `n` is worth."""
    assert params.n == 1 or params.seed is not None
    for i in range(params.n):
        seed = None if params.seed is None else params.seed + i
        yield replace(params, n=1, seed=seed)


def result(output: RequestOutput) -> list[tuple[list[int], str | None]]:
    """Tokens and finish reason of each completion."""
    return [(c.token_ids, c.finish_reason) for c in output.outputs]


def step(llm: LLM) -> list[RequestOutput]:
    """One step, and every book checked behind it."""
    outputs = llm.step()
    llm.engine.scheduler.check_integrity()
    return outputs


def drain(llm: LLM, limit: int = 5000) -> dict[str, RequestOutput]:
    """Step to the end; the finished outputs by request id."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not llm.has_unfinished_requests:
            return finished
        for output in step(llm):
            if output.finished:
                assert output.request_id not in finished, "told twice"
                finished[output.request_id] = output
    raise AssertionError(f"requests still run after {limit} steps")


def assert_result(
    build: Builder,
    llm: LLM,
    ids: Sequence[int],
    params: SamplingParams,
    output: RequestOutput,
) -> None:
    """A finished request is what it is alone; an aborted one, as far as it came.

    In float32 to the token, and its logits within the tolerance. In bfloat16 greedy tokens may
    part at a near-tie; what is drawn may then be anything, and is not looked at.
    """
    expected = build.alone(ids, params)
    assert len(output.outputs) == params.n
    recorded = isinstance(llm.engine.runner.execute, Recorder)
    rows = logits_behind(llm, output) if recorded else [None] * params.n
    for completion, alone, logits in zip(output.outputs, expected, rows, strict=True):
        tokens, reason = alone.tokens, alone.reason
        got = completion.token_ids
        if completion.finish_reason == "abort":
            tokens, reason = tokens[: len(got)], "abort"
        if build.dtype == "float32":
            assert (got, completion.finish_reason) == (tokens, reason)
            if logits is not None and got:
                off = (logits[: len(got)] - alone.logits[: len(got)]).abs().max()
                largest = alone.logits.abs().max()
                assert off <= build.tolerance * largest, f"{len(ids)} tokens: {off / largest:.1e}"
        elif params.temperature == 0.0 and params.ignore_eos:
            assert completion.finish_reason == reason
            assert near_tie(build, ids, got, tokens) <= 2


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits, or is owned."""
    numbers, scheduler = llm.metrics, llm.engine.scheduler
    scheduler.check_integrity()
    held = {k: numbers[k] for k in ("waiting", "running", "kv_blocks_used", "slots_used")}
    assert not any(held.values()), held
    assert scheduler.blocks.num_free == numbers["kv_blocks"]


def set_budget(llm: LLM, tokens: int) -> None:
    """Change `max_num_batched_tokens` of an engine that is idle."""
    scheduler = llm.engine.scheduler
    scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=tokens)


@torch.inference_mode()
def logits_of(llm: LLM, ids: Sequence[int], prompt: int) -> Tensor:
    """`[T, V]` float32 on the CPU, as this engine computes them: the prompt at once, then decode.

    It borrows a slot and blocks of an idle engine.
    """
    engine = llm.engine
    runner, scheduler = engine.runner, engine.scheduler
    assert isinstance(runner, ModelRunner)
    slot = scheduler.slots.allocate()
    blocks = scheduler.blocks.allocate(-(-len(ids) // 64))
    logits = [runner.prefill([Row(ids, 0, prompt, slot, blocks, copies=0, all_logits=True)])]
    for at in range(prompt, len(ids)):
        logits.append(runner.decode([Row(ids, at, at + 1, slot, blocks)]).clone())
    scheduler.blocks.free(blocks)
    scheduler.slots.free(slot)
    return torch.cat(logits).float().cpu()


def near_tie(
    build: Builder, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int]
) -> float:
    """How wide a tie two greedy outputs parted over, in units of the largest error; 0: equal.

    Two logits, each off by at most the largest error, can change places over a gap of twice that:
    so a result of at most 2 shows nothing but rounding.
    """
    assert len(got) == len(expected)
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
    if at is None:
        return 0.0
    ids = [*prompt, *expected[:at]]
    exact = logits_of(build.float32.reference, ids, len(prompt))
    error = (logits_of(build.reference, ids, len(prompt)) - exact).abs().max()
    gap = (exact[-1, got[at]] - exact[-1, expected[at]]).abs()
    return float(gap / error)
