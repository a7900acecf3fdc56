"""What recurrent states in bfloat16 cost: their distance from float32 states, token by token.

    python bench/state_drift.py --out bench/results/state_drift.json
    python bench/state_drift.py --models tiny --device cpu --tokens 256      # seconds

A state is rounded once a token and read by all later ones, so an error could grow with the length.
Sequences of random tokens are decoded one token a step, over the same bfloat16 weights, once with
float32 states and once with bfloat16 ones. The reference computes in float32 throughout, with the
torch ops, as a prefill. Logits are compared in windows of 64 tokens, and the states at their ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import table
from bench.cuda_parity import compare, preset
from bench.environment import environment
from minivllm.compiler.compile import compile_model
from minivllm.compiler.recipe import assemble
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.ops import OPS
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.runtime.model_runner import ModelRunner, PoolSizes
from minivllm.runtime.prefill_inputs import Row
from minivllm.runtime.resolve import use_no_cublas_workspace

WINDOW = 64  # tokens whose logits are compared together
ENDS = (64, 256, 1024, 4096)
SEQUENCES = 2
STATE_DTYPES = (torch.float32, torch.bfloat16)


class Sequences:
    """A runner, and sequences that own its slots and blocks.

    Args:
        dtype: of weights and activations.
        tokens: of each sequence.
        reference: compute with the torch ops.
    """

    def __init__(
        self,
        config: MiniQwenConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        tokens: Sequence[Sequence[int]],
        reference: bool = False,
    ) -> None:
        mode = "eager" if reference else "compiled"
        if device.type == "cuda":
            use_no_cublas_workspace()  # as an engine
        compiled = compile_model(config, dtype, CompilerOptions(mode=mode), state_dtype=state_dtype)
        specs = compiled.prefill.weights | compiled.decode.weights
        merged = assemble(specs, {n: w.to(dtype) for n, w in weights.items()} | constants(config))
        blocks = -(-len(tokens[0]) // BLOCK_SIZE)
        self.runner = ModelRunner(
            compiled,
            {name: w.to(device) for name, w in merged.items()},
            device,
            dtype,
            PoolSizes(num_slots=SEQUENCES + 1, num_blocks=SEQUENCES * blocks + 1),
            max_blocks=blocks,
            implementations=dict.fromkeys(OPS, "torch") if reference else None,
        )
        if device.type == "cuda" and not reference:
            self.runner.capture([])
        self.tokens = tokens
        self.blocks = [range(1 + n * blocks, 1 + (n + 1) * blocks) for n in range(SEQUENCES)]

    def row(self, n: int, start: int, end: int, all_logits: bool = False) -> Row:
        """A part of sequence n; all logits of it, or the last."""
        copies = 0 if all_logits else 1
        return Row(self.tokens[n], start, end, n + 1, self.blocks[n], copies, all_logits)

    def decoded(self, ends: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Token by token: of each window its logits `[n * 64, V]`, and the states at its end."""
        begun = [self.row(n, 0, 1) for n in range(SEQUENCES)]
        steps = [self.runner.prefill(begun).float().cpu()]
        for t in range(1, ends[-1]):
            rows = [self.row(n, t, t + 1) for n in range(SEQUENCES)]
            logits = self.runner.decode(rows)
            window = next(end for end in ends if t < end)
            if t >= window - WINDOW:
                steps.append(logits.float().cpu())
            if t + 1 == window:
                yield torch.stack(steps, dim=1).flatten(0, 1), self.states()
                steps = []

    def prefilled(self, ends: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same of a prefill, in parts that end where windows begin and end."""
        start = 0
        for end in ends:
            for stop in (end - WINDOW, end):
                wanted = stop == end
                if stop > start:
                    rows = [self.row(n, start, stop, wanted) for n in range(SEQUENCES)]
                    logits = self.runner.prefill(rows)
                start = stop
            yield logits.float().cpu(), self.states()

    def states(self) -> Tensor:
        """The recurrent states of all layers and sequences, `[layers, n, HV, V, K]` float32."""
        views = self.runner.slots.views
        recurrent = [x[1:].float().cpu() for name, x in views.items() if name.endswith("recurrent")]
        return torch.stack(recurrent)


def relative_rms(x: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference over that of the reference."""
    return float((x - reference).square().mean().sqrt() / reference.square().mean().sqrt())


def measure(name: str, device: torch.device, tokens: int) -> list[dict[str, Any]]:
    """Of each window and each dtype of the states, the errors of logits and states."""
    config, weights = preset(name)
    ends = [end for end in ENDS if end <= tokens]
    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, ends[-1])
    ids = torch.randint(config.vocab_size, shape, generator=generator).tolist()
    exact = Sequences(config, weights, torch.float32, torch.float32, device, ids, reference=True)
    expected = list(exact.prefilled(ends))
    rows = []
    for dtype in STATE_DTYPES:
        model = Sequences(config, weights, torch.bfloat16, dtype, device, ids)
        for end, (logits, states), (logits_then, states_then) in zip(
            ends, model.decoded(ends), expected, strict=True
        ):
            rows.append(
                {
                    "model": name,
                    "tokens": end,
                    "state": str(dtype).removeprefix("torch."),
                    **asdict(compare(logits, logits_then)),
                    "rows": len(logits),
                    "state_rms": relative_rms(states, states_then),
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "miniqwen08b"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=ENDS[-1], help=f"the last of {ENDS} to reach")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--git-sha", help="of the code that runs, where git cannot say")
    options = parser.parse_args(argv)
    if options.tokens < ENDS[0]:
        parser.error(f"--tokens {options.tokens}: choose {ENDS[0]} or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU; choose cpu")
    device = torch.device(options.device)
    rows = [row for name in options.models for row in measure(name, device, options.tokens)]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if options.out is not None:
        record = {"environment": environment(options.git_sha), "window": WINDOW, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
