"""Random weights of sane scale, for runs without a checkpoint.

Owns the distribution of each kind of parameter. Owns no names: it knows a kind by the last
segments of a name.

    dummy_weights(parameter_shapes(config), torch.bfloat16, "cuda", seed=0)
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Range of exp(A_log), and of the step size softplus(dt_bias), as in Mamba-2's initialisation: a
# head's decay per token, exp(-A * dt), then lies between about 0.2 and 0.999.
_A_RANGE = (1.0, 16.0)
_DT_RANGE = (1e-3, 1e-1)
_SPREAD = 0.1  # of norm weights and biases, so that w in place of 1 + w shows

_BLOCK = 16  # elements that torch draws at once; a tensor may be drawn in pieces of whole blocks
_PIECE = 2**20  # elements of a piece: 4 MB, which stay in a core's cache until they are copied
_MOST_THREADS = 16


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    targets: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """A random tensor for each name in `shapes`, in `dtype` on `device`.

    A parameter named in `targets` is drawn into that tensor, and no other is made for it.

    A tensor's values depend on `seed`, its name and its shape alone: they are drawn on the CPU in
    float32. Matrices have variance 1/fan-in, so that activations keep their scale through any
    number of layers and logits spread by about 1; norm weights lie near the value that scales
    by 1; decays are those of a trained model (`_A_RANGE`, `_DT_RANGE`).

    Each core draws another tensor, the largest first: the numbers of one come one after another.
    Beside the tensors a core holds one piece in float32.
    """
    weights = {}
    for name, shape in shapes.items():
        target = (targets or {}).get(name)
        if target is None:
            target = torch.empty(shape, dtype=dtype, device=device)
        weights[name] = target
    inference = torch.is_inference_mode_enabled()  # a thread does not inherit it

    def fill(name: str) -> None:
        generator = torch.Generator().manual_seed(_mix(seed, name))
        with torch.inference_mode(inference):
            _fill(weights[name], name.split("."), shapes[name], generator)

    largest_first = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
    with ThreadPoolExecutor(min(_cores(), _MOST_THREADS, len(shapes) or 1)) as pool:
        for _ in pool.map(fill, largest_first):
            pass  # an error is raised here, and what has not begun is not drawn
    return weights


def _cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _mix(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # manual_seed takes 63 bits


def _fill(
    target: Tensor, parts: list[str], shape: tuple[int, ...], generator: torch.Generator
) -> None:
    if len(shape) == 1 or math.prod(shape) < _BLOCK:
        target.copy_(_draw(parts, shape, generator))
        return
    width = math.prod(shape[1:])
    pieces = list(_pieces(shape[0], width))
    buffer = torch.empty(
        max(len(rows) for rows in pieces) * width, dtype=torch.float32, device="cpu"
    )
    for rows in pieces:
        values = buffer[: len(rows) * width].normal_(0, shape[-1] ** -0.5, generator=generator)
        target[rows.start : rows.stop].copy_(values.view(len(rows), *shape[1:]))


def _pieces(rows: int, width: int) -> Iterator[range]:
    """The rows that are drawn together, so that the values are those of one draw of all.

    Each piece but the last is made of whole blocks, and the last holds a block at least.
    """
    step = max(_PIECE // width, 1)
    step = -(-step // _BLOCK) * _BLOCK
    starts = list(range(0, rows, step))
    if len(starts) > 1 and (rows - starts[-1]) * width < _BLOCK:
        starts.pop()
    for start, stop in zip(starts, [*starts[1:], rows], strict=True):
        yield range(start, stop)


def _draw(parts: list[str], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if parts[-1] == "A_log":
        low, high = _A_RANGE
        return values.uniform_(low, high, generator=generator).log_()
    if parts[-1] == "dt_bias":
        low, high = (math.log(value) for value in _DT_RANGE)
        dt = values.uniform_(low, high, generator=generator).exp_()
        return dt + torch.log(-torch.expm1(-dt))  # softplus's inverse
    values.normal_(generator=generator)
    if len(shape) > 1:
        return values.mul_(shape[-1] ** -0.5)
    gated_norm = parts[-3:] == ["mixer", "norm", "weight"]  # its weight is w, the others' 1 + w
    return values.mul_(_SPREAD).add_(1.0 if gated_norm else 0.0)
