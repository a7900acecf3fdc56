"""Finished graphs on disk, so that the next start of the same model neither traces nor rewrites.

Owns the key, the files and their number. Does not own how a graph is spelled (graph_json.py), nor
when the cache may be used (compile.py).

    cache = GraphCache(cache_folder(options.cache_dir))
    key = graph_key(config, dtype, state_dtype, block_size, options, passes)
    if (kept := cache.load(key)) is None:
        cache.store(key, graphs, reports)

A file is JSON, data and no code, and is named after all that its graphs depend on: the package's
source, the versions of torch and Python, the architecture, dtypes, options and passes. Neither the
device nor the implementations are among them: those are chosen when a graph is bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.graph_json import graph_data, read_graph
from minivllm.compiler.passes.base import GraphPass
from minivllm.compiler.runner import PassReport
from minivllm.compiler.text import dtype_text
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig

logger = logging.getLogger(__name__)

FORMAT = 1  # of the files; another one is another key
MOST_FILES = 64  # the others that were not used for longest are deleted
PACKAGE = Path(__file__).resolve().parents[1]
IMPORTED = time.time()

Key = Mapping[str, Any]


@dataclass(frozen=True)
class KeptGraphs:
    """What a file holds: the finished graph of each phase, and what the passes reported."""

    graphs: dict[str, Graph]
    reports: list[PassReport]


def cache_folder(option: str | None) -> Path | None:
    """Where `compiler.cache_dir` keeps graphs; None if nowhere."""
    if option == "off":
        return None
    return default_folder() if option is None else Path(option).expanduser()


def default_folder() -> Path | None:
    """`minivllm` in the user's cache folder; None for a user who has none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are invalid, says the specification
        return Path(base) / "minivllm"
    try:
        return Path.home() / ".cache" / "minivllm"
    except RuntimeError:
        return None


def graph_key(
    config: MiniQwenConfig,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    block_size: int,
    options: CompilerOptions,
    passes: Mapping[str, Sequence[GraphPass]],
) -> Key | None:
    """All that the finished graphs depend on.

    Args:
        passes: phase to the passes that are run.

    Returns:
        None if the source is not known: a pass stands outside the package, or a file was changed
        after it was imported, or there is none.
    """
    classes = {phase: [type(p) for p in passes[phase]] for phase in PHASES}
    outside = [c for cs in classes.values() for c in cs if not c.__module__.startswith("minivllm.")]
    source = source_digest(PACKAGE, IMPORTED)
    if outside or source is None:
        logger.debug("graphs are neither read nor kept: %s", outside or "the source has changed")
        return None
    return {
        "format": FORMAT,
        "source": source,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": platform.python_version(),
        "architecture": dataclasses.asdict(config),
        "dtype": dtype_text(dtype),
        "state_dtype": dtype_text(state_dtype),
        "block_size": block_size,
        "mode": options.mode,
        "disable": list(options.disable),
        "stop_after": options.stop_after,
        "passes": {
            phase: [f"{c.__module__}:{c.__qualname__}" for c in cs] for phase, cs in classes.items()
        },
    }


@functools.lru_cache(maxsize=8)
def source_digest(package: Path, imported: float) -> str | None:
    """A digest of a package's Python files; None if one was changed behind the time `imported`, or
    if there are none (an archive, bytecode alone)."""
    files = sorted(package.rglob("*.py"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        if file.stat().st_mtime > imported:
            return None
        digest.update(f"{file.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


class GraphCache:
    """A folder of finished graphs; whatever is wrong with it costs a compilation, never a start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, key: Key) -> Path:
        """The file of a key."""
        text = json.dumps(key, sort_keys=True)
        return self.folder / f"graphs-{hashlib.sha256(text.encode()).hexdigest()}.json"

    def load(self, key: Key) -> KeptGraphs | None:
        """The graphs of a key; None if they are not there, or cannot be read."""
        file = self.file(key)
        try:
            content = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):  # the second one `store` will tell
            return None
        except OSError as error:
            logger.warning("the kept graphs cannot be read: %s", error)
            return None
        try:
            kept = _read(content, key)
        except Exception as error:  # a broken file can break anything
            logger.warning(
                "%s is broken (%s: %s) and will be replaced", file, type(error).__name__, error
            )
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # those that were used last stay
        return kept

    def store(self, key: Key, graphs: Mapping[str, Graph], reports: Sequence[PassReport]) -> None:
        """Keep the graphs of a key, whole or not at all."""
        try:
            content = _written(key, graphs, reports)
        except Exception as error:  # none of the package's own graphs; found here, not at a start
            logger.debug("the graphs are not kept: %s: %s", type(error).__name__, error)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._replace(self.file(key), content)
        except OSError as error:
            logger.warning(
                "the compiled graphs cannot be kept for the next start (%s); name another folder, "
                "or none: compiler.cache_dir=off",
                error,
            )
            return
        self._delete_old()

    def _replace(self, file: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f"{file.stem}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _delete_old(self) -> None:
        """Files of others are left alone; what a killed process left half written is not."""
        used: list[tuple[float, Path]] = []
        for file in self.folder.glob(f"graphs-{'[0-9a-f]' * 64}.*"):
            with contextlib.suppress(OSError):  # another process deletes as well
                used.append((file.stat().st_mtime, file))
        for _, file in sorted(used)[:-MOST_FILES]:
            with contextlib.suppress(OSError):
                file.unlink()


def _written(key: Key, graphs: Mapping[str, Graph], reports: Sequence[PassReport]) -> bytes:
    """A file's content, which is known to be read as the same graphs."""
    data = {
        "key": key,
        "reports": [dataclasses.asdict(report) for report in reports],
        "graphs": {phase: graph_data(graph) for phase, graph in graphs.items()},
    }
    content = _lines(data, depth=4).encode()
    kept = _read(content, key)
    again = {phase: graph_data(graph) for phase, graph in kept.graphs.items()}
    if kept.reports != list(reports) or again != data["graphs"]:
        raise ValueError("what would be read differs from what was written")
    return content


def _read(content: bytes, key: Key) -> KeptGraphs:
    data = json.loads(content)
    if data["key"] != json.loads(json.dumps(key)):  # tuples are lists there
        raise ValueError("it is the file of another key")
    graphs = {phase: read_graph(data["graphs"][phase]) for phase in PHASES}
    reports = [PassReport(**{**report, "misses": ()}) for report in data["reports"]]
    return KeptGraphs(graphs, reports)


def _lines(value: Any, depth: int) -> str:
    """JSON with a line for each entry of the outer levels."""
    if depth and isinstance(value, Mapping):
        entries = [f"{json.dumps(k)}: {_lines(v, depth - 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if depth and isinstance(value, list):
        return "[\n" + ",\n".join(_lines(v, depth - 1) for v in value) + "\n]"
    return json.dumps(value)
