"""`LLM`: the offline door to the engine, in vLLM's shape.

Owns keywords and the forms of a call. Does not own the engine behind it.

    from minivllm import LLM, SamplingParams

    llm = LLM(model="tiny")
    outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=64))
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from minivllm.config import EngineConfig, ModelOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.presets import choices, model_preset
from minivllm.runtime.engine import Engine
from minivllm.runtime.inputs import read_prompts
from minivllm.runtime.outputs import RequestOutput
from minivllm.runtime.sampling_params import SamplingParams
from minivllm.runtime.tokenizer import Tokenizer


class LLM:
    """A model and its engine.

    On a CPU it sets torch's number of threads, which `close` sets back.

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
        max_num_seqs: most sequences in one step; so far there is never more than one.
        max_num_batched_tokens: most tokens in one step; longer prompts run in chunks.
        block_size: tokens in a KV block.
        gpu_memory_utilization: share of the free GPU memory for the KV cache, in (0, 1].
        kv_cache_memory_bytes: the KV cache's size in bytes; None: from the share.
        enable_prefix_caching: not available yet; True is an error.
        enforce_eager: never capture CUDA graphs. None are captured yet, so both values do the same.

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
        block_size: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = False,
        enforce_eager: bool = False,
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
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
        )
        self._engine: Engine | None = Engine(EngineConfig(model=model_options, runtime=runtime))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The engine that a whole config describes; what the Hydra entry uses.

        Raises:
            UserError: as the constructor.
        """
        llm = cls.__new__(cls)
        llm._engine = Engine(config)
        return llm

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

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        Args:
            prompts: a text, a list of token ids, `{"prompt": …}` or `{"prompt_token_ids": […]}`,
                or a list of these.
            sampling_params: for all prompts, or one for each; None: `SamplingParams()`.
            use_tqdm: show progress on stderr for more than one prompt.

        Returns:
            The finished outputs, in the order of the prompts.

        Raises:
            UserError: a prompt that cannot run, or as many parameters as prompts are not given.
        """
        requests = self._requests(prompts, sampling_params)
        outputs = []
        for prompt, params in tqdm(
            requests, disable=not use_tqdm or len(requests) < 2, desc="prompts"
        ):
            for output in self.engine.run(prompt, params):
                last = output
            outputs.append(last)
        return outputs

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt, one after another, yielding after each token; see `generate`."""
        for prompt, params in self._requests(prompts, sampling_params):
            yield from self.engine.run(prompt, params)

    def _requests(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[Any, SamplingParams]]:
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
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
