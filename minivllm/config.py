"""The options, as frozen dataclasses: what the Hydra groups and the keywords of `LLM` both set.

Owns names, defaults, types and ranges. Does not own what an option means for a given machine or
checkpoint (`auto` is resolved by the engine) nor the pass and implementation names (the compiler
knows those). Imports neither torch nor Hydra.

    config = EngineConfig.from_mapping({"model": {"path": "asset://tiny"}, "runtime": {"seed": 1}})
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from minivllm.errors import UserError

T = TypeVar("T", bound="OptionGroup")


def option(
    default: Any = dataclasses.MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    choices: tuple[str, ...] = (),
    pattern: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    multiple_of: int = 1,
) -> Any:
    """A dataclass field with the values that it takes.

    Args:
        default, factory: the default, or what makes one.
        choices: the allowed strings, as printed; with `pattern` they only describe it.
        pattern: a regular expression that an allowed string matches as a whole.
        at_least, above, at_most: bounds of a number.
        multiple_of: of what an integer must be a multiple.
    """
    metadata = {
        "choices": choices,
        "pattern": pattern,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "multiple_of": multiple_of,
    }
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OptionGroup:
    """Base of a group: checks every field's type and range, and turns lists into tuples."""

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked(f"{self.group}.{field.name}", getattr(self, field.name), field, hints)
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_mapping(cls: type[T], data: object) -> T:
        """The group from a plain mapping; absent keys keep their defaults.

        Raises:
            UserError: not a mapping, an unknown key, a wrong type or a value out of range.
        """
        hints = typing.get_type_hints(cls)
        values = _known_keys(cls.group, data, [field.name for field in dataclasses.fields(cls)])
        for name, value in values.items():
            if _is_group(hints[name]):
                values[name] = hints[name].from_mapping(value)
        return cls(**values)


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Which model, and how its weights are loaded.

    Attributes:
        name: what to call it in messages.
        path: a folder, `asset://NAME` (shipped with the package) or a Hugging Face hub id.
        revision: branch, tag or commit on the hub.
        tokenizer: a folder or hub id; None: the model's own.
        dtype: of weights and activations; auto: the checkpoint's on CUDA, float32 on CPU.
        load_format: dummy: seeded random weights; auto: safetensors.
        seed: of dummy weights.
        skip_tokenizer_init: prompts are token ids, and outputs carry no text.
        architecture: a Hugging Face `config.json` as a mapping, for dummy weights without a folder.
    """

    group: ClassVar[str] = "model"

    name: str = option("custom")
    path: str | None = option(None)
    revision: str | None = option(None)
    tokenizer: str | None = option(None)
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16", "float16"))
    load_format: str = option("auto", choices=("auto", "safetensors", "dummy"))
    seed: int = option(0, at_least=0, at_most=2**63 - 1)
    skip_tokenizer_init: bool = option(False)
    architecture: Mapping[str, Any] | None = option(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None and self.load_format != "dummy":
            raise UserError(
                "model.path: none given; name a folder, asset://tiny or a Hugging Face hub id, "
                "or take random weights: model.load_format=dummy with model.architecture"
            )
        if self.path is None and self.architecture is None:
            raise UserError(
                "model.load_format=dummy needs a shape: model.architecture "
                "(a config.json as a mapping), or a model.path whose config.json tells it"
            )


@dataclass(frozen=True)
class CompilerOptions(OptionGroup):
    """How the traced graph becomes what runs.

    Attributes:
        mode: reference: the plain model on the whole sequence; eager: the graph after the
            mandatory lowering; compiled: after every pass.
        dump_dir: a folder for one text file a pass, their differences and a report; None: no dumps.
        dump_layers: the layers that are dumped; empty: all, and in the report each kind once.
        verify: compare each stage of the graphs with the plain model.
        explain: name of a pass whose matches and near misses are printed.
        bisect: numerics: print each stage's difference from the plain model, and which pass is the
            first that leaves the tolerance; speed: the time of a decode step after each pass, and
            which one is the first that makes it slower.
        measure: for `inspect`, with weights: run the planned steps, and put the measured time of
            each call beside what it must move at least.
        extra_passes: passes of your own, as `module:Class`; docs/writing_a_pass.md.
        disable: names of passes to leave out.
        stop_after: name of the last pass to run.
        implementations: op name -> the implementation it must use.
        cache_dir: a folder that keeps finished graphs for the next start of the same model; None:
            minivllm in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`); off: none are
            read or kept.
    """

    group: ClassVar[str] = "compiler"

    mode: str = option("compiled", choices=("reference", "eager", "compiled"))
    dump_dir: str | None = option(None)
    dump_layers: tuple[int, ...] = option((), at_least=0)
    verify: bool = option(False)
    explain: str | None = option(None)
    bisect: str | None = option(None, choices=("numerics", "speed"))
    measure: bool = option(False)
    extra_passes: tuple[str, ...] = option(())
    disable: tuple[str, ...] = option(())
    stop_after: str | None = option(None)
    implementations: Mapping[str, str] = option(factory=dict)
    cache_dir: str | None = option(None, choices=("off", "a folder"), pattern=".+")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "reference":
            names = [f.name for f in dataclasses.fields(self) if f.name != "mode"]
            given = [f"compiler.{name}" for name in names if getattr(self, name)]
            if given:
                raise UserError(
                    f"compiler.mode='reference' compiles nothing, so {', '.join(given)} cannot be "
                    "honoured; choose compiler.mode=eager or compiled"
                )
        if self.dump_layers and self.dump_dir is None:
            raise UserError(
                f"compiler.dump_layers={list(self.dump_layers)} bounds what compiler.dump_dir "
                "holds, and there is none; name a folder: compiler.dump_dir=dump"
            )
        if self.verify and self.bisect == "numerics":
            raise UserError(
                "compiler.verify stops at the first stage that compiler.bisect=numerics would "
                "print with the others; choose one of the two"
            )


@dataclass(frozen=True)
class PrefixCacheOptions(OptionGroup):
    """What is kept of finished and running requests for later ones that begin alike.

    Attributes:
        enabled: whether anything is kept.
        snapshot_interval: keep a snapshot of the states every so many tokens of a prompt and of
            its output, beside those at prompts' ends and where prompts part; a multiple of 64.
        memory_bytes: of device memory for snapshots; None: a share of what is free.
        host_memory_bytes: of page-locked host memory for snapshots that the device has no room for.
    """

    group: ClassVar[str] = "runtime.prefix_cache"

    enabled: bool = option(True)
    snapshot_interval: int = option(2048, at_least=64, multiple_of=64)
    memory_bytes: int | None = option(None, at_least=0)
    host_memory_bytes: int = option(0, at_least=0)


@dataclass(frozen=True)
class RuntimeOptions(OptionGroup):
    """Device, memory and limits of a run.

    Attributes:
        device: auto: CUDA if there is one, else CPU.
        max_model_len: longest sequence, prompt and output, in tokens; None: the model's own.
        max_num_seqs: most sequences that run at once; fewer if the memory holds fewer.
        max_num_batched_tokens: most tokens of prompts in one step; longer prompts run in chunks.
        gpu_memory_utilization: share of the free GPU memory that is used, in (0, 1].
        kv_cache_memory_bytes: size of the KV cache in bytes; None: from the share above.
        prefix_cache: a group of its own.
        cuda_graph: capture decode steps and short prefills on a GPU in compiled mode.
        async_scheduling: launch a step before the last one's tokens are seen; None: on a GPU.
        check_integrity: check the pools' books whenever nothing runs, and every decode step's
            inputs; slow, for tests.
        state_dtype: of the recurrent state; auto: the checkpoint's `mamba_ssm_dtype`, else float32.
            In bfloat16 a cache hit starts from a rounded state, which a prefill in one piece never
            rounds.
        num_threads: threads of an op on a CPU; None: 1 for a model of few weights, else torch's.
        seed: base of the sampling seeds of requests that bring none.
        profile: a folder for a trace of some steps, and a table of their time by kernel (on a CPU
            by op); None: no profile.
        profile_steps: that are traced.
        profile_skip: steps before them, which warm up.
    """

    group: ClassVar[str] = "runtime"

    device: str = option(
        "auto", choices=("auto", "cpu", "cuda", "cuda:N"), pattern=r"auto|cpu|cuda(:\d+)?"
    )
    max_model_len: int | None = option(None, at_least=1)
    max_num_seqs: int = option(256, at_least=1)
    max_num_batched_tokens: int = option(8192, at_least=1)
    gpu_memory_utilization: float = option(0.9, above=0, at_most=1)
    kv_cache_memory_bytes: int | None = option(None, at_least=1)
    prefix_cache: PrefixCacheOptions = option(factory=PrefixCacheOptions)
    cuda_graph: bool = option(True)
    async_scheduling: bool | None = option(None)
    check_integrity: bool = option(False)
    state_dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    num_threads: int | None = option(None, at_least=1, at_most=512)
    seed: int = option(0, at_least=0, at_most=2**63 - 1)
    profile: str | None = option(None)
    profile_steps: int = option(20, at_least=1)
    profile_skip: int = option(10, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("profile_") and value != field.default and not self.profile:
                raise UserError(
                    f"runtime.{field.name}={value} says which steps runtime.profile records, and "
                    "it names no folder; name one: runtime.profile=profile"
                )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelOptions
    compiler: CompilerOptions = dataclasses.field(default_factory=CompilerOptions)
    runtime: RuntimeOptions = dataclasses.field(default_factory=RuntimeOptions)

    def __post_init__(self) -> None:
        if self.compiler.mode == "reference" and self.runtime.async_scheduling:
            raise UserError(
                "runtime.async_scheduling=true: compiler.mode='reference' begins every step with "
                "the whole sequence, so it must have seen it; choose false or null, or another mode"
            )
        if self.compiler.mode == "reference":
            given = _changed(self.runtime, "kv_cache_memory_bytes", "state_dtype") + _changed(
                self.runtime.prefix_cache, "snapshot_interval", "memory_bytes", "host_memory_bytes"
            )
            if given:
                raise UserError(
                    "compiler.mode='reference' keeps no KV cache, no states and no prefix cache, "
                    f"so {', '.join(given)} cannot be honoured; choose compiler.mode=eager or "
                    "compiled"
                )

    @classmethod
    def from_mapping(cls, data: object) -> EngineConfig:
        """The config from nested plain mappings, one a group; absent groups keep their defaults.

        Raises:
            UserError: an unknown group or key, a wrong type or a value out of range.
        """
        groups = _known_keys("", data, [field.name for field in dataclasses.fields(cls)])
        return cls(
            model=ModelOptions.from_mapping(groups.get("model", {})),
            compiler=CompilerOptions.from_mapping(groups.get("compiler", {})),
            runtime=RuntimeOptions.from_mapping(groups.get("runtime", {})),
        )


def unknown_key(key: str, value: object, choices: Collection[str]) -> UserError:
    """The error for a dotted key that does not exist, with the nearest name and all choices."""
    near = difflib.get_close_matches(key.rpartition(".")[2], choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"{key}={value}: no such key; {hint}choices: {', '.join(sorted(choices))}")


def _changed(options: OptionGroup, *names: str) -> list[str]:
    """Those options, with their groups, that are not as they are by default."""
    default = type(options)()
    return [f"{options.group}.{n}" for n in names if getattr(options, n) != getattr(default, n)]


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, OptionGroup)


def _known_keys(group: str, data: object, names: Collection[str]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise UserError(f"{group or 'config'}: {data!r} is not a group of: {', '.join(names)}")
    for key, value in data.items():
        if key not in names:
            raise unknown_key(f"{group}.{key}" if group else str(key), value, names)
    return dict(data)


def _checked(key: str, value: Any, field: dataclasses.Field[Any], hints: Mapping[str, Any]) -> Any:
    rule = field.metadata
    if _is_group(hints[field.name]):
        if not isinstance(value, hints[field.name]):
            raise UserError(f"{key}: {value!r} is not a {hints[field.name].__name__}")
        return value
    optional, kind = without_none(hints[field.name])
    if value is None and optional:
        return None
    if hints[field.name] == tuple[int, ...]:
        return _checked_integers(key, value, rule)
    try:
        value = _converted(value, kind)
    except TypeError:
        raise UserError(f"{key}: {value!r} is not {described(rule, kind, optional)}") from None
    allowed = True
    if kind is str:
        pattern = rule["pattern"] or "|".join(rule["choices"]) or ".+"
        allowed = re.fullmatch(pattern, value, re.DOTALL) is not None
    elif kind in (int, float):
        low, above, high = rule["at_least"], rule["above"], rule["at_most"]
        allowed = (
            math.isfinite(value)
            and (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
            and (kind is float or value % rule["multiple_of"] == 0)
        )
    if not allowed:
        raise UserError(f"{key}: {value!r} is not {described(rule, kind, optional)}")
    return value


def _checked_integers(key: str, value: Any, rule: Mapping[str, Any]) -> tuple[int, ...]:
    integers = isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    if not integers or any(item < rule["at_least"] for item in value):
        described = f"a list of integers >= {rule['at_least']}, such as [0,3]"
        raise UserError(f"{key}: {value!r} is not {described}")
    return tuple(value)


def without_none(hint: Any) -> tuple[bool, Any]:
    """Whether None is allowed, and the type beside it (`tuple`, `Mapping` without arguments)."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [part for part in parts if part is not type(None)]
    assert len(kinds) == 1, hint
    return len(parts) > 1, typing.get_origin(kinds[0]) or kinds[0]


def _converted(value: Any, kind: Any) -> Any:
    """`value` as `kind`; TypeError if it is something else (true is no number, text no list)."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, (list, tuple)):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    elif kind is Mapping and isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return dict(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise TypeError(kind)


def described(rule: Mapping[str, Any], kind: Any, optional: bool) -> str:
    """The values that a field takes, in words: `an integer >= 1 or null`."""
    if rule["choices"]:
        text = "one of: " + ", ".join(rule["choices"])
    elif kind in (int, float):
        bounds = [
            f"{sign} {rule[bound]}"
            for sign, bound in ((">=", "at_least"), (">", "above"), ("<=", "at_most"))
            if rule[bound] is not None
        ]
        noun = "an integer" if kind is int else "a number"
        if rule["multiple_of"] > 1:
            bounds.append(f"a multiple of {rule['multiple_of']}")
        text = f"{noun} {' and '.join(bounds)}".rstrip()
    else:
        text = {
            str: "a text of at least one character",
            bool: "true or false",
            tuple: "a list of names, such as [a,b]",
            Mapping: "a mapping of names, such as {a:b}",
        }[kind]
    return text + (" or null" if optional else "")
