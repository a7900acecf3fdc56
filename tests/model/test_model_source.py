"""`resolve_model`: folders, embedded assets, the hub, and paths that are none of these."""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hf_checkpoints import (
    save_text,
)

from minivllm.errors import UserError
from minivllm.model.weights import (
    load_config,
    resolve_model,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An untied text-only checkpoint in one file."""
    save_text(tmp_path)
    return tmp_path


def test_resolve_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_model(str(folder)) == folder
    assert not caplog.records
    assert resolve_model(str(folder), "main") == folder
    assert "model.revision=main is for hub ids" in caplog.text


@pytest.mark.parametrize(
    "path", ["./nope", "/nope/nope", "a/b/c", "", "~/nope-nope", "owner/ name"]
)
def test_resolve_path_that_is_neither_folder_nor_hub_id(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match=r"no (such )?folder") as error:
        resolve_model(path)
    for way in ("model.path=", "hub", "model.load_format=dummy"):
        assert way in str(error.value)


def test_resolve_file(folder: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json' is no folder"):
        resolve_model(str(folder / "config.json"))


def test_resolve_asset(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    shutil.copytree(folder, package / "assets" / "small", ignore=shutil.ignore_patterns("package"))
    monkeypatch.setattr(importlib.resources, "files", lambda name: package)
    assert load_config(resolve_model("asset://small")).vocab_size == 61
    for name in ("nope", "", "../package/assets/small"):
        with pytest.raises(UserError, match=r"no such embedded model; choices: asset://small$"):
            resolve_model(f"asset://{name}")


def test_resolve_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, "*.safetensors" in allow_patterns))
        assert "*.json" in allow_patterns and "*.txt" in allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name", "v1") == folder
    assert resolve_model("owner/name", weights=False) == folder
    assert asked == [("owner/name", "v1", True), ("owner/name", None, False)]


def test_hub_that_can_not_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, offline and with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="LocalEntryNotFoundError") as error:
        resolve_model("owner/no-such-model", "v1")
    for part in ("'owner/no-such-model' at model.revision=v1", "model.load_format=dummy"):
        assert part in str(error.value)


def test_hub_errors_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise RuntimeError("\nconnection reset\nby peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"\(RuntimeError: connection reset\)"):
        resolve_model("owner/name")
