"""Writes `docs/options.md`: every option, from the dataclasses that check them.

    python scripts/options_table.py

Names, defaults and allowed values are the fields', the meaning is the class's docstring. A test
holds the file to what this writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm import presets
from minivllm.config import (
    CompilerOptions,
    ModelOptions,
    OptionGroup,
    PrefixCacheOptions,
    RuntimeOptions,
    described,
    without_none,
)
from minivllm.runtime.sampling_params import SamplingParams

FILE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
GROUPS = (ModelOptions, CompilerOptions, RuntimeOptions, PrefixCacheOptions)
HEAD = """# Options

`key=value` on the command line, lists as `[a,b]`, mappings key by key with a plus
(`+compiler.implementations.linear=torch`). From Python they are the fields of `EngineConfig`'s
groups (`LLM.from_config`), and `null` is None; which of them `LLM` takes as keywords stands in its
docstring. A wrong name or value is an error that lists the choices.

This page is written by `scripts/options_table.py` from the dataclasses in `minivllm/config.py`.
"""
SAMPLING = """
## sampling

The fields of `SamplingParams`, which are vLLM's. The second default is that of the command line.

| option | default | `sampling.*` | |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole file."""
    return HEAD + "".join(_group(cls) for cls in GROUPS) + SAMPLING + "".join(_sampling())


def _group(cls: type[OptionGroup]) -> str:
    lines = [f"\n## {cls.group}\n\n| option | default | values | |\n| --- | --- | --- | --- |\n"]
    hints, meanings = typing.get_type_hints(cls), attributes(cls)
    for field in dataclasses.fields(cls):
        meaning = meanings[field.name]
        optional, kind = without_none(hints[field.name])
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            continue
        if hints[field.name] == tuple[int, ...]:
            values = f"a list of integers >= {field.metadata['at_least']}, such as [0,3]"
        else:
            values = described(field.metadata, kind, optional)
        lines.append(_row(f"{cls.group}.{field.name}", _text(_default(field)), values, meaning))
    return "".join(lines)


def _sampling() -> Iterator[str]:
    given, meanings = presets.read("sampling/default"), attributes(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        defaults = _text(_default(field)), _text(given[field.name])
        yield _row(field.name, defaults[0], f"`{defaults[1]}`", meanings[field.name])


def attributes(cls: type) -> dict[str, str]:
    """The attributes that a class's docstring tells, each with its meaning in one line.

    Raises:
        KeyError: a field that the docstring leaves out.
    """
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    text = text.partition("\n\n")[0]
    meanings: dict[str, str] = {}
    for names, meaning in re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
        for name in names.split(", "):
            meanings[name] = re.sub(r"\s+", " ", meaning).removesuffix(".")
    return {field.name: meanings[field.name] for field in dataclasses.fields(cls)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _text(value: Any) -> str:
    """A default as the command line writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _row(name: str, default: str, third: str, meaning: str) -> str:
    meaning = re.sub(r"\bNone\b", "null", meaning)
    cells = (f"`{name}`", f"`{default}`", third, meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def main() -> int:
    FILE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
