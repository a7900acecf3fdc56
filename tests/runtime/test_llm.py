"""`LLM` with the shipped model: forms of a call, outputs, keywords and their errors."""

from __future__ import annotations

import importlib.resources
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import CompilerOptions, EngineConfig, ModelOptions, RuntimeOptions
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.weights import load_config
from minivllm.presets import model_preset
from minivllm.runtime.engine import (
    find_model,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
    resolve_state_dtype,
)

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
        ({"enable_prefix_caching": True}, "enable_prefix_caching: True is not available yet"),
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


def test_two_streams_cannot_share_the_engine(llm: LLM) -> None:
    first = llm.stream("She had", GREEDY)
    next(first)
    with pytest.raises(UserError, match="another request of this engine is running"):
        next(llm.stream("import os", GREEDY))
    first.close()
    assert len(llm.generate("She had", GREEDY)[0].outputs[0].token_ids) == 12


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
