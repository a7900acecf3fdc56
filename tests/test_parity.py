"""minivllm against transformers' `Qwen3_5ForCausalLM`, on the CPU in float32.

Logits may differ by 1e-4 of the largest logit: the two compute the same sums in another order,
over up to 24 layers. Tokens must be the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import all_logits, greedy, random_ids, random_model, save, with_tiny_keys
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.config import CompilerOptions, EngineConfig, ModelOptions, RuntimeOptions
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.prefill_inputs import Row

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "odd_sizes": {
        "vocab_size": 101,
        "hidden_size": 36,
        "intermediate_size": 52,
        "head_dim": 24,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 12,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 700.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "equal_heads": {"linear_num_key_heads": 4, "num_key_value_heads": 4},
    "one_key_head": {"linear_num_key_heads": 1, "num_key_value_heads": 1},
    "attention_bias": {"attention_bias": True},
    "other_layers": {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
    },
    "theta_absent": {"rope_parameters": None},
    "24_layers": {"num_hidden_layers": 24},
}


def engine(folder: Path, mode: str = "compiled", **runtime: Any) -> LLM:
    return LLM.from_config(
        EngineConfig(
            model=ModelOptions(path=str(folder), dtype="float32", skip_tokenizer_init=True),
            compiler=CompilerOptions(mode=mode),
            runtime=RuntimeOptions(device="cpu", **runtime),
        )
    )


def prefill_logits(llm: LLM, ids: list[int]) -> Tensor:
    """Logits at every position, from one run of the prefill graph."""
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    blocks = range(1, len(ids) // BLOCK_SIZE + 2)
    return runner.prefill([Row(ids, 0, len(ids), 1, blocks, copies=0, all_logits=True)])


def decode_logits(llm: LLM, ids: list[int], prompt: int) -> Tensor:
    """Logits behind each token from `prompt` on: a prefill, then one decode step a token."""
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    blocks = range(1, len(ids) // BLOCK_SIZE + 2)
    logits = [runner.prefill([Row(ids, 0, prompt, 1, blocks)])]
    for end in range(prompt + 1, len(ids) + 1):
        logits.append(runner.decode([Row(ids, end - 1, end, 1, blocks)]).clone())
    return torch.cat(logits)


def check_parity(oracle: Qwen3_5ForCausalLM, llm: LLM) -> None:
    """Logits of a prompt, of 64 decode steps, and the greedy tokens."""
    prompt = random_ids(75, 97)
    expected = greedy(oracle, prompt, 64)
    logits = all_logits(oracle, prompt + expected)
    assert_close(prefill_logits(llm, prompt), logits[:75])
    assert_close(decode_logits(llm, prompt + expected, 75), logits[74:])
    params = dataclasses.replace(GREEDY, max_tokens=64)
    (output,) = llm.generate(prompt, params)
    assert output.outputs[0].token_ids == expected


def assert_close(logits: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max()
    assert scale > 0.5, "logits near zero would prove nothing"
    torch.testing.assert_close(logits, expected, rtol=0, atol=float(1e-4 * scale))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3_5ForCausalLM, LLM]:
    """An oracle of the plain small shape and the engine over its checkpoint."""
    oracle = random_model()
    return oracle, engine(save(oracle, tmp_path_factory.mktemp("small")))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    oracle = random_model(**CONFIGS[name])
    folder = save(oracle, tmp_path)
    for mode in ("eager", "compiled"):
        check_parity(oracle, engine(folder, mode))


def test_epsilons(tmp_path: Path) -> None:
    """Inputs so small, or epsilons so large, that their place in the formula decides."""
    oracle = with_tiny_keys(random_model(rms_norm_eps=0.1))
    check_parity(oracle, engine(save(oracle, tmp_path)))


def test_reference_mode_is_the_plain_model(tmp_path: Path) -> None:
    oracle = random_model()
    llm = engine(save(oracle, tmp_path), mode="reference")
    prompt = random_ids(20, 97)
    (output,) = llm.generate(prompt, GREEDY)
    assert output.outputs[0].token_ids == greedy(oracle, prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("budget", [1, 7, 64, 100])
def test_a_prompt_in_chunks_is_the_prompt_at_once(
    budget: int, small: tuple[Qwen3_5ForCausalLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, llm = small
    scheduler = llm.engine.scheduler
    limits = dataclasses.replace(scheduler.limits, max_num_batched_tokens=budget)
    monkeypatch.setattr(scheduler, "limits", limits)
    prompt = random_ids(130, 97)
    before = llm.metrics["prompt_tokens"], llm.metrics["steps"]
    (output,) = llm.generate({"prompt_token_ids": prompt, "prefix_cache": False}, GREEDY)
    assert output.outputs[0].token_ids == greedy(oracle, prompt, GREEDY.max_tokens)
    assert llm.metrics["prompt_tokens"] - before[0] == 130
    chunks = {1: 130, 7: 20, 64: 3, 100: 2}  # cut back to whole blocks where that leaves any
    assert llm.metrics["steps"] - before[1] == chunks[budget] + GREEDY.max_tokens - 1


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129])
def test_short_prompts_and_block_edges(length: int, small: tuple[Qwen3_5ForCausalLM, LLM]) -> None:
    oracle, llm = small
    prompt = random_ids(length, 97)
    expected = greedy(oracle, prompt, 6)
    assert_close(
        decode_logits(llm, prompt + expected, length),
        all_logits(oracle, prompt + expected)[length - 1 :],
    )


def test_a_request_leaves_nothing_behind(tmp_path: Path) -> None:
    """Requests share one slot and the same blocks; the second must not see the first."""
    oracle = random_model()
    llm = engine(save(oracle, tmp_path), max_num_seqs=1, kv_cache_memory_bytes=2**17)
    prompts = [random_ids(90, 97, seed=1), random_ids(1, 97, seed=2), random_ids(33, 97, seed=3)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = [greedy(oracle, p, GREEDY.max_tokens) for p in prompts]
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_packed_sequences_keep_to_their_own_state(tmp_path: Path) -> None:
    """Sequences of one batch, in scattered slots and blocks, over poisoned pools."""
    oracle = random_model()
    llm = engine(save(oracle, tmp_path), max_num_seqs=7, kv_cache_memory_bytes=2**21)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    for pool in (runner.slots, runner.blocks):
        pool.poison(list(range(len(pool.storage))))
    sequences = [random_ids(n, 97, seed=n) for n in (200, 3, 97)]
    slots = [6, 1, 3]
    blocks = [[9, 2, 30, 11], [4], [39, 1]]
    done = (0, 0, 0)
    for step, ends in enumerate([(128, 1, 50), (199, 2, 96), (200, 3, 97)]):
        rows = [
            Row(s, start, end, slot, table)
            for s, start, end, slot, table in zip(sequences, done, ends, slots, blocks, strict=True)
        ]
        logits = (runner.decode if step == 2 else runner.prefill)(rows)
        for n, end in enumerate(ends):
            assert_close(logits[n], all_logits(oracle, sequences[n][:end])[end - 1])
        done = ends
