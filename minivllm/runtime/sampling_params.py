"""How one request is sampled and when it ends: `SamplingParams`, with vLLM's names and defaults.

Owns the fields, their defaults and their ranges. Does not own what is done with them (`sampler`
draws, `stop` ends a request). Imports neither torch nor transformers.

    SamplingParams(temperature=0.7, top_p=0.95, max_tokens=64, stop=["\\n\\n"])
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config import unknown_key
from minivllm.errors import UserError

GROUP = "sampling"
GREEDY_BELOW = 1e-5
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_BIAS = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    Attributes:
        n: completions a prompt, each with draws of its own.
        temperature: divides the logits; below 1e-5 the request is greedy.
        top_p: smallest set of most probable tokens whose probability reaches it, in (0, 1].
        top_k: this many most probable tokens; 0 or -1: all.
        min_p: least probability relative to the most probable token's, in [0, 1].
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of the
            tokens of prompt and output; > 0.
        presence_penalty: taken from the logits of the output's tokens, in [-2, 2].
        frequency_penalty: as presence, times how often the token is in the output, in [-2, 2].
        logit_bias: token id (or its digits, as JSON has it) to what is added to its logit, in
            [-100, 100]; kept as a dict, by id.
        seed: of this request's draws; None (or -1): derived from the engine's.
        max_tokens: most tokens to generate; None: up to the engine's `max_model_len`.
        min_tokens: until so many are generated no end-of-text token and none of `stop_token_ids`
            can be drawn, and a stop text that is complete by then does not count.
        stop: a text or texts that end the request; kept as a tuple.
        stop_token_ids: token ids that end it, beside the model's own; kept as a tuple.
        ignore_eos: go on after the model's end-of-text tokens.
        include_stop_str_in_output: leave the stop text (or stop token) in the output text.
        skip_special_tokens: leave special tokens out of the output text.
        logprobs: with each output token come its logprob and those of this many most probable
            ones, 0 to 20; None: none.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        UserError: a value of a wrong type or out of range; names it and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        values: dict[str, object] = {
            "n": _integer("n", self.n, 1),
            "temperature": _number("temperature", self.temperature, 0.0, math.inf),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, above=True),
            "top_k": _integer("top_k", self.top_k, -1),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True
            ),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": _bias(self.logit_bias),
            "seed": None if self.seed is None else _integer("seed", self.seed, -1, MAX_SEED),
            "max_tokens": None,
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_ids(self.stop_token_ids),
            "logprobs": _count("logprobs", self.logprobs),
            "prompt_logprobs": _count("prompt_logprobs", self.prompt_logprobs),
        }
        if self.max_tokens is not None:
            values["max_tokens"] = _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise UserError(
                    f"min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
                )
        if values["seed"] == -1:
            values["seed"] = None
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r}: must be true or false")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, whatever the other fields say."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether the tokens so far change the logits of the next."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @classmethod
    def from_mapping(cls, data: object) -> SamplingParams:
        """The parameters from the plain mapping of the `sampling` group; absent keys: defaults.

        Raises:
            UserError: not a mapping, an unknown key, or a bad value; names `sampling.<key>`.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, Mapping):
            raise UserError(f"{GROUP}: {data!r} is not a group of: {', '.join(names)}")
        for key, value in data.items():
            if key not in names:
                raise unknown_key(f"{GROUP}.{key}", value, names)
        try:
            return cls(**data)
        except UserError as error:
            raise UserError(f"{GROUP}.{error}") from None


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    span = f">= {low}" if high is None else f"from {low} to {high}"
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    raise UserError(f"{name}={value!r}: must be an integer {span}")


def _count(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 0, MAX_LOGPROBS)


def _number(name: str, value: Any, low: float, high: float, above: bool = False) -> float:
    least = ">" if above else ">="
    span = (
        f"{least} {low:g}" if high == math.inf else f"in {'(' if above else '['}{low:g}, {high:g}]"
    )
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number) and low <= number <= high and not (above and number == low):
            return number
    raise UserError(f"{name}={value!r}: must be a finite number {span}")


def _bias(value: Any) -> dict[int, float]:
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise UserError(f"logit_bias={value!r}: must be a mapping of token ids to numbers")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        token_id = _integer("logit_bias", number, 0)
        if token_id in biases:
            raise UserError(f"logit_bias={value!r}: token id {token_id} comes twice")
        biases[token_id] = _number(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
    return dict(sorted(biases.items()))


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise UserError(f"stop={value!r}: must be a text, or a list of texts, none of them empty")
    return tuple(strings)


def _stop_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else value
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise UserError(f"stop_token_ids={value!r}: must be a list of token ids, each >= 0")
    return tuple(_integer("stop_token_ids", item, 0) for item in ids)
