"""On a GPU: the chosen kernels held to the float32 reference, and float32 held to the token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import random_ids, random_model, save

from bench.cuda_parity import compare, measure, preset, runner
from minivllm import LLM, SamplingParams
from minivllm.runtime.model_runner import Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module", params=["tiny", "miniqwen08b"])
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    return measure(request.param, torch.device("cuda"))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("graphs", ["kernels", "compiled"])
def test_kernels_err_at_most_twice_as_much_as_torch_ops(
    graphs: str, phase: str, measured: dict[str, Any]
) -> None:
    kernels, ops = measured[f"{graphs}_{phase}"], measured[f"torch_{phase}"]
    assert 0 < ops["rms"] < 0.1
    assert kernels["rms"] <= 2 * ops["rms"]
    assert kernels["largest"] <= 2 * ops["largest"]
    # A greedy token may differ only where the reference itself has a near-tie: two logits, each
    # off by at most the largest error, can change places over a gap of twice that.
    assert kernels["widest_tie"] <= 2


def test_the_kernels_are_the_intended_ones(measured: dict[str, Any]) -> None:
    assert measured["kernels_implementations"] == {
        "causal_conv1d_prefill": "fla",
        "causal_conv1d_decode": "fla",
        "gated_delta_rule_prefill": "fla",
        "gated_delta_rule_decode": "fla",
        "paged_kv_write": "triton",
        "paged_attention_prefill": "flash_attn",
        "paged_attention_decode": "flash_attn",
    }
    compiled = measured["compiled_implementations"]
    assert "torch" not in compiled.values(), compiled


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_two_batches_through_the_same_buffers(mode: str) -> None:
    """FLA memoises what it derives from `cu_seqlens` by the tensor's identity, not its content."""
    config, weights = preset("tiny")
    device = torch.device("cuda")
    model = runner(config, weights, torch.bfloat16, None, device, mode)
    batches = []
    for lengths in ((100, 28), (28, 100)):  # three chunks of 64 either way
        rows = [
            Row(random_ids(n, config.vocab_size, seed=n), 0, 1 + i, [1 + i])
            for i, n in enumerate(lengths)
        ]
        batches.append({k: v.to(device) for k, v in model.inputs(rows).items()})
    graph = model.graphs["prefill"]
    with torch.inference_mode():
        fresh = [graph(**batch).clone() for batch in batches]
        buffers = {name: torch.empty_like(value) for name, value in batches[0].items()}
        for batch, expected in zip([*batches, batches[0]], [*fresh, fresh[0]], strict=True):
            for name, value in batch.items():
                buffers[name].copy_(value)
            assert torch.equal(graph(**buffers), expected)
    assert not torch.equal(fresh[0], fresh[1])


def test_float32_tokens_equal_the_cpu(tmp_path: Path) -> None:
    folder = save(random_model(), tmp_path)
    prompts = [random_ids(n, 97, seed=n) for n in (1, 70, 300)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    tokens = {}
    for device in ("cpu", "cuda"):
        llm = LLM(str(folder), dtype="float32", device=device, skip_tokenizer_init=True)
        kernels = {"torch"} if device == "cpu" else {"torch", "triton"}
        assert set(llm.implementations.values()) == kernels
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens[device] = [o.outputs[0].token_ids for o in outputs]
        llm.close()
    assert tokens["cuda"] == tokens["cpu"]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(mode: str) -> None:
    """Splits at multiples of 64 keep FLA's chunks; the rest may differ by its rounding."""
    config, weights = preset("tiny")
    model = runner(config, weights, torch.bfloat16, None, torch.device("cuda"), mode)
    ids = random_ids(400, config.vocab_size)
    whole = model.prefill([Row(ids, 0, 1, [1, 2])]).float().cpu()
    for cut in (64, 128, 320, 100):
        model.prefill([Row(ids[:cut], 0, 1, [1, 2])])
        split = model.prefill([Row(ids, cut, 1, [1, 2])]).float().cpu()
        assert compare(split, whole).rms < 0.02, cut
