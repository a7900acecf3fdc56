"""Random weights of sane scale, for runs without a checkpoint.

Owns the distribution of each kind of parameter. Owns no names: it knows a kind by the last
segments of a name.

    dummy_weights(parameter_shapes(config), torch.bfloat16, "cuda", seed=0)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

# Range of exp(A_log), and of the step size softplus(dt_bias), as in Mamba-2's initialisation: a
# head's decay per token, exp(-A * dt), then lies between about 0.2 and 0.999.
_A_RANGE = (1.0, 16.0)
_DT_RANGE = (1e-3, 1e-1)
_SPREAD = 0.1  # of norm weights and biases, so that w in place of 1 + w shows


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
    """
    weights = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(_mix(seed, name))
        values = _draw(name.split("."), shape, generator)
        target = (targets or {}).get(name)
        if target is None:
            target = torch.empty(shape, dtype=dtype, device=device)
        weights[name] = target.copy_(values)
    return weights


def _mix(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # manual_seed takes 63 bits


def _draw(parts: list[str], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if parts[-1] == "A_log":
        low, high = _A_RANGE
        return torch.empty(shape).uniform_(low, high, generator=generator).log_()
    if parts[-1] == "dt_bias":
        low, high = (math.log(value) for value in _DT_RANGE)
        dt = torch.empty(shape).uniform_(low, high, generator=generator).exp_()
        return dt + torch.log(-torch.expm1(-dt))  # softplus's inverse
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values.mul_(shape[-1] ** -0.5)
    gated_norm = parts[-3:] == ["mixer", "norm", "weight"]  # its weight is w, the others' 1 + w
    return values.mul_(_SPREAD).add_(1.0 if gated_norm else 0.0)
