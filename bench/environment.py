"""What a measurement ran on: GPU, versions, commit and command, for the JSON beside its numbers.

record = {"environment": environment(git_sha), ...}
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "flash-attn")


def environment(git_sha: str | None = None, command: str | None = None) -> dict[str, Any]:
    """The facts a reader needs to repeat a run.

    Args:
        git_sha: of the code that runs; None: asked of git, "-dirty" if files differ from it.
        command: as it was typed; None: this process's arguments.
    """
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cpu": cpu_name(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git_sha": git_sha or _git_sha(),
        "command": command or " ".join(["python", *sys.argv]),
    }


def process_age() -> float:
    """Seconds since this process was started, what it imported before included; Linux only."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    started = ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def cpu_name() -> str:
    """The CPU's model name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
