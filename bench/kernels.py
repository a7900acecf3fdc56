"""The ops of the compiled graphs at a model's shapes: right first, then how fast, beside a floor.

    python bench/kernels.py --out bench/results/kernels.json        # the 0.8B's shapes
    python bench/kernels.py --only delta_rule --model tiny

Every op runs the implementation that binding would choose for this device. Its result is held to
the op's definition in float32 first; a mismatch ends the run. Then the op is timed inside a
captured CUDA Graph of many calls, each on inputs of its own, as the layers of a step have them
(four sets in turn from batch 256 and of prefills, which are large): what is memory-bound does not
find its inputs in the cache, and the few microseconds that starting a graph takes are shared by as
many calls as a step has layers. The floor is the bytes that must move (each input and output once,
each state once in and once out, of a KV cache the keys and values attended to) at 4.3 TB/s;
attention of a prefill is bound by its products instead. FLA's varlen entry cannot be captured as it
comes (it copies `cu_seqlens` to the host), so what runs on it is timed from Python and marked so,
and so is attention on torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.environment import environment
from minivllm.model.config import MiniQwenConfig
from minivllm.model.miniqwen import inv_freq
from minivllm.model.weights import load_config, resolve_model
from minivllm.ops import OPS, Implementation, Op
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.paged_attention import BLOCK_SIZE
from minivllm.presets import model_preset

BATCHES = (1, 8, 32, 256)
CONTEXTS = (128, 1024, 4096)  # tokens that a decode step attends to
PROMPTS = (2048, 8192)
HISTORIES = (0, 2048)  # tokens before a prompt's chunk
BANDWIDTH = 4.3e12  # bytes a second that an H200 reaches
COLD_BYTES = 192 * 2**20  # more than its L2 holds, several times
MAX_SETS = 32
CALLS = 18  # of a graph at least: the 0.8B's layers of Gated DeltaNet
REPLAYS = 30

Args = tuple[Any, ...]


def model_config(name: str) -> MiniQwenConfig:
    """The architecture of a preset under conf/model."""
    options = model_preset(name)
    if options.architecture is not None:
        return MiniQwenConfig.from_hf(options.architecture)
    assert options.path is not None
    return load_config(resolve_model(options.path, None))


class Shapes:
    """Inputs of every op as a model's graphs have them: column slices of merged projections.

    Args:
        config: the model.
        dtype: of activations and weights.
        device: `meta` gives shapes without data.
        state_dtype: of the recurrent state.
    """

    def __init__(
        self,
        config: MiniQwenConfig,
        dtype: torch.dtype,
        device: str,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.dtype, self.device, self.state_dtype = config, dtype, device, state_dtype

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def int64(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)

    def int32(self, values: Tensor) -> Tensor:
        return values.to(torch.int32).to(self.device)

    def columns(self, tokens: int, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Slices of one row, side by side, each from a multiple of 16 bytes (merge_linears)."""
        widths = [math.prod(shape) for shape in shapes]
        step = max(16 // self.dtype.itemsize, 1)
        padded = [-(-width // step) * step for width in widths]
        parts = self.random(tokens, sum(padded)).split(padded, dim=-1)
        return [
            x[:, :width].unflatten(-1, shape)
            for x, width, shape in zip(parts, widths, shapes, strict=True)
        ]

    def mixer_row(self, tokens: int) -> list[Tensor]:
        """qkv `[T, C]`, b and a `[T, HV]`, z `[T, HV, V]`: DeltaNet's merged projection."""
        c = self.config
        heads = c.linear_num_value_heads
        return self.columns(
            tokens, (c.conv_dim,), (heads,), (heads,), (heads, c.linear_value_head_dim)
        )

    def token_wise(self, tokens: int, sets: int) -> Iterator[tuple[str, list[Args]]]:
        """The ops that act on each token by itself, and the cache write."""
        c = self.config
        hidden, eps = c.hidden_size, c.rms_norm_eps
        weight = self.random(hidden)
        convention = (weight, eps, 1.0, False)
        yield "rms_norm", [(self.random(tokens, hidden), *convention) for _ in range(sets)]
        yield (
            "add_rms_norm",
            [
                (self.random(tokens, hidden), self.random(tokens, hidden), *convention)
                for _ in range(sets)
            ],
        )
        values = (c.linear_num_value_heads, c.linear_value_head_dim)
        gate_weight = self.random(c.linear_value_head_dim)
        yield (
            "gated_rms_norm",
            [
                (
                    self.random(tokens, *values),
                    self.mixer_row(tokens)[3],
                    gate_weight,
                    eps,
                )
                for _ in range(sets)
            ],
        )
        width = (c.intermediate_size,)
        yield "silu_mul", [tuple(self.columns(tokens, width, width)) for _ in range(sets)]
        dim, heads, kv_heads = c.head_dim, c.num_attention_heads, c.num_key_value_heads
        attention = [
            self.columns(tokens, (heads, 2 * dim), (kv_heads, dim), (kv_heads, dim))
            for _ in range(sets)
        ]
        yield (
            "sigmoid_mul",
            [(self.random(tokens, heads, dim), q[..., dim:]) for q, _, _ in attention],
        )
        weights = self.random(dim), self.random(dim)
        frequency = inv_freq(c).to(self.device)
        yield (
            "qk_norm_rope",
            [
                (q[..., :dim], k, *weights, self.int64(torch.arange(tokens) + 3000), frequency, eps)
                for q, k, _ in attention
            ],
        )
        blocks = -(-sets * tokens // BLOCK_SIZE) + 1
        caches = [self.random(blocks, BLOCK_SIZE, kv_heads, dim) for _ in range(2)]
        places = self.int64(torch.randperm(sets * tokens) + BLOCK_SIZE).split(tokens)
        yield (
            "paged_kv_write",
            [(*caches, k, v, p) for (_, k, v), p in zip(attention, places, strict=True)],
        )

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """A projection that keeps the activations' size."""
        return self.random(outputs, inputs) * inputs**-0.5

    def linears(self, tokens: int, sets: int) -> Iterator[tuple[str, list[Args]]]:
        """The projections of a decode step but the head, with what is fused into them."""
        c = self.config
        hidden, wide = c.hidden_size, c.intermediate_size
        convention = (self.random(hidden), c.rms_norm_eps, 1.0, False)
        mixed = c.conv_dim + c.value_dim + 2 * c.linear_num_value_heads
        qkv = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
        for outputs in (mixed, qkv):
            yield (
                "linear",
                [(self.random(tokens, hidden), self.weight(outputs, hidden)) for _ in range(sets)],
            )
        yield (
            "linear_silu_mul",
            [
                (self.random(tokens, hidden), self.weight(2 * wide, hidden), wide)
                for _ in range(sets)
            ],
        )

        def tail(inputs: int) -> Args:
            return self.weight(hidden, inputs), self.random(tokens, hidden), *convention

        yield (
            "linear_add_rms_norm",
            [(self.random(tokens, wide), *tail(wide)) for _ in range(sets)],
        )
        values = (c.linear_num_value_heads, c.linear_value_head_dim)
        gated_norm = self.random(values[1]), c.rms_norm_eps
        yield (
            "gated_rms_norm_linear_add_rms_norm",
            [
                (
                    self.random(tokens, *values),
                    self.mixer_row(tokens)[3],
                    *gated_norm,
                    *tail(c.value_dim),
                )
                for _ in range(sets)
            ],
        )
        heads = (c.num_attention_heads, c.head_dim)
        yield (
            "sigmoid_mul_linear_add_rms_norm",
            [
                (
                    self.random(tokens, *heads),
                    self.random(tokens, heads[0], 2 * heads[1])[..., heads[1] :],
                    *tail(heads[0] * heads[1]),
                )
                for _ in range(sets)
            ],
        )

    def recurrent_rows(self, tokens: int) -> tuple[Tensor, ...]:
        """q, k, v (of the convolution's output), a, b, A_log, dt_bias."""
        c = self.config
        keys = (c.linear_num_key_heads, c.linear_key_head_dim)
        values = (c.linear_num_value_heads, c.linear_value_head_dim)
        q, k, v = self.columns(tokens, keys, keys, values)
        _, b, a, _ = self.mixer_row(tokens)
        heads = c.linear_num_value_heads
        return q, k, v, a, b, self.random(heads).abs(), self.random(heads)

    def pools(self, slots: int) -> tuple[Tensor, Tensor]:
        """A pool of convolution states and one of recurrent states."""
        c = self.config
        recurrent = (c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim)
        return (
            self.random(slots, c.conv_dim, c.linear_conv_kernel_dim),
            self.random(slots, *recurrent).to(self.state_dtype),
        )

    def stateful(
        self, phase: str, sequences: int, tokens: int, sets: int
    ) -> Iterator[tuple[str, list[Args]]]:
        """The convolution and the delta rule on their pools; each set has slots of its own.

        As the compiled graphs call them: decode reads its states early, and a prefill's delta rule
        takes what its convolution leaves.
        """
        c = self.config
        conv, recurrent = self.pools(sets * sequences + 1)
        slots = self.int64(torch.randperm(sets * sequences) + 1).split(sequences)
        tail: Args = ()
        if phase == "prefill":
            computed = torch.ones(sequences, dtype=torch.int32).to(self.device)
            metadata = chunk_metadata([tokens // sequences] * sequences)
            tail = (computed, *(x.to(self.device) for x in metadata))
        weight = self.random(c.conv_dim, c.linear_conv_kernel_dim)
        xs = [self.mixer_row(tokens)[0] for _ in slots]
        if phase == "decode":
            yield (
                "causal_conv1d_decode_slots",
                [(x, weight, conv, s, True) for x, s in zip(xs, slots, strict=True)],
            )
            yield (
                "fused_gated_delta_rule_decode_slots",
                [(*self.recurrent_rows(tokens), recurrent, s, True) for s in slots],
            )
            return
        heads = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
        yield (
            "causal_conv1d_prefill_slots",
            [(x, weight, conv, s, *tail) for x, s in zip(xs, slots, strict=True)],
        )
        yield (
            "causal_conv1d_qkv_prefill_slots",
            [(x, weight, conv, s, *tail, *heads) for x, s in zip(xs, slots, strict=True)],
        )
        yield (
            "fused_gated_delta_rule_prefill_slots",
            [(*self.normalized_rows(tokens), recurrent, s, *tail, None, True) for s in slots],
        )

    def normalized_rows(self, tokens: int) -> tuple[Tensor, ...]:
        """`recurrent_rows` with q, k and v contiguous, each row of q and k of length 1."""
        q, k, v, *rest = self.recurrent_rows(tokens)
        q, k = (F.normalize(x.float(), dim=-1).to(self.dtype) for x in (q, k))
        return q, k, v.clone(memory_format=torch.contiguous_format), *rest

    def attention(
        self, phase: str, sequences: int, tokens: int, contexts: Sequence[int], sets: int
    ) -> Iterator[tuple[str, list[Args]]]:
        """Attention over the cache, at each context; each set has scattered blocks of its own.

        Args:
            tokens: of all sequences together.
            contexts: tokens of each sequence, this step's among them.
        """
        c = self.config
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        for context in contexts:
            width = -(-context // BLOCK_SIZE)
            count = sets * sequences * width
            caches = [self.random(count + 1, BLOCK_SIZE, kv_heads, dim) for _ in range(2)]
            blocks = self.int32(torch.randperm(count) + 1).view(sets, sequences, width)
            lengths = self.int32(torch.full((sequences,), context))
            tables: list[Args] = [(own,) for own in blocks]
            if phase == "prefill":
                starts = torch.arange(sequences + 1)
                indptr = self.int32(starts * width)
                cu_seqlens = self.int32(starts * (tokens // sequences))
                tables = [(indptr, own.flatten(), cu_seqlens) for own in blocks]
            yield (
                f"paged_attention_{phase}",
                [
                    (self.random(tokens, heads, dim), *caches, *table, lengths, dim**-0.5)
                    for table in tables
                ],
            )

    def decode(
        self, batch: int, sets: int = 1, contexts: Sequence[int] = (130,)
    ) -> Iterator[tuple[str, list[Args]]]:
        """Every op of a decode step over `batch` sequences, with `sets` argument tuples each."""
        return itertools.chain(
            self.token_wise(batch, sets),
            self.linears(batch, sets),
            self.stateful("decode", batch, batch, sets),
            self.attention("decode", batch, batch, contexts, sets),
        )

    def prefill(
        self, tokens: int, sets: int = 1, histories: Sequence[int] = (0,)
    ) -> Iterator[tuple[str, list[Args]]]:
        """Every op of a prefill of one sequence of `tokens`."""
        return itertools.chain(
            self.token_wise(tokens, sets),
            self.stateful("prefill", 1, tokens, sets),
            self.attention("prefill", 1, tokens, [h + tokens for h in histories], sets),
        )


def outputs_of(result: Any) -> list[Tensor]:
    """A result as a list: ops return None, a tensor or a tuple."""
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]


def named(op: Op, args: Args) -> dict[str, Any]:
    """Arguments by the names of the schema; those that have a default may be missing."""
    return {a.name: v for a, v in zip(op.overload._schema.arguments, args, strict=False)}


def traffic(op: Op, args: Args, outputs: list[Tensor]) -> int:
    """Bytes that must move: inputs and outputs once, the used slots of a pool in and out.

    Of a KV cache, the tokens that are written, or those that are attended to.
    """
    given = named(op, args)
    moved = [*outputs]
    for name, value in given.items():
        if name in ("k_cache", "v_cache"):
            if "seq_lens" in given:
                tokens = int(given["seq_lens"].sum())
                moved.append(value[0, :1].expand(tokens, *value.shape[2:]))
            else:
                moved.append(given[name[0]])
        elif name == "state":
            moved += 2 * [value[0].expand(given["slots"].shape[0], *value.shape[1:])]
        elif isinstance(value, Tensor):
            moved.append(value)
    return sum(x.numel() * x.element_size() for x in moved)


def mismatch(op: Op, call: Callable[..., Any], args: Args, dtype: torch.dtype) -> str | None:
    """What is wrong with a call, against the definition in float32; None if nothing is.

    The arguments that an op changes are compared too, and kept: both sides get copies.
    """
    given = named(op, args)
    written = {
        a.name: i
        for i, a in enumerate(op.overload._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    }
    actual_args = [v.clone() if n in written else v for n, v in given.items()]
    exact_args = [
        v.to(torch.float32, copy=True) if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in given.values()
    ]
    actual = outputs_of(call(*actual_args)) + [actual_args[i] for i in written.values()]
    expected = outputs_of(op.definition(*exact_args)) + [exact_args[i] for i in written.values()]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        error = float((a.float() - e).abs().max()) / max(float(e.abs().max()), 1e-30)
        if not error <= op.tolerance[dtype]:
            return f"result {i} is off by {error:.2e} of its largest value"
    return None


def sets_for(bytes_per_call: int) -> int:
    """As many as layers, and enough for a round trip through memory that no cache holds."""
    return min(MAX_SETS, max(CALLS, -(-COLD_BYTES // bytes_per_call)))


def time_call(call: Callable[..., Any], sets: list[Args], captured: bool) -> float:
    """Median microseconds of one call."""
    calls = list(itertools.islice(itertools.cycle(sets), max(CALLS, len(sets))))

    def all_sets() -> None:
        for args in calls:
            call(*args)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            all_sets()
    torch.cuda.current_stream().wait_stream(side)
    replay = all_sets
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_sets()
        replay = graph.replay
    times = []
    for _ in range(3 + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


@dataclass(frozen=True)
class Row:
    """One measurement; microseconds and bytes are of one call, context of attention only."""

    op: str
    tokens: int
    context: int
    implementation: str
    state: str
    captured: bool
    us: float
    bytes: int
    floor_us: float
    ratio: float

    def __str__(self) -> str:
        note = "" if self.captured else "  from Python"
        return (
            f"{self.op:38} {self.tokens:6} {self.context or '':7} {self.implementation:10} "
            f"{self.state:9} {self.us:9.2f} {self.bytes / 1e6:9.3f} {self.floor_us:9.2f} "
            f"{self.ratio:7.2f}{note}"
        )


def measure(
    name: str, tokens: int, shapes: Shapes, sets: list[Args], implementation: Implementation
) -> Row:
    """Check one op, then time it.

    Raises:
        SystemExit: the result is wrong.
    """
    op = OPS[name]
    wrong = mismatch(op, implementation.call, sets[0], shapes.dtype)
    if wrong is not None:
        raise SystemExit(f"{name}, {tokens} tokens, {implementation.name}: {wrong}")
    moved = traffic(op, sets[0], outputs_of(implementation.call(*sets[0])))
    attention = name.startswith("paged_attention")
    captured = implementation.capturable
    us = time_call(implementation.call, sets[: sets_for(moved)], captured)
    floor = moved / BANDWIDTH * 1e6
    state = str(shapes.state_dtype).removeprefix("torch.") if "delta_rule" in name else ""
    context = int(named(op, sets[0])["seq_lens"][0]) if attention else 0
    return Row(
        name, tokens, context, implementation.name, state, captured, us, moved, floor, us / floor
    )


def rows(config: MiniQwenConfig, dtype: torch.dtype, only: re.Pattern[str]) -> Iterator[Row]:
    """Every measurement of a model."""
    phases = (("decode", BATCHES, CONTEXTS), ("prefill", PROMPTS, HISTORIES))
    for state_dtype in (torch.float32, torch.bfloat16):
        shapes = Shapes(config, dtype, "cuda", state_dtype)
        for phase, sizes, contexts in phases:
            for tokens in sizes:
                sets = MAX_SETS if tokens <= 32 else 4
                for name, args in getattr(shapes, phase)(tokens, sets, contexts):
                    seen = state_dtype != torch.float32 and "delta_rule" not in name
                    if seen or not only.search(name):
                        continue
                    implementation, warning = OPS[name].choose(torch.device("cuda"), dtype)
                    if warning:
                        print(warning, file=sys.stderr)
                    yield measure(name, tokens, shapes, args, implementation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="miniqwen08b", help="a file of conf/model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--only", default="", help="a regular expression over op names")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--git-sha", help="of the code that runs, where git cannot say")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/kernels.py times CUDA kernels and finds no GPU")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    config = model_config(options.model)
    print(
        f"{'op':38} {'tokens':>6} {'context':>7} {'kernel':10} {'state':9} {'us':>9} {'MB':>9} "
        f"{'floor us':>9} {'ratio':>7}"
    )
    measured = []
    with torch.inference_mode():
        for row in rows(config, getattr(torch, options.dtype), re.compile(options.only)):
            print(row, flush=True)
            measured.append(asdict(row))
    record = {
        "environment": environment(options.git_sha),
        "model": options.model,
        "dtype": options.dtype,
        "bandwidth": BANDWIDTH,
        "rows": measured,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
