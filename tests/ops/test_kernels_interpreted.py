"""Runs `interpreted_kernels.py` under triton's interpreter, which needs a process of its own.

The interpreter is chosen where triton decorates a kernel, so a process that has imported the
kernels to compile them cannot interpret them, nor the other way round.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, str(HERE / "interpreted_kernels.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
