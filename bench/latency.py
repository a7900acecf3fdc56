"""Latency of the engine: decode at each batch size, time to the first token, a prefix hit.

    python bench/latency.py +model=miniqwen08b model.load_format=dummy runtime.max_model_len=8192
    python bench/latency.py +model=tiny runtime.device=cpu bench.scale=0.05
    python bench/latency.py +model=miniqwen08b model.load_format=dummy \\
        bench.workloads=[decode,ttft,prefix,prefill,nano_vllm,random]   # all, for one start
    python bench/latency.py --compare before.json after.json

`bench/workloads.py` says what each workload is and what each number means. The row `start` has the
seconds from the process's start until the engine is ready and until its first token;
`kernels_built` says how many kernels that included, none where the compile caches were warm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import command_line
from bench.engine_run import measure
from bench.workloads import LATENCY, ServingOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command_line(__doc__, ServingOptions, lambda run: measure(run, "latency", LATENCY), argv)


if __name__ == "__main__":
    sys.exit(main())
