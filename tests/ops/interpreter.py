"""Runs files of tests under triton's interpreter, which needs a process of its own.

    run_interpreted("interpreted_linears.py")

The interpreter is chosen where triton decorates a kernel, so a process that has imported the
kernels to compile them cannot interpret them, nor the other way round. pytest does not collect
such files by itself; a file of tests apart runs each, so that pytest-xdist spreads them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def run_interpreted(name: str) -> None:
    """Fail as the tests of a file in this folder do."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, str(HERE / name)],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
