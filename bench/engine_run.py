"""One engine, started once, through any of the workloads; what latency.py and throughput.py share.

measure(run, "latency", LATENCY)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import torch

from bench.common import Run, machine, table, write_record
from bench.environment import process_age
from bench.samples import Results, Samples
from bench.served import Request
from bench.workloads import NANO_VLLM, Load, ServingOptions, scaled
from minivllm import LLM
from minivllm.errors import UserError
from minivllm.runtime.warmup import counted_builds

# shown of a row, of those that it has; the record has all
SHOWN = ("output_throughput", "total_token_throughput", "request_throughput", "prompt_throughput",
         "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms",
         "step_ms", "host_wait_ms", "prefix_hit_rate")  # fmt: skip


def measure(run: Run, benchmark: str, workloads: Sequence[str]) -> None:
    """Start the engine, run the workloads, print and write.

    Args:
        benchmark: its name in the record.
        workloads: where `bench.workloads` names none.

    Raises:
        UserError: a workload needs longer sequences than the engine takes.
    """
    options: ServingOptions = run.options
    wanted = options.workloads or tuple(workloads)
    config = run.config
    model = dataclasses.replace(config.model, skip_tokenizer_init=True)
    with counted_builds() as builds:
        llm = LLM.from_config(dataclasses.replace(config, model=model))
    samples = Samples()
    try:
        check_lengths(llm, options, wanted)
        ready = process_age()
        load = Load(llm, options, samples)
        load.serve([Request([1, 2, 3], 1)])
        samples.set("start", "ready_s", ready)
        samples.set("start", "first_token_s", process_age())
        for name in wanted:
            print(f"running {name}", file=sys.stderr, flush=True)
            load.run(name)
        settings = {
            "benchmark": benchmark,
            "model": config.model.name,
            "device": machine(llm.device),
            "dtype": str(llm.dtype),
            "state_dtype": config.runtime.state_dtype,
            "load_format": config.model.load_format,
            "mode": config.compiler.mode,
        }
        caching = config.runtime.prefix_cache.enabled
        print(f"{settings['model']} on {settings['device']}, {settings['dtype']}, "
              f"prefix cache {'on' if caching else 'off'}; ready after {ready:.1f} s, "
              f"{builds.count} kernels built\n")  # fmt: skip
        print(report(samples.results) + "\n")
        write_record(
            run,
            settings,
            samples,
            kernels_built=builds.count,
            metrics=llm.metrics,
            implementations=llm.implementations,
            options=dataclasses.asdict(config.runtime),
            peak_bytes=torch.cuda.max_memory_allocated(llm.device)
            if llm.device.type == "cuda"
            else None,
        )
    finally:
        llm.close()


def check_lengths(llm: LLM, options: ServingOptions, workloads: Sequence[str]) -> None:
    """Raises UserError before anything runs."""
    most = 1 + options.range_ratio
    needed = {
        "decode": (128, 256),
        "ttft": (max(options.prompts), 1),
        "prefix": (3072 + 128, 1),
        "prefill": (2048, 1),
        "nano_vllm": (NANO_VLLM[2], NANO_VLLM[2]),
        "random": (round(options.input_len * most), round(options.output_len * most)),
    }
    for name in workloads:
        longest = sum(scaled(length, options.scale) for length in needed[name])
        if longest > llm.engine.max_model_len:
            raise UserError(
                f"bench.workloads: {name} has sequences of {longest} tokens, and the engine takes "
                f"{llm.engine.max_model_len}; raise runtime.max_model_len, or shorten all: "
                f"bench.scale={options.scale * llm.engine.max_model_len / longest * 0.95:.2g}"
            )


def report(results: Results) -> str:
    """A row a workload, in Markdown."""
    columns = [c for c in SHOWN if any(c in row for row in results.values())]
    rows = [[name, *(row.get(c) for c in columns)] for name, row in results.items()]
    return table(["", *columns], [row for row in rows if row[0] != "start"])
