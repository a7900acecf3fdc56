"""`docs/options.md` says what the dataclasses say, and those say it of every field."""

from __future__ import annotations

import dataclasses
import re

import pytest

from minivllm import presets
from minivllm.config import CompilerOptions, OptionGroup
from minivllm.runtime.sampling_params import SamplingParams
from scripts.options_table import FILE, GROUPS, attributes, page

TEXT = FILE.read_text(encoding="utf-8")


def test_the_page_is_as_it_would_be_written() -> None:
    assert page() == TEXT, "python scripts/options_table.py writes it anew"


@pytest.mark.parametrize("cls", GROUPS, ids=lambda cls: cls.group)
def test_each_option_has_a_row_and_a_meaning(cls: type[OptionGroup]) -> None:
    section = TEXT.partition(f"\n## {cls.group}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    names = [f.name for f in dataclasses.fields(cls) if f.name != "prefix_cache"]
    assert [name for name, _, _, _ in rows] == [f"{cls.group}.{name}" for name in names]
    file = presets.read(f"{cls.group.partition('.')[0]}/default") if cls.group != "model" else {}
    given = file.get("prefix_cache", {}) if "." in cls.group else file
    for name, default, _, meaning in rows:
        key = name.removeprefix(f"{cls.group}.")
        if key in given:  # the YAML file says the same
            shown = {"null": None, "true": True, "false": False, "[]": [], "{}": {}}
            assert str(shown.get(default, default)) == str(given[key])
        assert len(meaning) > 10


def test_rows_of_the_compiler() -> None:
    assert "| `compiler.mode` | `compiled` | one of: reference, eager, compiled | refere" in TEXT
    assert "| `compiler.dump_layers` | `[]` | a list of integers >= 0, such as [0,3] | the " in TEXT
    assert "| `compiler.extra_passes` | `[]` | a list of names, such as [a,b] | passes of " in TEXT
    assert "| `compiler.bisect` | `null` | one of: numerics, speed or null | numerics: " in TEXT
    assert "| `temperature` | `1.0` | `0.0` | divides the logits; below 1e-5 the request " in TEXT


def test_a_field_without_a_word_is_an_error() -> None:
    @dataclasses.dataclass(frozen=True)
    class More(CompilerOptions):
        """As before.

        Attributes:
            mode: how.
        """

    with pytest.raises(KeyError, match="dump_dir"):
        attributes(More)
    assert set(attributes(SamplingParams)) == {f.name for f in dataclasses.fields(SamplingParams)}
