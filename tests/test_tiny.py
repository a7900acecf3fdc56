"""The shipped model against transformers, in float32 and bfloat16, from its own files."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import torch
from oracle import all_logits, greedy
from test_parity import assert_close, decode_logits, prefill_logits
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from minivllm import LLM, SamplingParams

FOLDER = Path(str(importlib.resources.files("minivllm") / "assets" / "tiny"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = [
    "Once upon a time",
    "It is a truth universally acknowledged, that",
    "In the beginning God created",
    "def read_json(path):\n    ",
    "import os\nimport sys\n\nclass",
    "床前明月光，",
    "子曰：",
    "1, 2, 3, 4,",
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest) -> tuple[Qwen3_5ForCausalLM, LLM]:
    """transformers' model and ours, in the same dtype."""
    dtype = getattr(torch, request.param)
    oracle = Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    return oracle, LLM("tiny", device="cpu", dtype=request.param)


@pytest.fixture(scope="module")
def exact() -> Qwen3_5ForCausalLM:
    """transformers' model in float32, with the same bfloat16 weights."""
    return Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_tokens(
    text: str, pair: tuple[Qwen3_5ForCausalLM, LLM], exact: Qwen3_5ForCausalLM
) -> None:
    """The same 64 tokens; in bfloat16 the first difference may be a near-tie.

    A near-tie: in float32 the two tokens' logits are closer than transformers' own bfloat16
    logits are to float32, so that rounding alone decides.
    """
    oracle, llm = pair
    (output,) = llm.generate(text, GREEDY)
    tokens, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    expected = greedy(oracle, prompt, 64)
    if llm.dtype == torch.float32:
        assert tokens == expected
        return
    differing = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
    if differing:
        history = prompt + expected[: differing[0]]
        ours, theirs = tokens[differing[0]], expected[differing[0]]
        truth = all_logits(exact, history)[-1]
        rounding = (all_logits(oracle, history)[-1] - truth).abs().max()
        assert (truth[ours] - truth[theirs]).abs() <= 2 * rounding


def test_logits_in_float32(exact: Qwen3_5ForCausalLM) -> None:
    llm = LLM("tiny", device="cpu", dtype="float32")
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("\n".join(PROMPTS))
    prompt, whole = ids, ids + greedy(exact, ids, 64)
    logits = all_logits(exact, whole)
    assert_close(prefill_logits(llm, prompt), logits[: len(prompt)])
    assert_close(decode_logits(llm, whole, len(prompt)), logits[len(prompt) - 1 :])


def test_tokenizer_agrees_with_transformers() -> None:
    llm = LLM("tiny", device="cpu")
    reference = AutoTokenizer.from_pretrained(FOLDER)
    assert llm.tokenizer is not None
    for text in [*PROMPTS, "naïve café 👩‍👩‍👧 \t  tabs\r\n", "<|im_start|>user\nhi<|im_end|>"]:
        ids = llm.tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert llm.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_the_tokenizer_lacks_are_never_sampled() -> None:
    """The head is wider than the vocabulary; a flat distribution would soon hit the padding."""
    llm = LLM("tiny", device="cpu")
    assert llm.tokenizer is not None
    assert llm.tokenizer.vocab_limit < llm.engine.config.vocab_size
    params = SamplingParams(temperature=100.0, seed=1, max_tokens=400, ignore_eos=True)
    (output,) = llm.generate("a", params)
    assert max(output.outputs[0].token_ids) < llm.tokenizer.vocab_limit


def test_it_is_small_and_says_where_it_comes_from() -> None:
    assert sum(f.stat().st_size for f in FOLDER.glob("*.safetensors")) <= 12_000_000
    training = json.loads((FOLDER / "training.json").read_text())
    assert 0 < training["held_out_nats_per_token"] < 4
    assert "licen" in (FOLDER / "README.md").read_text().lower()
