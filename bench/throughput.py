"""Throughput of the engine: prefill alone, nano-vllm's workload, a random one.

    python bench/throughput.py +model=miniqwen08b model.load_format=dummy runtime.max_model_len=4096
    python bench/throughput.py +model=tiny runtime.device=cpu bench.scale=0.05
    python bench/throughput.py +model=tiny bench.workloads=[random] bench.request_rate=4 \\
        bench.input_len=512 bench.output_len=64 bench.range_ratio=0.5
    python bench/throughput.py --compare before.json after.json

`bench/workloads.py` says what each workload is and what each number means; those of `latency.py`
can be named here too, and run on the same engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import command_line
from bench.engine_run import measure
from bench.workloads import THROUGHPUT, ServingOptions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command_line(
        __doc__, ServingOptions, lambda run: measure(run, "throughput", THROUGHPUT), argv
    )


if __name__ == "__main__":
    sys.exit(main())
