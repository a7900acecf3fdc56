"""The prompts of a run, from the three keys that can hold them.

Owns reading files and standard input, and the checks that need no tokenizer. Does not own
tokenization and length limits: those are the runtime's.

    read_prompts(prompt=None, prompts=["a", [1, 2]], prompt_file=None, default="")  # ['a', [1, 2]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from minivllm.errors import UserError

Prompt = str | list[int]


def read_prompts(
    *, prompt: object, prompts: object, prompt_file: object, default: object
) -> list[Prompt]:
    """The one given of the three keys, else the default, as a list of texts or token ids.

    Raises:
        UserError: more than one key given, a wrong type, an empty prompt, an unreadable file.
    """
    keys = {"prompt": prompt, "prompts": prompts, "prompt_file": prompt_file}
    given = [key for key, value in keys.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give exactly one of prompt, prompts, prompt_file")
    if prompt_file is not None:
        return [_checked("prompt_file", _read(prompt_file))]
    if prompts is not None:
        if not isinstance(prompts, list) or not prompts:
            raise UserError(f"prompts: {prompts!r} is not a list of prompts, such as [Hello,World]")
        return [_checked(f"prompts[{i}]", item) for i, item in enumerate(prompts)]
    if prompt is not None:
        return [_checked("prompt", prompt)]
    return [_checked("default_prompt", default)]


def _read(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise UserError(f"prompt_file: {name!r} is not the name of a file, or - (standard input)")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise UserError(f"prompt_file: cannot read {name!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"prompt_file: {name!r} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _checked(key: str, value: object) -> Prompt:
    if not isinstance(value, (str, list)):
        raise UserError(
            f"{key}: {value!r} is not a text or a list of token ids; "
            f"to have it read as text, quote it twice: '{key.partition('[')[0]}=\"{value}\"'"
        )
    if not value:
        raise UserError(f"{key}: the prompt is empty; give a text or at least one token id")
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise UserError(f"{key}: {item!r} is not a token id (an integer >= 0)")
    else:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{key}: not valid text ({error.reason} at {error.start})") from None
    return value
