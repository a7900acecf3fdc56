"""`LLM`: forms of a call, outputs, keywords and their errors, and many requests at once."""

from __future__ import annotations

import importlib.resources
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCAB, Builder, assert_idle, checkpoint, drain, result
from oracle import all_logits, random_ids
from transformers import Qwen3_5ForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.config import CompilerOptions, EngineConfig, ModelOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.weights import load_config
from minivllm.presets import model_preset
from minivllm.runtime.model_runner import StepLogits
from minivllm.runtime.outputs import Logprob
from minivllm.runtime.resolve import (
    find_model,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
    resolve_state_dtype,
)
from minivllm.runtime.step import StateCopy, Step

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu", max_model_len=200)


@pytest.fixture(scope="module")
def config() -> MiniQwenConfig:
    with importlib.resources.as_file(
        importlib.resources.files("minivllm") / "assets" / "tiny"
    ) as folder:
        return load_config(folder)


def test_one_prompt_and_many(llm: LLM) -> None:
    prompts = ["She had", "import os"]
    both = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(p, GREEDY)[0] for p in prompts]
    assert [o.outputs[0].token_ids for o in both] == [o.outputs[0].token_ids for o in alone]
    for prompt, output in zip(prompts, both, strict=True):
        (completion,) = output.outputs
        assert output.prompt == prompt and output.finished
        assert llm.tokenizer is not None
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
        assert output.num_cached_tokens == 0
        assert len(completion.token_ids) == 12 and completion.finish_reason == "length"
        assert output.metrics.time_to_first_token > 0 and output.metrics.generation_time > 0


def test_ids_and_dicts_are_the_text(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("She had")
    expected = llm.generate("She had", GREEDY)[0].outputs[0]
    for prompt in (ids, {"prompt_token_ids": ids}, [{"prompt": "She had"}]):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].text == expected.text


def test_parameters_one_for_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5]
    with pytest.raises(UserError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], params)


def test_a_stream_adds_up(llm: LLM) -> None:
    outputs = list(llm.stream("春", SamplingParams(temperature=1.0, seed=3, max_tokens=40)))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1].outputs[0]
    assert "".join(o.outputs[0].delta for o in outputs) == last.text
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, len(outputs) + 1))
    assert len({o.request_id for o in outputs}) == 1


def test_seeds(llm: LLM) -> None:
    def text(seed: int | None) -> str:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=16)
        return llm.generate("She had", params)[0].outputs[0].text

    assert text(1) == text(1) != text(2)
    assert text(None) != text(None)  # requests of one engine do not share a seed


def test_stop_strings_and_room(llm: LLM) -> None:
    (free,) = llm.generate("She had", GREEDY)
    word = free.outputs[0].text.split()[2]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=word, ignore_eos=True)
    (stopped,) = llm.generate("She had", params)
    completion = stopped.outputs[0]
    assert completion.text == free.outputs[0].text.partition(word)[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", word)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (filled,) = llm.generate([7] * 190, params)
    assert len(filled.outputs[0].token_ids) == 10
    assert filled.outputs[0].finish_reason == "length"


def test_a_prompt_that_is_too_long(llm: LLM) -> None:
    with pytest.raises(UserError, match="200 tokens leave no room"):
        llm.generate([[7] * 200], GREEDY)


def test_without_a_tokenizer() -> None:
    llm = LLM("tiny", device="cpu", skip_tokenizer_init=True)
    assert llm.tokenizer is None
    (output,) = llm.generate([5, 6, 7], GREEDY)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 12
    with pytest.raises(UserError, match="needs a tokenizer"):
        llm.generate("text", GREEDY)


def test_dummy_weights_are_seeded() -> None:
    def tokens(seed: int) -> list[int]:
        llm = LLM("tiny", device="cpu", load_format="dummy", seed=seed)
        return llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"enable_prefix_caching": 1}, "runtime.prefix_cache.enabled: 1 is not true"),
        ({"snapshot_interval": 100}, "runtime.prefix_cache.snapshot_interval: 100"),
        ({"snapshot_memory_bytes": -1}, "runtime.prefix_cache.memory_bytes: -1"),
        ({"snapshot_host_memory_bytes": None}, "runtime.prefix_cache.host_memory_bytes: None"),
        ({"kv_cache_memory_bytes": 1}, "do not fit|room for 0"),
        ({"dtype": "float8"}, "model.dtype"),
        ({"device": "tpu"}, "runtime.device"),
        ({"device": "cuda:99"}, "cuda"),
        ({"load_format": "gguf"}, "model.load_format"),
        ({"max_model_len": 0}, "runtime.max_model_len"),
        ({"max_model_len": 4096}, "made for 2048 positions"),
        ({"gpu_memory_utilization": 1.5}, "runtime.gpu_memory_utilization"),
        ({"enforce_eager": 1}, "enforce_eager=1"),
        ({"tokenizer": "/nowhere"}, "nowhere"),
    ],
)
def test_keywords_that_cannot_be_honoured(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LLM("tiny", **{"device": "cpu", **keywords})


def test_an_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM("tiny", tensor_parallel_size=2)  # type: ignore[call-arg]


def test_autos(config: MiniQwenConfig) -> None:
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", config, CPU) == torch.float16
    assert resolve_device("cpu") == CPU
    assert resolve_state_dtype(RuntimeOptions(), config) == torch.float32
    assert resolve_state_dtype(RuntimeOptions(state_dtype="bfloat16"), config) == torch.bfloat16


def test_small_models_run_on_one_thread(config: MiniQwenConfig) -> None:
    large = MiniQwenConfig.from_hf(model_preset("miniqwen08b").architecture or {})
    assert resolve_num_threads(RuntimeOptions(), config) == 1
    assert resolve_num_threads(RuntimeOptions(), large) == torch.get_num_threads()
    assert resolve_num_threads(RuntimeOptions(num_threads=3), config) == 3


def test_a_checkpoints_shape_wins_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    shape = dict(model_preset("miniqwen08b").architecture or {})
    options = ModelOptions(path="asset://tiny", architecture=shape)
    _, found = find_model(options)
    assert found.hidden_size == 192
    assert "model.architecture is not used" in caplog.text and "hidden_size" in caplog.text


def test_a_closed_llm_says_so() -> None:
    llm = LLM("tiny", device="cpu")
    llm.close()
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.generate("a", GREEDY)


def test_closing_gives_the_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm = LLM("tiny", device="cpu")
        assert torch.get_num_threads() == 1
        llm.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, [{"temperature": 0.0}], "a", 3])
def test_parameters_of_another_type(params: Any, llm: LLM) -> None:
    with pytest.raises(UserError, match="give a SamplingParams"):
        llm.generate(["a"], params)


def test_bytes_are_no_token_ids(llm: LLM) -> None:
    with pytest.raises(UserError, match="give a text"):
        llm.generate(b"abc", GREEDY)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("op", ["gated_delta_rule", "nothing"])
def test_an_implementation_for_an_op_that_is_not_there(op: str, mode: str) -> None:
    compiler = CompilerOptions(mode=mode, implementations={op: "torch"})
    with pytest.raises(UserError, match=rf"compiler.implementations.*{op}.*choose from"):
        LLM.from_config(EngineConfig(model_preset("tiny"), compiler, RuntimeOptions(device="cpu")))


def test_only_a_cut_that_matters_stops_the_engine() -> None:
    def build(last: str) -> LLM:
        compiler = CompilerOptions(stop_after=last)
        return LLM.from_config(
            EngineConfig(model_preset("tiny"), compiler, RuntimeOptions(device="cpu"))
        )

    assert len(build("lower_attention").generate("a", GREEDY)[0].outputs[0].token_ids) == 12
    with pytest.raises(UserError, match=r"leaves out .*lower_mixers.* minivllm.inspect"):
        build("fuse_norms")


def test_a_local_folder_counts_with_dummy_weights_too(tmp_path: Any) -> None:
    shape = dict(model_preset("miniqwen08b").architecture or {})
    options = ModelOptions(path=str(tmp_path / "typo"), load_format="dummy", architecture=shape)
    with pytest.raises(UserError, match="typo"):
        find_model(options)


# many requests at once


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(checkpoint(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def oracle(build: Builder) -> Qwen3_5ForCausalLM:
    """The model of `build`'s checkpoint."""
    return read(build.folder)


def read(folder: Path) -> Qwen3_5ForCausalLM:
    # not a bfloat16 model made float32: that rounds the rotary frequencies
    return Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def shared(build: Builder) -> LLM:
    """Four at a time, in chunks of at most 64 tokens."""
    return build(max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
def batched(shared: LLM) -> Iterator[LLM]:
    shared.reset_prefix_cache()
    yield shared
    assert_idle(shared)


def ids(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, VOCAB, seed=seed)


def run(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | fields)


def test_many_prompts_at_once_are_each_of_them_alone(build: Builder, batched: LLM) -> None:
    prompts = [ids(n, seed=n) for n in (1, 3, 64, 65, 130, 200, 5, 97, 128)]
    params = [run(4 + 9 * i) for i in range(8)] + [run(20, temperature=1.0, seed=7)]
    outputs = batched.generate(prompts, params, use_tqdm=False)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt and output.finished
        assert result(output) == build.ends(prompt, p)


def test_a_stream_of_several_is_interleaved(build: Builder, batched: LLM) -> None:
    prompts = [ids(5, seed=1), ids(90, seed=2)]
    outputs = list(batched.stream(prompts, run(20)))
    order = [o.request_id for o in outputs]
    first, second = dict.fromkeys(order)
    assert order.count(first) == order.count(second) == 20
    assert first in order[order.index(second) :], "one after the other"
    for name, prompt in zip((first, second), prompts, strict=True):
        mine = [o for o in outputs if o.request_id == name]
        lengths = [len(o.outputs[0].token_ids) for o in mine]
        assert lengths == list(range(1, 21))
        assert result(mine[-1]) == build.ends(prompt, run(20))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_a_stream_aborts_it(taken: int, batched: LLM) -> None:
    """`batched` looks at the books behind each test."""
    aborted = batched.metrics["aborted"]
    stream = batched.stream([ids(200), ids(3), ids(3), ids(70), ids(9), ids(9)], run(100))
    for _ in range(taken):
        next(stream)
    assert batched.metrics["running"] == min(taken, 1) * 4
    stream.close()
    assert not batched.engine.has_unfinished or batched.engine.step() is not None
    assert batched.metrics["aborted"] - aborted == (6 if taken else 0)


def test_two_streams_at_once(build: Builder, batched: LLM) -> None:
    """Each step serves both; what one asker's step brings the other must not miss."""
    first = batched.stream([ids(5, seed=1), ids(70, seed=2)], run(30))
    second = batched.stream(ids(40, seed=3), run(8))
    head = [next(first)]
    tail = [next(second)]
    head += first  # by its end the second has long ended too
    tail += second
    assert result(tail[-1]) == build.ends(ids(40, seed=3), run(8)) and tail[-1].finished
    ends = {tuple(o.prompt_token_ids): o for o in head if o.finished}
    for prompt in (ids(5, seed=1), ids(70, seed=2)):
        assert result(ends[tuple(prompt)]) == build.ends(prompt, run(30))


def test_steps_by_hand(build: Builder, batched: LLM) -> None:
    asked = {batched.add_request(ids(50 * i + 1, seed=i), run(5 + i)): i for i in range(6)}
    named = batched.add_request({"prompt_token_ids": ids(3)}, run(4), "mine")
    assert named == "mine" and batched.has_unfinished_requests
    outputs = drain(batched)
    assert set(outputs) == {*asked, "mine"} and batched.step() == []
    for name, i in asked.items():
        assert result(outputs[name]) == build.ends(ids(50 * i + 1, seed=i), run(5 + i))


def test_generate_loses_none_of_the_added(build: Builder, batched: LLM) -> None:
    batched.add_request(ids(100, seed=1), run(3), "short")
    batched.add_request(ids(100, seed=2), run(60), "long")
    (output,) = batched.generate(ids(4), run(20))
    assert result(output) == build.ends(ids(4), run(20))
    assert batched.has_unfinished_requests
    with pytest.raises(UserError, match=r"'short' is in use until `step` has told its end"):
        batched.add_request(ids(3), run(1), "short")
    with pytest.raises(UserError, match=r"'long' is in use"):
        batched.add_request(ids(3), run(1), "long")
    outputs = drain(batched)
    assert result(outputs["short"]) == build.ends(ids(100, seed=1), run(3))
    assert result(outputs["long"]) == build.ends(ids(100, seed=2), run(60))
    batched.add_request(ids(3), run(1), "short")
    drain(batched)


def test_abort_at_every_stage(build: Builder, batched: LLM) -> None:
    def add(name: str, length: int, tokens: int = 200) -> None:
        batched.add_request(ids(length, seed=length), run(tokens), name)

    add("decoding", 10)
    for _ in range(3):
        batched.step()
    add("prefilling", 300)
    batched.step()
    for name in ("kept", "also running", "waiting", "never seen"):
        add(name, 20 + len(name), 30)
    batched.step()
    (prefilling,) = [r for r in batched.engine.scheduler.running if r.request_id == "prefilling.0"]
    assert 0 < prefilling.num_computed_tokens < 300 and batched.metrics["waiting"]
    for name in ("waiting", "decoding", "prefilling", "never seen"):
        batched.abort(name)
        batched.engine.scheduler.check_integrity()
        with pytest.raises(UserError, match=f"'{name}': no such request; there are: "):
            batched.abort(name)
    told = {o.request_id: o for o in batched.step()}
    lengths = {"waiting": 0, "decoding": 6, "prefilling": 0, "never seen": 0}
    for name, length in lengths.items():
        assert told[name].finished and told[name].outputs[0].finish_reason == "abort"
        assert len(told[name].outputs[0].token_ids) <= length
    outputs = drain(batched)
    for name in ("kept", "also running"):
        prompt = ids(20 + len(name), seed=20 + len(name))
        assert result(outputs[name]) == build.ends(prompt, run(30))
    with pytest.raises(UserError, match=r"'nobody': no such request; there are: none"):
        batched.abort("nobody")


@pytest.mark.parametrize("length", [1, 64, 70, 200])
def test_several_completions_of_one_prompt(length: int, build: Builder, batched: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=70, ignore_eos=True)
    (output,) = batched.generate(ids(length), params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert result(output) == build.ends(ids(length), params)
    with pytest.raises(UserError, match=r"n=5: at most max_num_seqs=4 completions"):
        batched.generate(ids(3), SamplingParams(n=5))


def test_completions_end_one_by_one_and_abort_together(batched: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=300, stop_token_ids=list(range(0, 90, 30)))
    outputs = list(batched.stream(ids(70), params))
    ended = [sum(c.finish_reason is not None for c in o.outputs) for o in outputs]
    assert ended == sorted(ended) and ended[-1] == 3 and len(set(ended)) > 2
    batched.add_request(ids(70), SamplingParams(n=3, seed=1, max_tokens=300, ignore_eos=True), "x")
    batched.step()
    batched.abort("x")
    (output,) = batched.step()
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_step_that_breaks_off_leaves_a_working_engine(
    place: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: spills that were planned did not run. After: states have seen the step's tokens."""
    llm = build(snapshots=4, host=4, max_num_batched_tokens=64)
    prompts = [ids(200, seed=i) for i in range(6)]
    runner = llm.engine.runner
    execute, spills = runner.execute, itertools.count()

    def breaking(step: Step) -> StepLogits:
        spilled = any(isinstance(c, StateCopy) and c.target[0] == "host" for c in step.before)
        if spilled and place == "before":
            raise KeyboardInterrupt
        logits = execute(step)
        if place == "after" and step.decode and next(spills) == 9:
            raise KeyboardInterrupt
        return logits

    llm.add_request(ids(20, seed=9), run(200), "added")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", breaking)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, run(80), use_tqdm=False)
    told = drain(llm)
    (completion,) = told["added"].outputs
    expected = build.alone(ids(20, seed=9), run(200))[0][0]
    assert completion.token_ids == expected[: len(completion.token_ids)]
    assert completion.finish_reason in ("error", "length")
    assert_idle(llm)
    for prompt in prompts:
        for _ in range(2):
            (output,) = llm.generate(prompt, run(8))
            assert result(output) == build.ends(prompt, run(8)), output.num_cached_tokens


# what a request may ask for, through the whole engine


def expected_logprobs(oracle: Qwen3_5ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """`[T, V]`: row t is of the token behind `tokens[:t + 1]`."""
    return all_logits(oracle, tokens).log_softmax(-1)


def check_logprobs(entry: dict[int, Logprob], row: torch.Tensor, token: int, count: int) -> None:
    top = row.topk(count)
    assert next(iter(entry)) == token and set(entry) == {token, *top.indices.tolist()}
    for token_id, found in entry.items():
        assert found.logprob == pytest.approx(float(row[token_id]), abs=5e-5)
        assert found.rank == int((row > row[token_id]).sum()) + 1


@pytest.mark.parametrize("length", [1, 40, 150, 300])
def test_logprobs_against_transformers(
    length: int, batched: LLM, oracle: Qwen3_5ForCausalLM
) -> None:
    """In chunks of 64 tokens at most, beside others; cold, and where the prefix is cached."""
    prompt = ids(length, seed=5)
    params = run(6, logprobs=3, prompt_logprobs=2)
    for _ in range(2):
        (warm,) = batched.generate(prompt, run(1))
        output, other, plain = batched.generate(
            [prompt, ids(80, seed=6), prompt], [params, run(9, logprobs=0), run(6)], use_tqdm=False
        )
        assert output.num_cached_tokens == 0, "its logits are needed"
        assert plain.num_cached_tokens == (length - 1) // 64 * 64
        (completion,) = output.outputs
        tokens = prompt + completion.token_ids
        rows = expected_logprobs(oracle, tokens)
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == length
        for t, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            check_logprobs(entry, rows[t], prompt[t + 1], 2)
        assert len(completion.logprobs) == 6
        for t, entry in enumerate(completion.logprobs, start=length - 1):
            check_logprobs(entry, rows[t], tokens[t + 1], 3)
        own = [e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(own))
        assert plain.outputs[0].logprobs is None and plain.prompt_logprobs is None
        assert [len(e) for e in other.outputs[0].logprobs or []] == [1] * 9
    assert warm.num_cached_tokens == (length - 1) // 64 * 64


def test_prompt_logprobs_of_several_completions(batched: LLM, oracle: Qwen3_5ForCausalLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    (output,) = batched.generate(ids(100), params)
    rows = expected_logprobs(oracle, ids(100))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 100
    for t, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        check_logprobs(entry, rows[t], ids(100)[t + 1], 0)


def test_bias_penalties_and_least_length(
    batched: LLM, oracle: Qwen3_5ForCausalLM, llm: LLM
) -> None:
    """Each once end to end, beside a row that asks for nothing; `test_penalties` has the rest."""
    prompt = ids(70, seed=9)
    (plain,) = batched.generate(prompt, run(12))
    first = plain.outputs[0].token_ids[0]
    logits = all_logits(oracle, prompt)[-1]
    runner_up = int(logits.topk(2).indices[1])
    banned, forced, repeated, beside = (
        o.outputs[0].token_ids
        for o in batched.generate(
            [prompt] * 4,
            [
                run(12, logit_bias={first: -100}),
                run(12, logit_bias={"42": 100}),
                run(12, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1e9),
                run(12),
            ],
            use_tqdm=False,
        )
    )
    assert banned[0] == runner_up and first not in banned
    assert forced == [42] * 12
    assert len(set(repeated)) == 12 and not set(repeated) & set(prompt)
    assert beside == plain.outputs[0].token_ids
    # ends at once where it may
    eos = llm.engine.eos_token_ids[0]
    ending = {"logit_bias": {eos: 100}, "temperature": 0.0, "max_tokens": 9}
    lengths = [
        len(o.outputs[0].token_ids)
        for o in llm.generate(
            ["a", "a"],
            [SamplingParams(**ending), SamplingParams(**ending, min_tokens=5)],
            use_tqdm=False,
        )
    ]
    assert lengths == [1, 6]
    for field in ("logit_bias", "stop_token_ids"):
        value: Any = {VOCAB: 1.0} if field == "logit_bias" else [VOCAB]
        with pytest.raises(UserError, match=f"{field}: token id {VOCAB} is outside"):
            batched.generate(prompt, run(1, **{field: value}))


def test_a_batch_with_one_bad_prompt_leaves_nothing(batched: LLM) -> None:
    with pytest.raises(UserError, match="prompt 1: token id 97"):
        batched.generate([ids(3), [VOCAB]], run(3))
    with pytest.raises(UserError, match="n=5"):
        batched.generate([ids(3), ids(3)], [run(3), SamplingParams(n=5)])
    assert [o.outputs[0].finish_reason for o in batched.step()] == []


def test_cache_options_of_a_prompt(batched: LLM) -> None:
    prompt = ids(200, seed=12)

    def cached(**options: Any) -> int:
        return batched.generate({"prompt_token_ids": prompt, **options}, run(1))[
            0
        ].num_cached_tokens

    assert cached() == 0 and cached() == 192
    assert cached(prefix_cache=False) == 0
    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") == 192
    assert cached(cache_salt="") == 0
    batched.reset_prefix_cache()
    assert cached() == 0
    batched.reset_prefix_cache()
    longer = {"prompt_token_ids": prompt, "snapshot_at": [70, 130]}
    batched.generate(longer, run(1))
    (output,) = batched.generate(prompt[:100] + ids(50), run(1))
    assert output.num_cached_tokens == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["linear_attention"] * 4},
    ],
)
def test_models_of_one_kind_of_layer(changes: dict[str, Any], tmp_path: Path) -> None:
    """No state to snapshot, or no KV cache: prefixes are reused all the same."""
    folder = checkpoint(tmp_path, **changes)
    reference = read(folder)
    llm = LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_num_seqs=4)
    prompts = [ids(150), ids(150) + ids(9), ids(3), ids(64)]
    for _ in range(2):
        for prompt in prompts:
            (output,) = llm.generate(prompt, run(8))
            tokens = output.outputs[0].token_ids
            # its own generation needs a layer of attention
            logits = all_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
            assert tokens == logits.argmax(-1).tolist()
    assert output.num_cached_tokens == 0  # one token is always left
    assert llm.generate(prompts[1], run(8))[0].num_cached_tokens == 128
    llm.engine.scheduler.check_integrity()
