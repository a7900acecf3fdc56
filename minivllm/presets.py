"""The YAML files under `conf/`, for whoever is not Hydra: where they are and what they hold.

Owns the folder's place (beside the package in a clone, inside it in a wheel) and reading a model's
preset, so that `LLM(model="tiny")` and `+model=tiny` mean the same. Does not own composition and
overrides: those are Hydra's, in `minivllm.run`.

    model_preset("tiny").path  # 'asset://tiny'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from minivllm.config import ModelOptions
from minivllm.errors import UserError


def conf_dir() -> Path:
    """The absolute folder of the YAML files: `minivllm/conf` if installed, else the clone's."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def choices(group: str) -> list[str]:
    """The names of a group's files, sorted; empty if there is no such group."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def read(name: str) -> dict[str, Any]:
    """One file as it stands, without composition: `config`, `model/tiny`, `runtime/default`, …"""
    data = yaml.safe_load((conf_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(data, dict), name
    return data


def model_preset(name: str) -> ModelOptions:
    """The options of `conf/model/{name}.yaml`.

    Raises:
        UserError: no such preset; the message lists the names.
    """
    if name not in choices("model"):
        raise UserError(f"model: {name!r} is not one of: {', '.join(choices('model'))}")
    return ModelOptions.from_mapping(read(f"model/{name}"))
