"""On a GPU: the chosen kernels held to the float32 reference, and float32 held to the token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import random_ids, random_model, save

from bench.cuda_parity import compare, measure, preset, runner
from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig, RuntimeOptions
from minivllm.errors import UserError
from minivllm.presets import model_preset as preset_options
from minivllm.runtime.captures import Captures
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.prefill_inputs import Row, prefill_inputs
from minivllm.runtime.warmup import counted_builds

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
        "paged_attention_prefill": "triton",
        "paged_attention_decode": "triton",
        "decode_inputs": "triton",
        "greedy_tokens": "triton",
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
    for lengths in ((100, 28), (28, 100)):  # three chunks, and three blocks, of 64 either way
        rows = [
            Row(random_ids(n, config.vocab_size, seed=n), 0, n, 1 + i, [1 + i, 3 + i])
            for i, n in enumerate(lengths)
        ]
        batches.append({k: v.to(device) for k, v in prefill_inputs(rows).views().items()})
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
    blocks = [3, 7, 1, 2, 6, 5, 4]
    whole = model.prefill([Row(ids, 0, 400, 1, blocks)]).float().cpu()
    for cut in (64, 128, 320, 100):
        model.prefill([Row(ids, 0, cut, 1, blocks)])
        split = model.prefill([Row(ids, cut, 400, 1, blocks)]).float().cpu()
        assert compare(split, whole).rms < 0.02, cut


@pytest.mark.parametrize("checked", [False, True])
def test_a_replay_is_the_eager_step(checked: bool) -> None:
    """Logits and pools, bit for bit, at every bucket, full and one short."""
    config = EngineConfig(
        preset_options("tiny"),
        runtime=RuntimeOptions(device="cuda", max_num_seqs=40, check_integrity=checked),
    )
    llm = LLM.from_config(config)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    decoder = runner.decoder
    captures = decoder.captures
    assert captures is not None and len(captures) == len(decoder.buckets)
    assert decoder.buckets == [1, 2, 4, 8, 16, 24, 32, 40]
    vocabulary = llm.engine.config.vocab_size
    lengths = [1 + 37 * n % 300 for n in range(40)]
    rows = [
        Row(random_ids(n + 1, vocabulary, seed=n), 0, n, 40 - i, range(1 + 6 * i, 7 + 6 * i))
        for i, n in enumerate(lengths)
    ]
    runner.prefill(rows)
    rows = [Row(r.token_ids, r.end, r.end + 1, r.slot, r.blocks) for r in rows]
    pools = (runner.slots.storage, runner.blocks.storage[:250])
    start = [pool.clone() for pool in pools]

    def outcome(count: int, graphs: Captures | None) -> list[torch.Tensor]:
        for pool, content in zip(pools, start, strict=True):
            pool.copy_(content)
        decoder.captures = graphs
        logits = runner.decode(rows[:count]).clone()
        return [logits, *(pool.clone() for pool in pools)]

    for size in decoder.buckets:
        for count in {size, max(size - 1, 1)}:
            for replayed, eager in zip(outcome(count, captures), outcome(count, None), strict=True):
                assert torch.equal(replayed, eager), (size, count)
    decoder.captures = captures
    llm.close()


def test_once_ready_nothing_is_built_or_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any lengths in batches of any sizes, chunks, hits, and all ways of sampling."""
    llm = LLM("tiny", device="cuda", max_num_seqs=48, max_num_batched_tokens=1000)
    captures = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def spy(self: Any, *arguments: Any, **keywords: Any) -> Any:
        captures.append(arguments)
        return begin(self, *arguments, **keywords)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", spy)
    chance = random.Random(0)
    shared = random_ids(700, 4096)
    with counted_builds() as builds:
        for batch in (1, 2, 3, 7, 20, 48, 60):
            prompts, params = [], []
            for _ in range(batch):
                length = chance.choice((1, 2, 15, 63, 64, 65, chance.randrange(1, 1200)))
                prompts.append(
                    shared[: chance.randrange(701)] + random_ids(length, 4096, seed=length)
                )
                params.append(
                    SamplingParams(
                        temperature=chance.choice((0.0, 1.0)),
                        top_p=chance.choice((1.0, 0.9)),
                        top_k=chance.choice((0, 5, 500)),
                        n=chance.choice((1, 1, 1, 3)),
                        logprobs=chance.choice((None, None, 3)),
                        prompt_logprobs=chance.choice((None, None, None, 1)),
                        repetition_penalty=chance.choice((1.0, 1.2)),
                        max_tokens=chance.randrange(1, 80),
                        seed=chance.randrange(99),
                        ignore_eos=True,
                    )
                )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert all(c.finish_reason == "length" for o in outputs for c in o.outputs)
    assert builds.count == 0 and not captures
    assert llm.metrics["prefix_cache"]["reused_tokens"] > 0
    llm.close()


@pytest.mark.parametrize("share", [0.3, pytest.param(0.9, marks=pytest.mark.slow)])
def test_what_the_plan_claims_fits(share: float) -> None:
    """Requests fill the KV cache of an engine; the memory outside its plan stays free."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    llm = LLM(
        "miniqwen08b",
        device="cuda",
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=share,
    )
    plan, metrics = llm.engine.plan, llm.metrics
    tokens = (plan.sizes.num_blocks - 1) * 64
    assert not plan.notes and plan.max_num_seqs == 256 and plan.max_model_len == 262144
    length = min(tokens // 160, 200_000)
    params = SamplingParams(temperature=0.0, max_tokens=5000, ignore_eos=True)
    names = []
    for n in range(plan.max_num_seqs):
        prompt = {"prompt_token_ids": random_ids(length, 248_000, seed=n)}
        names.append(llm.add_request(prompt, params))
    full = 0
    for _ in range(4 * tokens // 8192):
        llm.step()
        metrics = llm.metrics
        full += metrics["kv_blocks_used"] >= 0.98 * metrics["kv_blocks"]
        if full == 20:
            break
    assert full == 20, metrics
    torch.cuda.synchronize()
    left = torch.cuda.mem_get_info()[0]
    outside = (1 - share) * free - 0.05 * total
    assert left > outside, f"{left:,} of {free:,} bytes are left ({total:,} in all)"
    for name in names:
        llm.abort(name)
    while llm.has_unfinished_requests:
        llm.step()
    llm.engine.scheduler.check_integrity()
    llm.close()


def test_memory_is_told_apart_when_too_much_is_asked() -> None:
    with pytest.raises(UserError, match=r"do not fit into [\d,]+ bytes; one of:\n"):
        LLM("tiny", device="cuda", gpu_memory_utilization=1e-4)
    llm = LLM("tiny", device="cuda", gpu_memory_utilization=0.05, max_num_seqs=16)
    assert len(llm.generate([5, 6], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) > 0
    llm.close()
