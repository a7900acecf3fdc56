"""The option dataclasses, and that YAML files and keywords mean the same."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from minivllm import presets
from minivllm.config import (
    CompilerOptions,
    EngineConfig,
    ModelOptions,
    PrefixCacheOptions,
    RuntimeOptions,
)
from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.runtime.llm import LLM
from minivllm.runtime.sampling_params import SamplingParams

GROUPS = {
    "model": ModelOptions,
    "compiler": CompilerOptions,
    "runtime": RuntimeOptions,
    "sampling": SamplingParams,
}
TINY = {"path": "asset://tiny"}
CACHE_KEYWORDS = {  # of LLM, and the options they stand for
    "enable_prefix_caching": "enabled",
    "snapshot_interval": "snapshot_interval",
    "snapshot_memory_bytes": "memory_bytes",
    "snapshot_host_memory_bytes": "host_memory_bytes",
}


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(presets.conf_dir()), version_base="1.3"):
        settings = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(settings, dict)
    return settings


def names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def test_hydra_and_dataclasses_agree_on_defaults():
    settings = composed("+model=tiny")
    config = EngineConfig.from_mapping(
        {group: settings[group] for group in ("model", "compiler", "runtime")}
    )
    assert config == EngineConfig(model=presets.model_preset("tiny"))
    assert config.compiler == CompilerOptions()
    assert config.runtime == RuntimeOptions()
    assert config.model == ModelOptions(name="tiny", path="asset://tiny")


def test_the_sampling_group_is_vllms_defaults_but_greedy_and_longer():
    sampling_params = SamplingParams.from_mapping(composed("+model=tiny")["sampling"])
    assert sampling_params == SamplingParams(temperature=0.0, max_tokens=64)


def test_keywords_of_llm_have_the_defaults_of_the_options():
    keywords = dict(inspect.signature(LLM.__init__).parameters)
    for own in ("self", "model", "enforce_eager"):  # the rest are options by name
        del keywords[own]
    assert all(p.kind is p.KEYWORD_ONLY for p in keywords.values())
    options = {
        field.name: field.default
        for cls in (ModelOptions, RuntimeOptions)
        for field in dataclasses.fields(cls)
    }
    options |= {name: getattr(PrefixCacheOptions(), o) for name, o in CACHE_KEYWORDS.items()}
    assert set(CACHE_KEYWORDS.values()) == set(names(PrefixCacheOptions))
    assert {name: p.default for name, p in keywords.items()} == {n: options[n] for n in keywords}


def test_every_file_names_every_option():
    for group, cls in GROUPS.items():
        assert presets.choices(group), group
        for name in presets.choices(group):
            assert list(presets.read(f"{group}/{name}")) == names(cls), f"{group}/{name}"
    for name in presets.choices("runtime"):
        assert list(presets.read(f"runtime/{name}")["prefix_cache"]) == names(PrefixCacheOptions)


@pytest.mark.parametrize("name", presets.choices("model"))
def test_a_preset_is_the_same_through_hydra_and_without(name):
    settings = composed(f"+model={name}")
    assert ModelOptions.from_mapping(settings["model"]) == presets.model_preset(name)
    assert presets.model_preset(name).name == name


def test_the_presets_are_these_two():
    assert presets.choices("model") == ["miniqwen08b", "tiny"]
    with pytest.raises(UserError, match=r"^model: 'nope' is not one of: miniqwen08b, tiny$"):
        presets.model_preset("nope")


def test_the_08b_preset_has_the_08b_shape():
    options = presets.model_preset("miniqwen08b")
    assert options.path == "Qwen/Qwen3.5-0.8B"
    config = MiniQwenConfig.from_hf(options.architecture)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (248320, 1024, 3584)
    assert config.attention_layers == (3, 7, 11, 15, 19, 23)
    assert len(config.linear_layers) == 18
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 256)
    assert (config.rotary_dim, config.conv_dim, config.linear_conv_kernel_dim) == (64, 6144, 4)
    assert (config.rope_theta, config.rms_norm_eps) == (1e7, 1e-6)
    assert config.tie_word_embeddings
    assert not config.attention_bias
    assert config.max_position_embeddings == 262144
    assert (config.dtype, config.mamba_ssm_dtype) == ("bfloat16", "float32")
    assert config.eos_token_ids == (248044,)


def test_help_names_the_choices_of_the_dataclasses():
    template = presets.read("config")["hydra"]["help"]["template"]
    for cls in (ModelOptions, CompilerOptions, RuntimeOptions):
        for field in dataclasses.fields(cls):
            if field.name in ("dtype", "load_format", "mode", "device"):
                listed = ", ".join(field.metadata["choices"])
                assert re.search(rf"{cls.group}\.{field.name} +{re.escape(listed)}", template)
    for name in names(ModelOptions):
        assert re.search(rf"Keys of model:[^`]*\b{name}\b", template), name


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ModelOptions, {**TINY, "dtype": "fp8"}, "model.dtype: 'fp8' is not one of: auto, float32"),
        (ModelOptions, {**TINY, "dtype": 16}, "model.dtype: 16 is not one of: auto, float32"),
        (ModelOptions, {**TINY, "load_format": "pt"}, "'pt' is not one of: auto, safetensors, dum"),
        (ModelOptions, {**TINY, "seed": -1}, "model.seed: -1 is not an integer >= 0"),
        (ModelOptions, {**TINY, "seed": 1.0}, "model.seed: 1.0 is not an integer >= 0"),
        (ModelOptions, {**TINY, "seed": True}, "model.seed: True is not an integer >= 0"),
        (ModelOptions, {"path": ""}, "model.path: '' is not a text of at least one character or n"),
        (ModelOptions, {"path": 3}, "model.path: 3 is not a text"),
        (ModelOptions, {}, "model.path: none given; name a folder, asset://tiny or a Hugging Face"),
        (ModelOptions, {"load_format": "dummy"}, "model.load_format=dummy needs a shape"),
        (ModelOptions, {**TINY, "skip_tokenizer_init": 1}, "1 is not true or false"),
        (ModelOptions, {**TINY, "architecture": [1]}, "[1] is not a mapping of names, such as {a"),
        (
            ModelOptions,
            {**TINY, "pth": 1},
            "model.pth=1: no such key; did you mean 'path'? choices",
        ),
        (CompilerOptions, {"mode": "fast"}, "'fast' is not one of: reference, eager, compiled"),
        (CompilerOptions, {"disable": "fuse"}, "compiler.disable: 'fuse' is not a list of names"),
        (CompilerOptions, {"disable": [1]}, "compiler.disable: [1] is not a list of names"),
        (CompilerOptions, {"implementations": "x"}, "'x' is not a mapping of names"),
        (CompilerOptions, {"verify": "yes"}, "compiler.verify: 'yes' is not true or false"),
        (CompilerOptions, {"verify": None}, "compiler.verify: None is not true or false"),
        (RuntimeOptions, {"device": "tpu"}, "'tpu' is not one of: auto, cpu, cuda, cuda:N"),
        (RuntimeOptions, {"device": "cuda:"}, "'cuda:' is not one of: auto, cpu, cuda, cuda:N"),
        (RuntimeOptions, {"device": "cpu:0"}, "'cpu:0' is not one of: auto, cpu, cuda, cuda:N"),
        (RuntimeOptions, {"max_num_seqs": 0}, "runtime.max_num_seqs: 0 is not an integer >= 1"),
        (RuntimeOptions, {"max_num_seqs": None}, "None is not an integer >= 1"),
        (RuntimeOptions, {"max_model_len": "8k"}, "'8k' is not an integer >= 1 or null"),
        (RuntimeOptions, {"gpu_memory_utilization": 0}, "0.0 is not a number > 0 and <= 1"),
        (RuntimeOptions, {"gpu_memory_utilization": 1.01}, "1.01 is not a number > 0 and <= 1"),
        (RuntimeOptions, {"gpu_memory_utilization": float("nan")}, "nan is not a number"),
        (RuntimeOptions, {"cuda_graph": 1}, "runtime.cuda_graph: 1 is not true or false"),
        (RuntimeOptions, {"check_integrity": None}, "None is not true or false"),
        (RuntimeOptions, {"kv_cache_memory_bytes": 0}, "0 is not an integer >= 1 or null"),
        (RuntimeOptions, {"prefix_cache": 3}, "runtime.prefix_cache: 3 is not a group of: enabled"),
        (RuntimeOptions, {"prefix_cache": None}, "runtime.prefix_cache: None is not a group of: e"),
        (RuntimeOptions, {"state_dtype": "float16"}, "is not one of: auto, float32, bfloat16"),
        (RuntimeOptions, {"max_num_seq": 1}, "did you mean 'max_num_seqs'? choices: async_sched"),
        (
            RuntimeOptions,
            {"prefix_cache": {"snapshot_intervall": 64}},
            "runtime.prefix_cache.snapshot_intervall=64: no such key; did you mean "
            "'snapshot_interval'? choices: enabled, host_memory_bytes, memory_bytes, snapshot_int",
        ),
        (
            PrefixCacheOptions,
            {"enabled": 1},
            "runtime.prefix_cache.enabled: 1 is not true or false",
        ),
        (PrefixCacheOptions, {"snapshot_interval": 0}, "0 is not an integer >= 64"),
        (PrefixCacheOptions, {"snapshot_interval": 100}, "100 is not an integer >= 64 and a multi"),
        (PrefixCacheOptions, {"memory_bytes": -1}, "-1 is not an integer >= 0 or null"),
        (PrefixCacheOptions, {"host_memory_bytes": None}, "None is not an integer >= 0"),
    ],
)
def test_a_bad_value_is_named_with_its_choices(cls, values, message):
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        cls.from_mapping(values)
    assert str(raised.value).startswith(f"{cls.group}.")


def test_keywords_are_checked_as_mappings_are():
    with pytest.raises(UserError, match=r"^runtime.max_num_seqs: 0 is not an integer >= 1$"):
        RuntimeOptions(max_num_seqs=0)


def test_values_take_their_declared_type():
    options = CompilerOptions.from_mapping({"disable": ["a", "b"], "implementations": {"op": "x"}})
    assert options.disable == ("a", "b")
    assert options.implementations == {"op": "x"}
    utilization = RuntimeOptions(gpu_memory_utilization=1).gpu_memory_utilization
    assert utilization == 1.0
    assert isinstance(utilization, float)
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:13"):
        assert RuntimeOptions(device=device).device == device


def test_a_mapping_is_copied_so_that_options_stay_frozen():
    forced = {"op": "x"}
    options = CompilerOptions(implementations=forced)
    forced["op"] = "y"
    assert options.implementations == {"op": "x"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.mode = "eager"


def test_the_nested_group_through_hydra_and_by_keyword(monkeypatch):
    asked = {"enabled": False, "snapshot_interval": 128, "memory_bytes": 7, "host_memory_bytes": 9}
    overrides = [f"runtime.prefix_cache.{key}={value}" for key, value in asked.items()]
    settings = composed("+model=tiny", *overrides)
    runtime = RuntimeOptions.from_mapping(settings["runtime"])
    assert runtime == RuntimeOptions(prefix_cache=PrefixCacheOptions(**asked))
    opened = []
    monkeypatch.setattr(LLM, "_open", lambda self, config: opened.append(config))
    LLM("tiny", **{keyword: asked[option] for keyword, option in CACHE_KEYWORDS.items()})
    LLM("tiny", enforce_eager=True, max_num_seqs=3, max_num_batched_tokens=64)
    assert opened[0] == EngineConfig(presets.model_preset("tiny"), runtime=runtime)
    limits = RuntimeOptions(cuda_graph=False, max_num_seqs=3, max_num_batched_tokens=64)
    assert opened[1].runtime == limits
    with pytest.raises(UserError, match=r"^runtime.prefix_cache.snapshot_interval: 65 is not"):
        LLM("tiny", snapshot_interval=65)
    with pytest.raises(UserError, match=r"^runtime.prefix_cache: 3 is not a PrefixCacheOptions"):
        RuntimeOptions(prefix_cache=3)


def test_engine_config_from_mapping():
    config = EngineConfig.from_mapping({"model": TINY, "runtime": {"max_num_seqs": 3}})
    assert config.model == ModelOptions(path="asset://tiny")
    assert config.runtime == RuntimeOptions(max_num_seqs=3)
    assert config.compiler == CompilerOptions()
    with pytest.raises(UserError, match=r"^runtim=3: no such key; did you mean 'runtime'\? choi"):
        EngineConfig.from_mapping({"model": TINY, "runtim": 3})
    with pytest.raises(UserError, match=r"^runtime: 3 is not a group of: device, max_model_len, "):
        EngineConfig.from_mapping({"model": TINY, "runtime": 3})
    with pytest.raises(UserError, match=r"^config: \[\] is not a group of: model, compiler, runt"):
        EngineConfig.from_mapping([])


def test_reference_mode_compiles_nothing():
    assert CompilerOptions(mode="reference").mode == "reference"
    message = r"so compiler.dump_dir, compiler.verify cannot be honoured"
    with pytest.raises(UserError, match=message):
        CompilerOptions(mode="reference", dump_dir="dump", verify=True)
    model, reference = ModelOptions(path="asset://tiny"), CompilerOptions(mode="reference")
    with pytest.raises(UserError, match=r"runtime.async_scheduling=true: .* choose false or null"):
        EngineConfig(model, reference, RuntimeOptions(async_scheduling=True))
    assert EngineConfig(model, reference).runtime.async_scheduling is None


def test_reference_mode_keeps_nothing():
    model, reference = ModelOptions(path="asset://tiny"), CompilerOptions(mode="reference")
    cache = PrefixCacheOptions(snapshot_interval=64, memory_bytes=7, host_memory_bytes=9)
    runtime = RuntimeOptions(prefix_cache=cache, kv_cache_memory_bytes=7, state_dtype="bfloat16")
    message = (
        r"so runtime.kv_cache_memory_bytes, runtime.state_dtype, "
        r"runtime.prefix_cache.snapshot_interval, runtime.prefix_cache.memory_bytes, "
        r"runtime.prefix_cache.host_memory_bytes cannot be honoured; choose compiler.mode=eager"
    )
    with pytest.raises(UserError, match=message):
        EngineConfig(model, reference, runtime)
    assert EngineConfig(model, CompilerOptions(mode="eager"), runtime).runtime == runtime
    off = RuntimeOptions(prefix_cache=PrefixCacheOptions(enabled=False))
    assert EngineConfig(model, reference, off).runtime == off  # which is what it does
