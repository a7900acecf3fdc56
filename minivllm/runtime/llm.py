"""`LLM`: the offline door to the engine, in vLLM's shape.

Owns keywords and the forms of a call. Does not own the engine behind it.

    from minivllm import LLM, SamplingParams

    llm = LLM(model="tiny")
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=64))
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from minivllm.config import EngineConfig, ModelOptions, PrefixCacheOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.presets import choices, model_preset
from minivllm.runtime.engine import Engine
from minivllm.runtime.generation import Generation
from minivllm.runtime.inputs import Prompt, read_prompts
from minivllm.runtime.outputs import RequestOutput
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.tokenizer import Tokenizer


class LLM:
    """A model and its engine.

    On a CPU it sets torch's number of threads, which `close` sets back. One thread at a time may
    call it; `AsyncLLM` is for several askers.

    Args:
        model: a name under `conf/model` (such as "tiny"), a folder, or a Hugging Face hub id.
        tokenizer: a folder or hub id; None: the model's own.
        skip_tokenizer_init: prompts are token ids, outputs carry no text.
        revision: branch, tag or commit on the hub.
        dtype: "auto" (the checkpoint's on CUDA, float32 on CPU), "float32", "bfloat16", "float16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        load_format: "auto", "safetensors", or "dummy" for seeded random weights.
        seed: of sampling where a request brings none, and of dummy weights.
        max_model_len: longest sequence, prompt and output, in tokens.
        max_num_seqs: most sequences that run at once; fewer if the memory holds fewer.
        max_num_batched_tokens: most tokens of prompts in a step; longer prompts run in chunks.
        gpu_memory_utilization: share of the free GPU memory that is used, in (0, 1].
        kv_cache_memory_bytes: the KV cache's size in bytes; None: what the rest leaves.
        enable_prefix_caching: keep KV blocks and states for prompts that begin alike.
        snapshot_interval, snapshot_memory_bytes, snapshot_host_memory_bytes: as
            `runtime.prefix_cache.snapshot_interval`, `memory_bytes` and `host_memory_bytes`.
        enforce_eager: never capture CUDA graphs.
        async_scheduling: launch a step before the last one's tokens are seen; None: on a GPU.

    Raises:
        UserError: a value out of range, or a model that cannot be loaded.
        TypeError: an unknown keyword.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        load_format: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        snapshot_interval: int = 2048,
        snapshot_memory_bytes: int | None = None,
        snapshot_host_memory_bytes: int = 0,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
    ) -> None:
        if not isinstance(enforce_eager, bool):
            raise UserError(f"enforce_eager={enforce_eager!r}: must be True or False")
        options: dict[str, Any] = {
            "tokenizer": tokenizer,
            "skip_tokenizer_init": skip_tokenizer_init,
            "revision": revision,
            "dtype": dtype,
            "load_format": load_format,
            "seed": seed,
        }
        if model in choices("model"):
            # what is not asked for stays as the preset has it
            defaults = {f.name: f.default for f in dataclasses.fields(ModelOptions)}
            asked = {name: v for name, v in options.items() if v != defaults[name]}
            model_options = dataclasses.replace(model_preset(model), **asked)
        else:
            model_options = ModelOptions(name=model, path=model, **options)
        runtime = RuntimeOptions(
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            prefix_cache=PrefixCacheOptions(
                enabled=enable_prefix_caching,
                snapshot_interval=snapshot_interval,
                memory_bytes=snapshot_memory_bytes,
                host_memory_bytes=snapshot_host_memory_bytes,
            ),
            cuda_graph=not enforce_eager,
            async_scheduling=async_scheduling,
            seed=seed,
        )
        self._open(EngineConfig(model=model_options, runtime=runtime))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The engine that a whole config describes; what the Hydra entry uses.

        Raises:
            UserError: as the constructor.
        """
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        self._engine: Engine | None = Engine(config)
        self._added: dict[str, Generation] = {}  # by add_request, until step has told their end
        self._stepped_for: object = None  # who asked for the latest step

    @property
    def engine(self) -> Engine:
        """The engine: its architecture, graphs and runner.

        Raises:
            UserError: `close` was called.
        """
        if self._engine is None:
            raise UserError("this LLM is closed; make another one")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where there is none."""
        return self.engine.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.engine.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.engine.dtype

    @property
    def implementations(self) -> dict[str, str]:
        """Op name to the implementation that was chosen for it."""
        return self.engine.runner.implementations

    @property
    def metrics(self) -> dict[str, Any]:
        """The engine's counters and times, as plain numbers."""
        return self.engine.metrics.snapshot()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt, as many at once as fit.

        Args:
            prompts: a text, a list of token ids, `{"prompt": …}` or `{"prompt_token_ids": […]}`,
                or a list of these; see `inputs.read_prompts` for what a mapping may hold beside.
            sampling_params: for all prompts, or one for each; None: `SamplingParams()`.
            use_tqdm: show progress on stderr for more than one prompt.

        Returns:
            The finished outputs, in the order of the prompts.

        Raises:
            UserError: a prompt that cannot run, or as many parameters as prompts are not given.
        """
        requests = self._requests(prompts, sampling_params)
        generations = self._add_all(requests)
        quiet = not use_tqdm or len(requests) < 2
        with (
            tqdm(total=len(requests), disable=quiet, desc="prompts") as bar,
            contextlib.closing(self._run(generations)) as steps,
        ):
            for news in steps:
                bar.update(sum(g.finished for g in news))
        return [generation.output() for generation in generations]

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields a request's state whenever it has new tokens.

        The prompts run together, so that their outputs come interleaved. Closing the iterator ends
        what still runs.
        """
        requests = self._requests(prompts, sampling_params)
        return self._stream(requests)

    def _stream(self, requests: list[tuple[Prompt, SamplingParams]]) -> Iterator[RequestOutput]:
        generations = self._add_all(requests)
        with contextlib.closing(self._run(generations)) as steps:
            for news in steps:
                for generation in news:
                    yield generation.output()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> list[RequestOutput]:
        """As `generate`, for a conversation or a list of them, by the model's chat template.

        Args:
            messages: `{"role": …, "content": …}` each; a list of them, or a list of such lists.
            add_generation_prompt: let the prompt end where the model's answer begins.
            enable_thinking: as the template understands it.

        Raises:
            UserError: no tokenizer or chat template, or a message of a wrong form.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError("a chat needs a tokenizer and there is none: name one with tokenizer=")
        prompts = tokenizer.chat_prompts(messages, add_generation_prompt, enable_thinking)
        return self.generate(prompts, sampling_params, use_tqdm)

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt, which `step` brings forward.

        Args:
            prompt: one, in any form that `generate` takes.
            sampling_params: None: `SamplingParams()`.
            request_id: unique among those whose end `step` has not told; None: counts from "0".

        Returns:
            The request's id.

        Raises:
            UserError: a prompt that cannot run, or an id in use.
        """
        if request_id in self._added:
            raise UserError(f"request_id={request_id!r} is in use until `step` has told its end")
        generation = self.queue_request(prompt, sampling_params, request_id)
        self._added[generation.request_id] = generation
        return generation.request_id

    def queue_request(
        self, prompt: Any, sampling_params: SamplingParams | None, request_id: str | None
    ) -> Generation:
        """As `add_request`, for a caller that watches the outputs itself; `step` will not tell."""
        if request_id is not None and not isinstance(request_id, str):
            raise UserError(f"request_id={request_id!r}: must be a text or None")
        requests = self._requests(prompt, sampling_params)
        if len(requests) != 1:
            raise UserError(f"give one prompt, not {len(requests)}")
        return self.engine.add_request(*requests[0], request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step of everything that was added.

        Returns:
            The requests of `add_request` with new tokens, or at their end.
        """
        news = self._step(self._added, asker=self)
        for generation in news:
            if generation.finished:
                del self._added[generation.request_id]
        return [generation.output() for generation in news]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._added)

    def abort(self, request_id: str) -> None:
        """End a request at any stage; the next `step` tells its end ("abort").

        Raises:
            UserError: there is no such request.
        """
        self.engine.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget everything that is kept for later prompts; running requests go on."""
        self.engine.reset_prefix_cache()

    def _add_all(self, requests: list[tuple[Prompt, SamplingParams]]) -> list[Generation]:
        """Add all, or none."""
        generations: list[Generation] = []
        try:
            for prompt, params in requests:
                generations.append(self.engine.add_request(prompt, params))
        except UserError:
            self._abort(generations)
            raise
        return generations

    def _run(self, generations: list[Generation]) -> Generator[list[Generation], None, None]:
        """Step until all are finished, yielding those with news; closing it aborts the others."""
        running = {g.request_id: g for g in generations}
        asker = object()
        try:
            while running:
                news = self._step(running, asker)
                for generation in news:
                    if generation.finished:
                        del running[generation.request_id]
                yield news
        finally:
            self._abort(generations)

    def _step(self, generations: dict[str, Generation], asker: object) -> list[Generation]:
        """Run a step; which of these, by their ids, have news?"""
        touched: Iterable[Generation] = self.engine.step()
        if self._stepped_for is not asker:
            touched = generations.values()  # steps for others may have moved any of them
        self._stepped_for = asker
        return [g for g in touched if generations.get(g.request_id) is g and g.has_news]

    def _abort(self, generations: list[Generation]) -> None:
        for generation in generations:
            if self._engine is not None and not generation.finished:
                self._engine.abort(generation.request_id)

    def _requests(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        engine = self.engine
        read = read_prompts(
            prompts, engine.tokenizer, engine.config.vocab_size, engine.max_model_len
        )
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(read)
        if not isinstance(sampling_params, Sequence) or not all(
            isinstance(p, SamplingParams) for p in sampling_params
        ):
            raise UserError(
                f"sampling_params={sampling_params!r}: give a SamplingParams, or a list of them"
            )
        if len(sampling_params) != len(read):
            raise UserError(
                f"{len(sampling_params)} sampling_params for {len(read)} prompts: "
                "give one for all, or one for each"
            )
        return list(zip(read, sampling_params, strict=True))

    def close(self) -> None:
        """Free the model's memory; the object cannot be used after it."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._added.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
