"""What compiling is worth: one model run in every way, on one machine, in one process.

    python bench/compile_vs_eager.py +model=tiny runtime.device=cpu
    python bench/compile_vs_eager.py +model=miniqwen08b model.load_format=dummy \\
        bench.rows=[eager,torch_compile,compiled] bench.out=run.json
    python bench/compile_vs_eager.py --compare before.json after.json

Rows (`bench.rows`): hf, transformers' own cached generate; reference, the plain model over the
whole sequence for every token; eager, the lowered graph op by op with the same state and KV cache
as ours; torch_compile and torch_compile_reduce_overhead, stock torch.compile of that same graph;
compiled_no_graphs and compiled, ours without and with CUDA Graphs. All share one set of weights
and see the same random prompts. There is no prefix cache: every prefill computes all of its
prompt. Rows take turns within a round, so that what disturbs the machine disturbs all of them;
numbers are medians, `spread` is the distance of the quartiles, and a ratio of two rows is the
median over rounds with an interval from the sign test.

On a CPU with one thread, times are those of that thread, so that other work on the machine does
not count.

Columns: prefill_ms of one prompt of `bench.prefill` tokens; of decode behind `bench.context`
tokens, for each batch: decode_ms a step, output_throughput in tokens a second, gb_per_second and
floor_share, which count what a step must move at least (weights once, states in and out, keys and
values) against the bandwidth that reading (or copying) as many bytes reaches here; launches of a
step, planned, and on CUDA measured; peak_bytes; build_s, from the loaded weights until the prefill
and every batch have run once; tokens_to_pay_back, after how many tokens at the smallest batch a
row has made up for building longer than eager; logit_error, the largest difference of a logit
from the plain model's in float32, relative to the largest logit, over `bench.checked` forced
tokens; token_agreement, the share of these whose most probable token is the same. For the rows of
`bench.starts`, cold_start_s and warm_start_s: from the start of a process of its own to its first
token, with empty compile caches and again with what that left in them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Run, command_line, machine, refuse_unused, table, write_record
from bench.contenders import GraphContender, build
from bench.environment import process_age
from bench.plot import plot
from bench.samples import is_thread_timed
from bench.versus import Bench, Options
from minivllm.errors import UserError

NAME = "compile_vs_eager"


def measure(run: Run) -> None:
    """A whole run."""
    check_config(run)
    options: Options = run.options
    if options.first_token_of is not None:
        first_token(run, options.first_token_of)
        return
    bench = Bench(run)
    if options.context + bench.lengths.steps > bench.model.config.max_position_embeddings:
        raise UserError(
            f"bench.context={options.context} and the steps behind it exceed the model's "
            f"{bench.model.config.max_position_embeddings} positions"
        )
    bench.build()
    bench.check()
    bench.time(bench.rows, bench.samples, options.rounds)
    bench.derive()
    pairs = bench.pairs()
    ablation = bench.ablation() if options.ablation and "compiled" in bench.rows else []
    bench.starts()
    settings = {
        "benchmark": NAME,
        "model": run.config.model.name,
        "device": machine(bench.device),
        "dtype": str(bench.model.dtype),
        "state_dtype": str(bench.model.state_dtype),
        "load_format": run.config.model.load_format,
        "clock": "thread" if is_thread_timed(bench.device) else "wall",
        "prefill": bench.lengths.prefill,
        "batches": list(bench.lengths.batches),
    }
    title = "{model} on {device}, {dtype}, state {state_dtype}".format(**settings)
    print(f"{title}; no prefix cache\n\n{report(bench, pairs, ablation)}")
    where = Path(options.plot) if options.plot else None
    if where is None and options.out is not None:
        where = Path(options.out).with_suffix(".png")
    if where is not None:
        print(plot(bench.samples.results, bench.timed, ablation, title, where))
    write_record(
        run,
        settings,
        bench.samples,
        notes=bench.notes,
        pairs=pairs,
        ablation=ablation,
        bandwidth=bench.bandwidth,
        implementations={
            name: row.runner.implementations
            for name, row in bench.rows.items()
            if isinstance(row, GraphContender)
        },
    )


def first_token(run: Run, name: str) -> None:
    """Build one row and print the age of the process when it has its first token."""
    options = dataclasses.replace(run.options, rows=(name,))
    bench = Bench(dataclasses.replace(run, options=options))
    row = build(name, bench.model, bench.lengths)
    token = int(row.prefill(bench.prompt).argmax())
    print(json.dumps({"row": name, "token": token, "seconds": process_age()}))


def check_config(run: Run) -> None:
    """Raises UserError for options that nothing here would honour."""
    reason = "this benchmark builds its rows itself"
    refuse_unused("runtime", run.config.runtime, ("device", "state_dtype", "num_threads"), reason)
    refuse_unused("compiler", run.config.compiler, ("implementations",), reason)


def report(bench: Bench, pairs: list[dict[str, Any]], ablation: list[dict[str, Any]]) -> str:
    """The tables, in Markdown."""
    results, spread = bench.samples.results, bench.samples.spread
    batches = bench.lengths.batches
    smallest = batches[0]

    def timed(row: str, column: str) -> str | None:
        value = results[row].get(column)
        noise = spread[row].get(column)
        return (
            None
            if value is None
            else f"{value:,.3f}" + ("" if noise is None else f" ±{50 * noise:.0f}%")
        )

    names = list(bench.rows)
    columns = bench.timed
    parts = [table(["", *columns], [[n, *(timed(n, c) for c in columns)] for n in names])]
    columns = [f"{c}@{b}" for b in batches
               for c in ("output_throughput", "gb_per_second", "floor_share")]  # fmt: skip
    parts.append(table(["", *columns], [[n, *(results[n].get(c) for c in columns)] for n in names]))
    columns = ["build_s", "cold_start_s", "warm_start_s", f"tokens_to_pay_back@{smallest}",
               "peak_bytes", f"decode_launches@{smallest}", f"measured_launches@{smallest}",
               "logit_error", "token_agreement"]  # fmt: skip
    present = [c for c in columns if any(results[n].get(c) is not None for n in names)]
    parts.append(table(["", *present], [[n, *(results[n].get(c) for c in present)] for n in names]))
    if pairs:
        parts.append(table(
            ["in turns", "column", "times as fast", "95 % interval"],
            [[f"{p['fast']} against {p['slow']}", p["column"], p["speedup"],
              f"{p['low']:.3f} to {p['high']:.3f}"] for p in pairs],
        ))  # fmt: skip
    if ablation:
        columns = [c for c in ablation[0] if c != "pass"]
        lines = []
        for entry in ablation:
            ratios = [entry[c] for c in columns]
            lines.append([f"without {entry['pass']}", *(
                f"{100 * (1 / r['speedup'] - 1):+.1f}% ({100 * (1 / r['high'] - 1):+.1f} to "
                f"{100 * (1 / r['low'] - 1):+.1f})" for r in ratios)])  # fmt: skip
        parts.append("compiled without one pass, change of the time (95 % interval):\n\n"
                     + table(["", *columns], lines))  # fmt: skip
    parts += [f"{name}: {note}" for name, note in bench.notes.items()]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    return command_line(__doc__, Options, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
