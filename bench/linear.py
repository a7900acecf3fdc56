"""The linears of a decode step, by the table of tiles, beside the vendor's product and a floor.

    python bench/linear.py --out bench/results/linear.json     # the times of TILES
    python bench/linear.py --search                            # and of other tiles, best first

Every shape of a model's decode graph is run at 1 to 64 rows: what the compiled graph calls, and
the same with torch's linear and the kernels for many rows around it. Results come first: the
error against float32 may be twice that of torch's ops in the same dtype, or the run ends. Times
are of one call in a CUDA Graph that runs through more weights than the cache holds. The floor is
the weight's bytes at 4.5 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.environment import environment
from bench.kernels import COLD_BYTES, model_config, outputs_of, time_call
from minivllm.ops import OPS
from minivllm.ops.kernels import linear as kernels
from minivllm.ops.kernels.gating import silu_mul
from minivllm.ops.kernels.linear import HEAD, TILES, TORCH, Operand, Tile

ROWS = (1, 2, 4, 8, 16, 32, 64)
READ_BANDWIDTH = 4.5e12  # bytes a second that an H200 reads
CONVENTION = (1e-6, 1.0, False)


@dataclass(frozen=True)
class Case:
    """One linear of the model at some rows.

    Attributes:
        name: of the projection.
        op: that the compiled graph calls.
        use: its entry in `TILES`.
        weights: copies, more than a cache holds.
        arguments: the op's, for a weight.
        by_tile: the op, by a tile.
    """

    name: str
    op: str
    use: str
    rows: int
    weights: list[Tensor]
    arguments: Callable[[Tensor], tuple[Any, ...]]
    by_tile: Callable[[Tile, Tensor], Any]


class Model:
    """The linears of a model's decode graph, with random weights.

    Args:
        dtype: of activations and weights.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.config, self.dtype = model_config(name), dtype

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device="cuda")

    def weights(self, outputs: int, inputs: int) -> list[Tensor]:
        size = outputs * inputs * self.dtype.itemsize
        count = min(32, max(2, -(-COLD_BYTES // size)))
        return [self.random(outputs, inputs) * inputs**-0.5 for _ in range(count)]

    def cases(self) -> Iterator[Case]:
        """Every projection at every number of rows."""
        c, hidden = self.config, self.config.hidden_size
        conv, values = c.conv_dim, c.value_dim
        heads = (c.linear_num_value_heads, c.linear_value_head_dim)
        projections = {
            "in_proj": conv + values + 2 * heads[0],
            "qkv_proj": (2 * c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim,
            "lm_head": c.vocab_size,
        }
        for name, outputs in projections.items():
            yield from self.plain(name, self.weights(outputs, hidden))
        yield from self.gate_up(self.weights(2 * c.intermediate_size, hidden))
        yield from self.down(self.weights(hidden, c.intermediate_size))
        yield from self.mixer_out("out_proj", self.weights(hidden, values), heads)
        heads = (c.num_attention_heads, c.head_dim)
        yield from self.mixer_out("o_proj", self.weights(hidden, heads[0] * heads[1]), heads)

    def plain(self, name: str, weights: list[Tensor]) -> Iterator[Case]:
        use = "head" if weights[0].shape[0] >= HEAD else "linear"
        for rows in ROWS:
            x = self.random(rows, weights[0].shape[1])

            def by_tile(tile: Tile, w: Tensor, x: Tensor = x) -> Tensor:
                if tile is TORCH:
                    return F.linear(x, w)
                return kernels.product(tile, Operand(x), w, kernels.LINEAR, w.shape[0])

            yield Case(name, "linear", use, rows, weights, lambda w, x=x: (x, w), by_tile)

    def gate_up(self, weights: list[Tensor]) -> Iterator[Case]:
        size = weights[0].shape[0] // 2
        for rows in ROWS:
            x = self.random(rows, weights[0].shape[1])

            def by_tile(tile: Tile, w: Tensor, x: Tensor = x) -> Tensor:
                if tile is TORCH:
                    return silu_mul(*F.linear(x, w).split(size, -1))
                return kernels.product(tile, Operand(x), w, kernels.SILU_MUL, size)

            yield Case(
                "gate_up_proj", "linear_silu_mul", "silu_mul", rows, weights,
                lambda w, x=x: (x, w, size), by_tile,
            )  # fmt: skip

    def down(self, weights: list[Tensor]) -> Iterator[Case]:
        norm = self.random(weights[0].shape[0])
        for rows in ROWS:
            x, residual = self.random(rows, weights[0].shape[1]), self.random(rows, norm.shape[0])
            tail = residual, norm, *CONVENTION

            def by_tile(tile: Tile, w: Tensor, x: Tensor = x, tail: Any = tail) -> Any:
                return kernels.product_add_rms_norm(tile, Operand(x), w, *tail)

            yield Case(
                "down_proj", "linear_add_rms_norm", "add_rms_norm", rows, weights,
                lambda w, x=x, tail=tail: (x, w, *tail), by_tile,
            )  # fmt: skip

    def mixer_out(self, name: str, weights: list[Tensor], heads: tuple[int, int]) -> Iterator[Case]:
        norm = self.random(weights[0].shape[0])
        gated_norm = (self.random(heads[1]), 1e-6) if name == "out_proj" else ()
        op = "gated_rms_norm" if gated_norm else "sigmoid_mul"
        for rows in ROWS:
            x, wide = self.random(rows, *heads), self.random(rows, heads[0], 2 * heads[1])
            before = x, wide[..., heads[1] :], *gated_norm
            tail = self.random(rows, norm.shape[0]), norm, *CONVENTION

            def by_tile(tile: Tile, w: Tensor, before: Any = before, tail: Any = tail) -> Any:
                return kernels.product_add_rms_norm(tile, Operand(*before), w, *tail)

            yield Case(
                name, f"{op}_linear_add_rms_norm", "gated_add_rms_norm", rows, weights,
                lambda w, before=before, tail=tail: (*before, w, *tail), by_tile,
            )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement; microseconds of one call, errors relative to the largest value."""

    name: str
    op: str
    shape: tuple[int, ...]
    rows: int
    us: float
    torch_us: float
    floor_us: float
    error: float
    torch_error: float

    def __str__(self) -> str:
        return (
            f"{self.name:13} {'x'.join(map(str, self.shape)):>11} {self.rows:4} {self.us:8.2f} "
            f"{self.torch_us:8.2f} {self.floor_us:8.2f} {self.error:9.1e} {self.torch_error:9.1e}"
        )


def error(actual: Any, expected: Any) -> float:
    """The largest error of a call's results, relative to their largest value."""
    pairs = zip(outputs_of(actual), outputs_of(expected), strict=True)
    return max(float((a.float() - e).abs().max() / e.abs().max()) for a, e in pairs)


def measure(case: Case) -> Row:
    """Check, then time.

    Raises:
        SystemExit: the result is further from float32 than rounding explains.
    """
    op, first = OPS[case.op], case.arguments(case.weights[0])
    implementation, _ = op.choose(torch.device("cuda"), case.weights[0].dtype)
    exact = [a.float() if isinstance(a, Tensor) else a for a in first]
    expected = op.definition(*exact)
    errors = [error(call(*first), expected) for call in (implementation.call, op.definition)]
    if not errors[0] <= 2 * errors[1] + 1e-6:
        raise SystemExit(f"{case.name}, {case.rows} rows: errors {errors} against float32")
    sets = [case.arguments(w) for w in case.weights]
    us = time_call(implementation.call, sets, captured=True)
    torch_us = time_call(lambda w: case.by_tile(TORCH, w), [(w,) for w in case.weights], True)
    weight = case.weights[0]
    floor = weight.numel() * weight.element_size() / READ_BANDWIDTH * 1e6
    return Row(case.name, case.op, tuple(weight.shape), case.rows, us, torch_us, floor, *errors)


def candidates(case: Case) -> list[Tile]:
    """Tiles that a search tries."""
    vector, dot = [], []
    if case.rows <= 4:
        rows = 1 << (case.rows - 1).bit_length()
        vector = [Tile("vector", rows, n, w) for n in (2, 4, 8) for w in (2, 4, 8)]
    if case.rows > 1:
        rows = max(16, case.rows)
        programs = (64, 128) if case.use.endswith("add_rms_norm") else (0,)
        ahead = 0 if case.use == "head" else 2
        dot = [
            Tile("dot", rows, n, w, stages, p, ahead=ahead)
            for n, w in ((64, 4), (64, 8), (128, 8))
            for stages, p in itertools.product((2, 3, 4, 6), programs)
            if (n + rows) * stages <= 680  # of shared memory, at 128 columns a step
        ]
    return [*vector, *dot, TORCH]


def search(case: Case) -> list[tuple[float, Tile]]:
    """The candidates' times, best first; those that are wrong or do not fit are left out."""
    found = []
    sets = [(w,) for w in case.weights]
    expected = case.by_tile(TORCH, case.weights[0])
    expected = tuple(e.float() for e in outputs_of(expected))
    for tile in candidates(case):
        try:
            wrong = error(tuple(outputs_of(case.by_tile(tile, case.weights[0]))), expected)
        except RuntimeError as failure:  # out of shared memory, of registers
            print(f"    {tile}: {failure}", file=sys.stderr)
            continue
        if wrong < 0.02:
            found.append((time_call(lambda w, t=tile: case.by_tile(t, w), sets, True), tile))
    return sorted(found, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="miniqwen08b", help="a file of conf/model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", default="", help="a regular expression over projections")
    parser.add_argument("--search", action="store_true", help="time other tiles, too")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--git-sha", help="of the code that runs, where git cannot say")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/linear.py times CUDA kernels and finds no GPU")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(
        f"{'linear':13} {'weight':>11} {'rows':>4} {'us':>8} {'torch us':>8} {'floor us':>8} "
        f"{'error':>9} {'of torch':>9}"
    )
    measured: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in Model(options.model, getattr(torch, options.dtype)).cases():
            if not re.search(options.only, case.name):
                continue
            row = measure(case)
            print(row, flush=True)
            measured.append(asdict(row))
            if options.search:
                found = search(case)
                for us, tile in found[:4]:
                    print(f"    {us:8.2f} {tile}", flush=True)
                measured[-1]["tiles"] = [{"us": us} | asdict(tile) for us, tile in found]
    record = {
        "environment": environment(options.git_sha),
        "model": options.model,
        "dtype": options.dtype,
        "bandwidth": READ_BANDWIDTH,
        "tiles": {use: [asdict(tile) for tile in tiles] for use, tiles in TILES.items()},
        "rows": measured,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
