"""Make the embedded default model `minivllm/assets/tiny/`: a small, really trained MiniQwen.

    python scripts/tiny_corpus.py ...          # its three stages, once -> .train/
    python scripts/train_tiny.py --minutes 6   # -> minivllm/assets/tiny/

The model is transformers' own `Qwen3_5ForCausalLM`, saved by `save_pretrained`, so the folder is an
independent check of our loader. Training needs the `train` extra and a CUDA GPU: FLA's Triton
kernels run the delta rule, the convolution and the gated norm, and one CUDA graph holds a whole
step, which launched kernel by kernel would wait for the host. `--device cpu` takes transformers'
pure torch path (slow: for smoke tests only, `--minutes 0.5 --batch-tokens 2048 --seq-len 256`).

Before the first step, what fails is given up: the run starts again without the fused kernels, or
without the graph, within the same minutes.

Shapes: B rows, T tokens a row.
"""
# ruff: noqa: E402  # the clock starts before torch is imported

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

START = time.monotonic()  # the budget counts imports and kernel compilation too

import torch
from tiny_corpus import Encoded, UsageError, load_encoded, run, versions
from tiny_data import Batches, HeldOut, mixture
from tiny_kernels import (
    NEEDS_GPU,
    bind_delta_rule,
    check_delta_rule,
    check_fused_kernels,
    fused_kernels,
    skip_autotuning,
)
from tiny_model import (
    PADDED_VOCAB_SIZE,
    add_dropout,
    build_model,
    complete,
    token_bytes,
    token_losses,
)
from tiny_report import check_saved, save, write_report
from tiny_sources import SOURCES

STEPS_A_DRAW = 256
PROMPTS = {
    "English": "It is a truth universally acknowledged, that",
    "Story": "Once upon a time",
    "Chinese": "床前明月光，",
    "Python": "def read_json(path):\n",
}


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hyperparameters:
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    warmup: float = 0.02  # as a share of the training time
    # A run sees the text some twenty times, its small sources more often still: against learning
    # them by heart, dropout and twice the usual decay.
    weight_decay: float = 0.2
    dropout: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = 1.0


HYPER = Hyperparameters()


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine, over the elapsed share of the time budget."""
    if progress < HYPER.warmup:
        return HYPER.peak_learning_rate * progress / HYPER.warmup
    phase = min(1.0, (progress - HYPER.warmup) / (1 - HYPER.warmup))
    span = HYPER.peak_learning_rate - HYPER.final_learning_rate
    return HYPER.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * phase))


class Step:
    """One optimiser step whose inputs and results are tensors that stay where they are.

    `starts` [B] and `rate` are written before it runs; `loss_sum` and `norm_sum` grow by the step's
    loss and gradient norm. Nothing in it waits for the device, so `capture` can make a CUDA graph
    of it.
    """

    def __init__(self, model, batches: Batches, device: str):
        self.model = model
        self.batches = batches
        self.starts = batches.starts(1)[0]
        self.rate, self.loss_sum, self.norm_sum = (torch.zeros((), device=device) for _ in range(3))
        # Norms, A_log, dt_bias and every other vector are not decayed.
        decay = {True: HYPER.weight_decay, False: 0.0}
        groups = [
            {
                "params": [p for p in model.parameters() if (p.ndim >= 2) == matrix],
                "weight_decay": decay[matrix],
            }
            for matrix in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=HYPER.betas, fused=True, capturable=device == "cuda"
        )
        self.launch: Callable[[], None] = self.compute

    def compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = token_losses(self.model, self.batches.gather(self.starts)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), HYPER.gradient_clip)
        self.optimizer.step()
        self.loss_sum += loss.detach()
        self.norm_sum += norm

    def warm_up(self) -> None:
        """Compile the kernels and allocate the optimiser's state, at a learning rate of zero."""
        self.rate.zero_()
        for _ in range(3):
            self.compute()
        parameters = self.model.named_parameters()
        dead = [name for name, p in parameters if p.grad is None or not p.grad.any()]
        if dead:
            raise RuntimeError(f"no gradient reaches {dead}")

    def capture(self) -> None:
        """Make `launch` replay one CUDA graph; the graph's first loss must be the eager one."""
        # Work before a capture belongs on another stream than the default one.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)  # the graph allocates gradients of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.compute()
        pairs = []
        for launch in (graph.replay, graph.replay, self.compute):
            self.loss_sum.zero_()
            self.norm_sum.zero_()
            launch()
            pairs.append([self.loss_sum.item(), self.norm_sum.item()])
        print(f"graph's loss and gradient norm {pairs[:2]}, eager {pairs[2]}", flush=True)
        for value, eager in zip(pairs[1], pairs[2], strict=True):
            if not abs(value - eager) < 0.2 * eager:  # dropout differs from step to step
                raise RuntimeError("the CUDA graph does not compute the step")
        self.launch = graph.replay

    def __call__(self, starts: torch.Tensor, rate: float) -> None:
        self.starts.copy_(starts)
        self.rate.fill_(rate)
        self.launch()

    def take_means(self, steps: int) -> tuple[float, float]:
        """Mean loss and gradient norm of the last `steps` steps; waits for the device."""
        loss, norm = self.loss_sum.item() / steps, self.norm_sum.item() / steps
        self.loss_sum.zero_()
        self.norm_sum.zero_()
        return loss, norm


class Throttle:
    """Keeps the host two launches ahead of the device at most: the schedule goes by the clock."""

    def __init__(self, device: str):
        on = device == "cuda"
        self.events = [torch.cuda.Event(blocking=True) for _ in range(2)] if on else []

    def __call__(self) -> None:
        if self.events:
            self.events[0].synchronize()
            self.events[0].record()
            self.events.reverse()


def optimise(step: Step, deadline: float, device: str, evaluate_now: Callable[[], float]) -> dict:
    """Train until `deadline` (monotonic seconds); returns counts and the loss curve."""
    step.take_means(1)  # forget the warm-up's
    wait = Throttle(device)
    begin = last = time.monotonic()
    span = max(1.0, deadline - begin)
    steps, recent, curve, evaluated, mean = 0, 0, [], False, math.nan
    starts: Iterator[torch.Tensor] = iter(())
    while (now := time.monotonic()) < deadline:
        rate = learning_rate((now - begin) / span)
        position = next(starts, None)
        if position is None:
            starts = iter(step.batches.starts(STEPS_A_DRAW))
            position = next(starts)
        step(position, rate)
        wait()
        steps, recent = steps + 1, recent + 1
        if now - last > 10:
            mean, norm = step.take_means(recent)
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss became {mean} before step {steps}")
            elapsed = time.monotonic() - last
            print(
                f"{now - begin:5.0f} s  step {steps:5}  loss {mean:.4f}  norm {norm:.2f}"
                f"  lr {rate:.2e}  {recent / elapsed:.2f} steps/s",
                flush=True,
            )
            curve.append({"step": steps, "train_nats_per_token": round(mean, 4)})
            last, recent = time.monotonic(), 0
        if not evaluated and now - begin > span / 2:
            curve.append({"step": steps, "held_out_nats_per_token": evaluate_now()})
            evaluated = True
    mean = step.take_means(recent)[0] if recent else mean  # of the steps since the last line
    seconds = time.monotonic() - begin
    named = dict(step.model.named_parameters())
    gates = {
        kind: torch.cat([p.detach() for name, p in named.items() if name.endswith(kind)])
        for kind in ("A_log", "dt_bias")
    }
    return {
        "gate_ranges": {kind: [p.min().item(), p.max().item()] for kind, p in gates.items()},
        "steps": steps,
        "tokens": steps * step.batches.rows * (len(step.batches.window) - 1),
        "train_nats_per_token": round(mean, 4),
        "seconds": round(seconds, 1),
        "steps_per_second": round(steps / seconds, 3),
        "curve": curve,
    }


# --- run --------------------------------------------------------------------------------------


def elapsed(args: argparse.Namespace) -> float:
    """Seconds since the first start."""
    return time.monotonic() - START + args.elapsed


@contextlib.contextmanager
def without(flag: str, possible: bool, args: argparse.Namespace) -> Iterator[None]:
    """If what is within fails and `flag` can still be given up, start the program again so."""
    try:
        yield
    except Exception as error:
        if not possible or isinstance(error, UsageError):
            raise
        print(f"failed: {type(error).__name__}: {error}\nstarting again with {flag}", flush=True)
        spent = ["--elapsed", f"{elapsed(args):.1f}"]
        os.execv(sys.executable, [sys.executable, *sys.argv, flag, *spent])


def prepare_kernels(args: argparse.Namespace, rows: int) -> dict:
    """Bind and check the kernels; their names and errors, for training.json."""
    choice = args.delta_rule if args.device == "cuda" else "torch"
    kernel = bind_delta_rule(choice)
    if choice == "fla" and args.fast_kernels:
        skip_autotuning()
    shape = (rows, args.seq_len) if args.device == "cuda" else (2, 256)
    facts = {"delta_rule": kernel, "delta_rule_errors": check_delta_rule(args.device, *shape)}
    if choice == "fla" and args.fast_kernels:
        facts["fused_kernel_errors"] = check_fused_kernels(args.device, *shape)
    return facts


def train(args: argparse.Namespace) -> None:
    def tell(what: str) -> None:
        print(f"{elapsed(args):5.0f} s  {what}", flush=True)

    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UsageError(NEEDS_GPU)
    rows, rest = divmod(args.batch_tokens, args.seq_len)
    if args.seq_len % 64 or rest or rows < len(PROMPTS):
        raise UsageError(
            f"seq-len {args.seq_len} must be a multiple of 64 and divide batch-tokens "
            f"{args.batch_tokens} at least {len(PROMPTS)} times"
        )
    torch.manual_seed(args.seed)
    fused = cuda and args.fast_kernels and args.delta_rule == "fla"
    with without("--no-fast-kernels", fused, args):
        kernels = prepare_kernels(args, rows)
    tell(f"kernels: {kernels}")

    encoded: Encoded = load_encoded(args.encoded)
    tokenizer = encoded.tokenizer
    unique = {name: len(stream) for name, stream in encoded.train.items()}
    tell(f"corpus: {sum(unique.values()):,} tokens {unique}")
    model = build_model(tokenizer, args.device)
    add_dropout(model, HYPER.dropout)
    bytes_of = token_bytes(tokenizer)
    held_out = HeldOut(
        encoded.held_out, rows, args.seq_len, bytes_of, args.device, args.held_out_tokens
    )
    step = Step(
        model, Batches(encoded.train, rows, args.seq_len, args.seed, args.device), args.device
    )

    def losses_of(some_model) -> dict[str, dict[str, float]]:
        was_training = some_model.training
        some_model.eval()
        losses = held_out.evaluate(lambda tokens: token_losses(some_model, tokens))
        some_model.train(was_training)
        tell(f"held out {mixture(losses, 'nats_per_token'):.4f} nats/token")
        return losses

    def evaluate_now() -> float:
        return mixture(losses_of(model), "nats_per_token")

    model.train()
    budget = args.minutes * 60
    reserve = min(25.0, budget / 4)  # evaluates and saves
    deadline = time.monotonic() + budget - elapsed(args) - reserve
    with fused_kernels(model) if fused else contextlib.nullcontext():
        with without("--no-cuda-graph", cuda and args.cuda_graph, args):
            if cuda and args.cuda_graph:
                step.capture()
            else:
                step.warm_up()
        tell("ready")
        result = optimise(step, deadline, args.device, evaluate_now)
        with torch.no_grad():  # from here on the weights are those of the file
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        losses = losses_of(model)

    save(model, tokenizer, encoded.tokenizer_files, args.out)
    check_saved(args.out, encoded.samples, tokenizer)
    reloaded = (
        type(model)
        .from_pretrained(args.out, dtype=torch.float32, attn_implementation="sdpa")
        .to(args.device)
        .eval()
    )
    # transformers' own convolution and norms round elsewhere than the fused ones.
    gap = mixture(losses_of(reloaded), "nats_per_token") - mixture(losses, "nats_per_token")
    if abs(gap) > 5e-3:
        raise RuntimeError(f"the reloaded model's loss differs by {gap} nats a token")

    completions = complete(reloaded, tokenizer, PROMPTS, (rows, args.seq_len))
    for name, text in completions.items():
        print(f"--- {name}\n{text}", flush=True)
    packages = ["torch", "triton", "transformers", "tokenizers", "flash-linear-attention"]
    report = {
        **result,
        "held_out_nats_per_token": mixture(losses, "nats_per_token"),
        "held_out_bits_per_byte": mixture(losses, "bits_per_byte"),
        "held_out": losses,
        "reloaded_gap": round(gap, 5),
        "parameters": sum(p.numel() for p in model.parameters()),
        "padded_vocab_size": PADDED_VOCAB_SIZE,
        "weight_bytes": sum(path.stat().st_size for path in args.out.glob("*.safetensors")),
        "weights": {source.name: source.weight for source in SOURCES},
        "unique_tokens": unique,
        "batch_tokens": args.batch_tokens,
        "seq_len": args.seq_len,
        "hyperparameters": HYPER.__dict__,
        "seed": args.seed,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda_graph": cuda and args.cuda_graph,
        **kernels,
        **encoded.about,
        "versions": versions(packages),
        "completions": completions,
        "total_seconds": round(elapsed(args), 1),
    }
    write_report(args.out, report)
    summary = ("steps", "tokens", "held_out_nats_per_token", "weight_bytes", "total_seconds")
    print(json.dumps({key: report[key] for key in summary}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--encoded", type=Path, default=Path(".train"), help="what `tiny_corpus.py tokenize` left")
    add("--out", type=Path, default=Path("minivllm/assets/tiny"))
    add("--minutes", type=float, default=6.0, help="wall clock, all included")
    add("--elapsed", type=float, default=0.0, help="seconds of it already spent, after a restart")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--delta-rule", choices=["fla", "torch"], default="fla")
    add("--no-fast-kernels", dest="fast_kernels", action="store_false")
    add("--no-cuda-graph", dest="cuda_graph", action="store_false")
    # Half the tokens of a large batch buy twice the steps, which a short run needs more.
    add("--batch-tokens", type=int, default=32768)
    add("--seq-len", type=int, default=1024)
    add("--held-out-tokens", type=int, help="evaluate at most so many a source")
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    run(train, parse_arguments())
