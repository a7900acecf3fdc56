"""The files of a checkpoint folder: config.json, generation_config.json and safetensors headers.

Owns which files hold the weights and what each is said to hold. Owns no names of the model's
parameters and reads no tensor data: `weights` does.

    config = load_config(folder); stored = stored_tensors(folder)["lm_head.weight"].shape
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from minivllm.errors import UserError
from minivllm.model.config import MiniQwenConfig
from minivllm.model.hf_config import eos_token_ids

logger = logging.getLogger(__name__)

WAYS_OUT = (
    "Ways out: model.path=<folder with config.json and *.safetensors>, "
    "model.path=<owner/name on the Hugging Face hub>, or model.load_format=dummy (random weights)"
)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says of one tensor; `dtype` is its name there, e.g. "BF16"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_config(folder: Path) -> MiniQwenConfig:
    """The architecture of the checkpoint in `folder`.

    EOS ids are those of config.json and of generation_config.json together. Where the folder holds
    weights, they decide whether the head is tied (no `lm_head.weight`: tied), since composite
    configs state it unreliably. Raises UserError for files that are missing or unreadable.
    """
    _check_folder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json. {WAYS_OUT}")
    data = _read_json(path)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    try:
        config = MiniQwenConfig.from_hf(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    try:
        eos = eos_token_ids({"eos_token_id": config.eos_token_ids}, generation)
    except UserError as error:
        raise UserError(f"{generation_path}: {error}") from error
    names = _stored_names(folder)
    tied = config.tie_word_embeddings if names is None else "lm_head.weight" not in names
    if tied != config.tie_word_embeddings:
        logger.warning(
            "%s: tie_word_embeddings=%s, but the weights %s an lm_head: the head is %s",
            path,
            config.tie_word_embeddings,
            "lack" if tied else "have",
            "tied" if tied else "not tied",
        )
    return replace(config, eos_token_ids=eos, tie_word_embeddings=tied)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name, place, shape and dtype of every tensor in the folder's safetensors files.

    Reads headers only. Raises UserError for a missing folder, no safetensors, a broken or missing
    file, and an index that does not agree with its files.
    """
    _check_folder(folder)
    index: dict[str, str] = {}
    if (folder / SINGLE_FILE).is_file():  # goes first, as in transformers
        files = [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = _read_index(folder / INDEX_FILE)
        files = [folder / name for name in sorted(set(index.values()))]
    else:
        raise UserError(_no_weights(folder))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{folder / INDEX_FILE} names files that the folder lacks: {abbreviate(missing)}"
        )
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with open_safetensors(file) as handle:
            names = handle.keys()
            for name in names:
                if name in stored:
                    raise UserError(f"{name} is in both {stored[name].file.name} and {file}")
                view = handle.get_slice(name)
                stored[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
    for name, file_name in index.items():
        if name not in stored or stored[name].file.name != file_name:
            raise UserError(f"{folder / INDEX_FILE} places {name} in {file_name}, which lacks it")
    return stored


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """`safe_open` on the CPU, with UserError for a file that is missing, truncated or corrupt."""
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is truncated, corrupt or no safetensors file ({error}); fetch it again "
            "(a file of some hundred bytes is a Git LFS pointer: git lfs pull)"
        ) from error


def _stored_names(folder: Path) -> set[str] | None:
    """Names of the stored tensors; None without weights.

    The index alone is enough: for dummy weights its files need not be there.
    """
    if (folder / SINGLE_FILE).is_file():
        with open_safetensors(folder / SINGLE_FILE) as handle:
            return set(handle.keys())
    if (folder / INDEX_FILE).is_file():
        return set(_read_index(folder / INDEX_FILE))
    return None


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, as the index has it."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map (tensor name to file name)")
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise UserError(
                f"{path}: {name} is in {file_name!r}; the name of a *.safetensors file is expected"
            )
    return weight_map


def _no_weights(folder: Path) -> str:
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return (
            f"{folder} has {abbreviate(others)}, but neither {SINGLE_FILE} nor {INDEX_FILE}. "
            f"{WAYS_OUT}"
        )
    if pickles:
        return (
            f"{folder} has PyTorch pickles only ({abbreviate(pickles)}); only safetensors are "
            "supported: load it in transformers and save_pretrained() it"
        )
    return f"{folder} has no safetensors weights. {WAYS_OUT}"


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder. {WAYS_OUT}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # ValueError: bad JSON and bad UTF-8 alike
        raise UserError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: a JSON object is expected, not {data!r:.80}")
    return data


def abbreviate(items: list[str], limit: int = 10) -> str:
    """The items in one line, the first `limit` of them and how many more there are."""
    more = f", … and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def read_ahead(folder: Path) -> None:
    """Ask the system to read the weights from disk now; returns at once, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
