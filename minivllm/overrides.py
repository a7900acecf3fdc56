"""The command line between the user and Hydra: what is quoted for them, and what went wrong.

Owns the rewriting of arguments before Hydra's grammar reads them, and the plain words for what it
refuses. Does not own the parsing itself and never imports Hydra: it works on strings.

    arguments = prepare(["prompt=你好", "-m"])         # ['-m', 'prompt="你好"']
    explain("Could not override 'foo'…", ["foo=1"])   # "foo=1: no such key; choices: …"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm import config, presets

GROUPS = ("model", "compiler", "runtime", "sampling")
OPEN_MAPPINGS = ("model.architecture.", "compiler.implementations.")
QUOTING = (
    "a text with any of , ' \" { } [ ] ( ) = ! # < > or a line break needs quotes for Hydra inside "
    "those of the shell, as in 'prompt=\"Hello, world\"'; or put it in a file: prompt_file=FILE "
    "(- is standard input)"
)

# A quoted string (kept), or a run free of Hydra's structural characters.
_PIECES = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|([^,\[\](){}="'\\]+)""", re.DOTALL)


def prepare(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra can read them.

    Flags come first, since argparse takes no flag between two overrides; and unquoted values
    that are not ASCII get quotes, since Hydra's grammar knows ASCII letters only. Commas and
    brackets keep their meaning: `prompts=[你好,世界]` is a list of two.
    """
    overrides = [
        text
        for text in arguments
        if not text.startswith("-") and ("=" in text or text.startswith("~"))
    ]
    flags = [text for text in arguments if text not in overrides]
    return flags + [quote_non_ascii(text) for text in overrides]


def quote_non_ascii(override: str) -> str:
    """`key=value` with every unquoted non-ASCII run of the value in double quotes."""
    key, equals, value = override.partition("=")

    def quoted(piece: re.Match[str]) -> str:
        text = piece[0]
        if piece[1] is not None or text.isascii():
            return text
        inner = text.strip(" \t\r\n")
        return text.replace(inner, f'"{inner}"', 1)

    # Hydra trims unquoted values, and takes no blank before a quote.
    return override if override.isascii() else key + equals + _PIECES.sub(quoted, value).strip(" ")


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether Hydra will run several jobs."""
    return any(a in ("-m", "--multirun") or a.startswith("hydra.mode=") for a in arguments)


def check_top_level(settings: Mapping[str, Any]) -> None:
    """Raises UserError for a key that was added (`+key=…`) beside the groups and prompt keys."""
    for key, value in settings.items():
        if key not in _top_level():
            raise config.unknown_key(key, value, _top_level())


def explain(message: str, arguments: Sequence[str], unreadable: str | None = None) -> str:
    """What is wrong with the command line, in one message.

    Args:
        message: Hydra's own.
        arguments: as the user typed them.
        unreadable: the prepared argument that Hydra's grammar rejected, if it was that.
    """
    if unreadable is not None:
        typed = _typed(unreadable, arguments)
        if "=" not in typed:
            return f"{typed!r} is neither a flag nor key=value; --help shows the keys"
        return f"cannot read {typed!r}: {QUOTING}"
    if match := re.search(r"Ambiguous value for argument '(.*?)'\n", message, re.DOTALL):
        typed = _typed(match[1], arguments)
        return f"{typed!r} reads as several values, which only -m takes: {QUOTING}"
    if match := re.search(r"Multiple values for (\w+)\.|^(\w+) appears more than once", message):
        group = match[1] or match[2]
        return f"{group}: given more than once; to run each, write -m +{group}=A,B"
    if message.startswith("Config group override must be a string"):
        return f"a group takes the name of one of its files: {no_model()}"
    if match := re.search(r"Could not find '([^'/]+)/([^']*)'", message):
        return _unknown_choice(match[1], match[2])
    if match := re.search(r"Could not override '([^']+)'", message):
        return _unknown_override(match[1], arguments)
    if match := re.search(r"An item is already at '([^']+)'", message):
        value = _value(match[1], arguments)
        return f"+{match[1]}={value}: the key exists already: write {match[1]}={value}"
    return re.split(r"\n?(?:Config search path|See https)", message)[0].strip()


def no_model() -> str:
    """The message for a command line that names no model."""
    return f"no model given: add +model=NAME, one of: {', '.join(presets.choices('model'))}"


def _unknown_choice(group: str, name: str) -> str:
    text = f"{group}: {name!r} is not one of: {', '.join(presets.choices(group))}"
    if group == "model":
        text += "; for a folder or a hub id write +model.path=…"
    return text


def _unknown_override(key: str, arguments: Sequence[str]) -> str:
    value = _value(key, arguments)
    group, _, name = key.partition(".")
    if group == "model" and not any(text.startswith("+model=") for text in arguments):
        if not name and value in presets.choices("model"):
            return f"model={value}: no model is chosen by default: write +model={value}"
        return _unknown_choice("model", value) if not name else f"{key}={value}: {no_model()}"
    if key.startswith(OPEN_MAPPINGS):
        return f"{key}={value}: no such key yet: to add it, write +{key}={value}"
    if f"{key}." in OPEN_MAPPINGS:
        return f"{key}={value}: to add a key to it, write +{key}.KEY=VALUE"
    if group in GROUPS and name:
        known = presets.read(f"{group}/{presets.choices(group)[0]}")
        return str(config.unknown_key(key, value, known))
    if group == "hydra":
        return f"{key}={value}: no such key of Hydra; --hydra-help lists its own"
    return str(config.unknown_key(key, value, _top_level()))


def _top_level() -> list[str]:
    keys = [name for name in presets.read("config") if name not in ("defaults", "hydra")]
    return [*keys, *GROUPS]


def _typed(prepared: str, arguments: Sequence[str]) -> str:
    """The argument as the user typed it, from the form that Hydra saw."""
    return next((text for text in arguments if quote_non_ascii(text) == prepared), prepared)


def _value(key: str, arguments: Sequence[str]) -> str:
    for text in arguments:
        name, equals, value = text.partition("=")
        if equals and name.lstrip("+") == key:
            return value
    return ""
