"""SamplingParams: vLLM's defaults, every range, and the mapping of the `sampling` group."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from minivllm.errors import UserError
from minivllm.runtime.sampling_params import SamplingParams


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
    }


def test_values_are_kept_and_normalised() -> None:
    params = SamplingParams(
        temperature=1, top_k=-1, seed=2**64 - 1, max_tokens=None, stop="a", stop_token_ids=[3, 4]
    )
    assert (params.temperature, type(params.temperature)) == (1.0, float)
    assert (params.top_k, params.seed, params.max_tokens) == (-1, 2**64 - 1, None)
    assert (params.stop, params.stop_token_ids) == (("a",), (3, 4))
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")
    assert SamplingParams(seed=-1).seed is None  # as in vLLM
    assert hash(params) == hash(dataclasses.replace(params))


def test_logit_bias_is_kept_by_id() -> None:
    given = {"7": 1, 3: -100.0, "0": 0.5}  # texts as YAML and JSON have them
    params = SamplingParams(logit_bias=given)  # type: ignore[arg-type]
    given["9"] = 1
    assert params.logit_bias == {0: 0.5, 3: -100.0, 7: 1.0}
    assert list(params.logit_bias) == [0, 3, 7]
    assert isinstance(params.logit_bias[7], float)
    again = dataclasses.replace(params, top_k=3)
    assert again.logit_bias == params.logit_bias
    assert params == SamplingParams(logit_bias={0: 0.5, 3: -100.0, 7: 1.0}) != SamplingParams()
    assert hash(params) == hash(dataclasses.replace(params))
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_penalties_counts_and_completions_in_range() -> None:
    for fields in (
        {"n": 16384},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 50},
        {"presence_penalty": -2},
        {"frequency_penalty": 2.0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 20},
        {"min_tokens": 16},
        {"min_tokens": 99, "max_tokens": None},
    ):
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        assert dataclasses.asdict(params) == dataclasses.asdict(SamplingParams()) | fields
    assert not SamplingParams(logit_bias={1: 1.0}).penalized
    for name, value in (("repetition", 1.1), ("presence", -0.1), ("frequency", 0.1)):
        assert SamplingParams(**{f"{name}_penalty": value}).penalized  # type: ignore[arg-type]


def test_greedy_below_a_threshold() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6, top_k=5).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n", 0, "an integer >= 1"),
        ("n", 1.5, "an integer >= 1"),
        ("n", True, "an integer >= 1"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", float("nan"), ">= 0"),
        ("temperature", float("inf"), ">= 0"),
        ("temperature", "hot", ">= 0"),
        ("temperature", True, ">= 0"),
        ("temperature", None, ">= 0"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.01, "in (0, 1]"),
        ("top_k", -2, ">= -1"),
        ("top_k", 1.5, ">= -1"),
        ("min_p", -0.1, "in [0, 1]"),
        ("min_p", 1.1, "in [0, 1]"),
        ("repetition_penalty", 0.0, "a finite number > 0"),
        ("repetition_penalty", -1.0, "a finite number > 0"),
        ("repetition_penalty", float("inf"), "a finite number > 0"),
        ("repetition_penalty", None, "a finite number > 0"),
        ("presence_penalty", 2.1, "in [-2, 2]"),
        ("presence_penalty", "a", "in [-2, 2]"),
        ("frequency_penalty", -2.1, "in [-2, 2]"),
        ("frequency_penalty", float("nan"), "in [-2, 2]"),
        ("logit_bias", 5, "a mapping of token ids to numbers"),
        ("logit_bias", [1], "a mapping of token ids to numbers"),
        ("logit_bias", {-1: 1.0}, "an integer >= 0"),
        ("logit_bias", {"a": 1.0}, "an integer >= 0"),
        ("logit_bias", {1.0: 1.0}, "an integer >= 0"),
        ("logit_bias", {True: 1.0}, "an integer >= 0"),
        ("logit_bias", {1: 1.0, "1": 2.0}, "token id 1 comes twice"),
        ("logprobs", -1, "from 0 to 20"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", True, "from 0 to 20"),
        ("logprobs", 1.0, "from 0 to 20"),
        ("prompt_logprobs", -1, "from 0 to 20"),
        ("prompt_logprobs", "5", "from 0 to 20"),
        ("min_tokens", -1, ">= 0"),
        ("min_tokens", 1.0, ">= 0"),
        ("min_tokens", True, ">= 0"),
        ("min_tokens", 17, "at most max_tokens=16"),
        ("seed", -2, "from -1 to 18446744073709551615"),
        ("seed", 2**64, "from -1 to 18446744073709551615"),
        ("seed", 0.5, "an integer"),
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", True, ">= 1"),
        ("max_tokens", 1.0, ">= 1"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", [1], "a list of texts"),
        ("stop", 1, "a list of texts"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", [-1], "an integer >= 0"),
        ("stop_token_ids", ["a"], "an integer >= 0"),
        ("ignore_eos", 1, "true or false"),
        ("include_stop_str_in_output", None, "true or false"),
        ("skip_special_tokens", "yes", "true or false"),
    ],
)
def test_bad_values_are_named(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(UserError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(f"{name}=")
    assert allowed in str(error.value)
    with pytest.raises(UserError) as error:
        SamplingParams.from_mapping({name: value})
    assert str(error.value).startswith(f"sampling.{name}=")


@pytest.mark.parametrize("bias", [-100.5, 101, float("nan"), "a", None, True])
def test_a_bad_bias_is_named_with_its_token(bias: Any) -> None:
    with pytest.raises(UserError, match=r"^logit_bias\[12\]=.*in \[-100, 100\]"):
        SamplingParams(logit_bias={3: 0.0, "12": bias})  # type: ignore[dict-item]


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_from_mapping() -> None:
    params = SamplingParams.from_mapping({"temperature": 0.5, "stop": ["x"], "max_tokens": 64})
    assert params == SamplingParams(temperature=0.5, stop="x", max_tokens=64)
    assert SamplingParams.from_mapping({}) == SamplingParams()


def test_from_mapping_unknown_key() -> None:
    with pytest.raises(UserError, match=r"sampling\.temprature=1.*'temperature'.*top_k"):
        SamplingParams.from_mapping({"temprature": 1})
    with pytest.raises(UserError, match="sampling: 3 is not a group of: n, temperature"):
        SamplingParams.from_mapping(3)
