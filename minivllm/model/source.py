"""Where a model's files are: a folder, an embedded asset, or the Hugging Face hub.

Owns turning `model.path` into a folder that exists. Owns nothing of what is in it.

    folder = resolve_model("asset://tiny")
"""

from __future__ import annotations

import importlib.resources
import logging
import re
from pathlib import Path

import huggingface_hub

from minivllm.errors import UserError
from minivllm.model.checkpoint import WAYS_OUT

logger = logging.getLogger(__name__)

ASSET_SCHEME = "asset://"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_TEXT_FILES = ["*.json", "*.txt", "*.jinja", "*.model"]


def resolve_model(path: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of the model at `path`; downloads from the hub what is not in its cache.

    `path` is an existing folder, `asset://NAME`, or a hub id `owner/name` (then `revision`
    is its branch, tag or commit; elsewhere it means nothing, and a warning says so). With
    `weights=False` configuration and tokenizer files alone are fetched. Raises UserError, with
    the ways out, if there is no such model or it can't be fetched.
    """
    if path.startswith(ASSET_SCHEME):
        folder = _asset(path)
    else:
        folder = Path(path).expanduser()
        if not path or (folder.exists() and not folder.is_dir()):
            raise UserError(f"model.path={path!r} is no folder. {WAYS_OUT}")
        if not folder.is_dir():
            return _download(path, revision, weights)
    if revision is not None:
        logger.warning("model.revision=%s is for hub ids; model.path=%s is none", revision, path)
    return folder


def _asset(path: str) -> Path:
    name = path.removeprefix(ASSET_SCHEME)
    assets = Path(str(importlib.resources.files("minivllm"))) / "assets"
    known = sorted(config.parent.name for config in assets.glob("*/config.json"))
    if name not in known:
        choices = ", ".join(ASSET_SCHEME + asset for asset in known) or "none in this installation"
        raise UserError(f"model.path={path!r}: no such embedded model; choices: {choices}")
    return assets / name


def _download(path: str, revision: str | None, weights: bool) -> Path:
    if not _HUB_ID.fullmatch(path):
        raise UserError(f"model.path={path!r}: no such folder. {WAYS_OUT}")
    patterns = [*_TEXT_FILES, "*.safetensors"] if weights else _TEXT_FILES
    try:
        return Path(
            huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=patterns)
        )
    # The client's own errors, its HTTP library's (which differs between its major versions),
    # OSError and ValueError: whatever it is, the user needs to hear what was tried.
    except Exception as error:
        at = "" if revision is None else f" at model.revision={revision}"
        raise UserError(
            f"model.path={path!r}{at}: no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {_first_line(error)}). {WAYS_OUT}"
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
