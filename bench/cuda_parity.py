"""How far CUDA's kernels are from the float32 reference, beside plain bfloat16 ops.

    python bench/cuda_parity.py --out bench/results/cuda_parity.json

Runs over the same bfloat16 weights and the same tokens, all on the GPU: float32 with the torch ops
(the reference); bfloat16 with the torch ops; bfloat16 with the chosen kernels, in the graphs of
`eager` (FLA, flash-attn) and of `compiled` (our fused kernels too). Packed prompts are prefilled
in two chunks and 64 tokens decoded, fed with the reference's greedy tokens, so that every run sees
the same history. The rule: the kernels' error is at most twice that of the torch ops, and where a
greedy token differs, it is a near-tie.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.environment import environment
from minivllm.compiler.compile import compile_model
from minivllm.compiler.recipe import assemble
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import constants
from minivllm.model.weights import (
    dummy_weights,
    load_config,
    load_weights,
    parameter_shapes,
    resolve_model,
)
from minivllm.ops import OPS
from minivllm.presets import model_preset
from minivllm.runtime.model_runner import ModelRunner, PoolSizes
from minivllm.runtime.prefill_inputs import Row
from minivllm.runtime.resolve import use_no_cublas_workspace

PROMPTS = (300, 1, 77)  # tokens of each sequence
FIRST_CHUNK = (192, 1, 64)
DECODE_STEPS = 64
BLOCKS = ((5, 2, 12, 9, 1, 14), (7, 15), (3, 6, 11))  # scattered
SLOTS = (4, 1, 6)


@dataclass(frozen=True)
class Errors:
    """A run's distance from the reference, over all logits of its phase.

    Attributes:
        rms: root mean square of the difference, relative to that of the reference's logits.
        largest: largest absolute difference, relative to the largest logit.
        disagreements: rows whose greedy token differs from the reference's.
        widest_tie: among those, the largest gap in the reference's logits between its own token
            and the other one, in units of the largest absolute error.
    """

    rms: float
    largest: float
    disagreements: int
    widest_tie: float


def preset(name: str) -> tuple[MiniQwenConfig, dict[str, Tensor]]:
    """Config and bfloat16 CPU weights of a model under conf/model; dummy if it has a shape."""
    options = model_preset(name)
    if options.architecture is not None:
        config = MiniQwenConfig.from_hf(options.architecture)
        return config, dummy_weights(parameter_shapes(config), torch.bfloat16, "cpu", seed=0)
    assert options.path is not None
    folder = resolve_model(options.path, None)
    config = load_config(folder)
    return config, load_weights(folder, parameter_shapes(config), torch.bfloat16, "cpu")


def runner(
    config: MiniQwenConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    implementation: str | None,
    device: torch.device,
    mode: str = "eager",
) -> ModelRunner:
    """A runner of the graphs of a mode; `implementation` is forced on every op."""
    use_no_cublas_workspace()  # as an engine
    compiled = compile_model(config, dtype, CompilerOptions(mode=mode))
    forced = {} if implementation is None else dict.fromkeys(OPS, implementation)
    specs = compiled.prefill.weights | compiled.decode.weights
    merged = assemble(specs, dict(weights) | constants(config))
    on_device = {name: w.to(device) for name, w in merged.items()}
    return ModelRunner(
        compiled,
        on_device,
        device,
        dtype,
        PoolSizes(num_slots=8, num_blocks=16),
        implementations=forced,
    )


def run(model: ModelRunner, sequences: list[list[int]], steps: int) -> tuple[Tensor, Tensor]:
    """Logits of both prefill chunks and of `steps` decode steps, float32 on the CPU.

    Args:
        sequences: token ids, prompt and continuation; a prompt alone grows by greedy tokens.
    """
    for pool in (model.slots, model.blocks):
        pool.poison(list(range(pool.storage.shape[0])))
    prefill, decode = [], []
    done = (0, 0, 0)
    for ends in (FIRST_CHUNK, PROMPTS):
        rows = [
            Row(s, start, end, slot, blocks)
            for s, start, end, slot, blocks in zip(
                sequences, done, ends, SLOTS, BLOCKS, strict=True
            )
            if end > start
        ]
        logits = model.prefill(rows).float().cpu()
        prefill.append(logits)
        done = ends
    last = {0: logits[0], 1: prefill[0][1], 2: logits[1]}
    for step in range(steps):
        for n, sequence in enumerate(sequences):
            if len(sequence) == PROMPTS[n] + step:
                sequence.append(int(last[n].argmax()))
        rows = [
            Row(s, PROMPTS[n] + step, PROMPTS[n] + step + 1, SLOTS[n], BLOCKS[n])
            for n, s in enumerate(sequences)
        ]
        logits = model.decode(rows).float().cpu()
        decode.append(logits)
        last = dict(enumerate(logits))
    return torch.cat(prefill), torch.cat(decode)


def compare(logits: Tensor, reference: Tensor) -> Errors:
    """The errors of a run."""
    difference = logits - reference
    largest = difference.abs().max()
    own, other = reference.argmax(-1), logits.argmax(-1)
    differing = own != other
    gap = reference.gather(1, own[:, None]) - reference.gather(1, other[:, None])
    return Errors(
        rms=float(difference.square().mean().sqrt() / reference.square().mean().sqrt()),
        largest=float(largest / reference.abs().max()),
        disagreements=int(differing.sum()),
        widest_tie=float(gap[differing[:, None]].max() / largest) if differing.any() else 0.0,
    )


def measure(name: str, device: torch.device) -> dict[str, object]:
    """Both phases of a preset: errors of the torch ops and of the chosen kernels."""
    config, weights = preset(name)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in PROMPTS
    ]
    reference = run(
        runner(config, weights, torch.float32, "torch", device), sequences, DECODE_STEPS
    )
    result: dict[str, object] = {}
    for label, implementation, mode in (
        ("torch", "torch", "eager"),
        ("kernels", None, "eager"),
        ("compiled", None, "compiled"),
    ):
        model = runner(config, weights, torch.bfloat16, implementation, device, mode)
        outputs = run(model, sequences, DECODE_STEPS)
        for phase, logits, expected in zip(("prefill", "decode"), outputs, reference, strict=True):
            result[f"{label}_{phase}"] = asdict(compare(logits, expected))
        result[f"{label}_implementations"] = model.implementations
    return result


def main() -> None:
    """Measure both presets, print a line a phase, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["tiny", "miniqwen08b"])
    parser.add_argument("--git-sha")
    options = parser.parse_args()
    device = torch.device("cuda")
    record: dict[str, object] = {"environment": environment(options.git_sha)}
    for name in options.models:
        record[name] = measured = measure(name, device)
        for key, value in measured.items():
            print(name, key, value)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
