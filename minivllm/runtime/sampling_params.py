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


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    Attributes:
        n: completions a prompt; only 1 so far.
        temperature: divides the logits; below 1e-5 the request is greedy.
        top_p: smallest set of most probable tokens whose probability reaches it, in (0, 1].
        top_k: this many most probable tokens; 0 or -1: all.
        min_p: least probability relative to the most probable token's, in [0, 1].
        seed: of this request's draws; None (or -1): derived from the engine's.
        max_tokens: most tokens to generate; None: up to the engine's `max_model_len`.
        stop: a text or texts that end the request; kept as a tuple.
        stop_token_ids: token ids that end it, beside the model's own; kept as a tuple.
        ignore_eos: go on after the model's end-of-text tokens.
        include_stop_str_in_output: leave the stop text (or stop token) in the output text.
        skip_special_tokens: leave special tokens out of the output text.

    Raises:
        UserError: a value of a wrong type or out of range; names it and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if _integer("n", self.n, 1) != 1:
            raise UserError(f"n={self.n}: only n=1 is available so far; send the prompt n times")
        values: dict[str, object] = {
            "n": 1,
            "temperature": _number("temperature", self.temperature, 0.0, math.inf),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, above=True),
            "top_k": _integer("top_k", self.top_k, -1),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "seed": None if self.seed is None else _integer("seed", self.seed, -1, MAX_SEED),
            "max_tokens": self.max_tokens,
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_ids(self.stop_token_ids),
        }
        if self.max_tokens is not None:
            values["max_tokens"] = _integer("max_tokens", self.max_tokens, 1)
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


def _number(name: str, value: Any, low: float, high: float, above: bool = False) -> float:
    span = f">= {low:g}" if high == math.inf else f"in {'(' if above else '['}{low:g}, {high:g}]"
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number) and low <= number <= high and not (above and number == low):
            return number
    raise UserError(f"{name}={value!r}: must be a finite number {span}")


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
