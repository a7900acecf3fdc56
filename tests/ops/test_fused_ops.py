"""The fused ops against the plain model's own code, and their slot forms against visible steps.

To the bit: a compiler pass that puts such an op into a graph must change no number on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.model.miniqwen import (
    GatedRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    apply_rotary,
    l2_normalize,
    log_decay,
)
from minivllm.ops import OPS
from minivllm.ops.chunks import chunk_metadata

ops = torch.ops.minivllm
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 64)])
def test_the_models_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(shape[-1])
    module: Any = SimpleNamespace(weight=weight.to(dtype), eps=1e-6)
    arguments = module.weight, 1e-6, 1.0, False
    assert torch.equal(ops.rms_norm(x, *arguments), RMSNorm.forward(module, x))
    normed, total = ops.add_rms_norm(x, y, *arguments)
    assert torch.equal(total, y + x)
    assert torch.equal(normed, RMSNorm.forward(module, y + x))
    gated = ops.gated_rms_norm(x, y, module.weight, 1e-6)
    assert torch.equal(gated, GatedRMSNorm.forward(module, x, y))


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_models_norms(dtype: torch.dtype) -> None:
    """The weight in float32 without the one, and Llama's behind the cast."""
    x, weight = randn(5, 96, dtype=dtype), randn(96, dtype=dtype, seed=1)
    normalized = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    plain = (normalized * weight.float()).to(dtype)
    llama = weight * normalized.to(dtype)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5, 0.0, False), plain)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5, 0.0, True), llama)
    if dtype != torch.float32:
        assert not torch.equal(plain, llama)


def test_an_offset_behind_the_cast_has_no_meaning() -> None:
    with pytest.raises(AssertionError, match="cast_first knows no offset"):
        ops.rms_norm(randn(2, 8), randn(8), 1e-6, 1.0, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_gates(dtype: torch.dtype) -> None:
    gate, up = 3 * randn(7, 50, dtype=dtype), randn(7, 50, dtype=dtype, seed=1)
    assert torch.equal(ops.silu_mul(gate, up), F.silu(gate) * up)
    x, wide = randn(7, 3, 20, dtype=dtype), randn(7, 3, 40, dtype=dtype, seed=1)
    _, half = wide.chunk(2, dim=-1)
    assert torch.equal(ops.sigmoid_mul(x, half), x * half.sigmoid())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_linears(dtype: torch.dtype) -> None:
    """Each is what the plain model does around a projection, with every rounding in its place."""
    x, residual = randn(7, 48, dtype=dtype), randn(7, 40, dtype=dtype, seed=1)
    weight, merged = randn(40, 48, dtype=dtype, seed=2), randn(2 * 24, 48, dtype=dtype, seed=3)
    assert torch.equal(ops.linear(x, weight), F.linear(x, weight))
    gate, up = F.linear(x, merged[:21]), F.linear(x, merged[24:45])
    # a merged product may be summed in another order than its parts
    limit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        ops.linear_silu_mul(x, merged, 21), F.silu(gate) * up, rtol=limit, atol=20 * limit
    )
    norm: Any = SimpleNamespace(weight=randn(40, dtype=dtype, seed=4), eps=1e-6)
    tail = weight, residual, norm.weight, 1e-6, 1.0, False

    def expected(x: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + F.linear(x, weight)
        return RMSNorm.forward(norm, total), total

    heads = x.unflatten(-1, (3, 16))
    z = randn(7, 3, 16, dtype=dtype, seed=5)
    gated_norm: Any = SimpleNamespace(weight=randn(16, dtype=dtype, seed=6), eps=1e-3)
    for actual, made in (
        (ops.linear_add_rms_norm(x, *tail), x),
        (
            ops.gated_rms_norm_linear_add_rms_norm(heads, z, gated_norm.weight, 1e-3, *tail),
            GatedRMSNorm.forward(gated_norm, heads, z).flatten(1),
        ),
        (
            ops.sigmoid_mul_linear_add_rms_norm(heads, z, *tail),
            (heads * z.sigmoid()).flatten(1),
        ),
    ):
        for a, e in zip(actual, expected(made), strict=True):
            assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [8, 32])
def test_the_models_norm_and_rotation(rotary_dim: int, dtype: torch.dtype) -> None:
    q, k = randn(5, 4, 32, dtype=dtype), randn(5, 2, 32, dtype=dtype, seed=1)
    weights = [randn(32, dtype=dtype, seed=seed) for seed in (2, 3)]
    positions = torch.tensor([0, 1, 7, 3000, 200_001])
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    rotary: Any = SimpleNamespace(inv_freq=inv_freq)
    angles = RotaryEmbedding.forward(rotary, positions, dtype)
    actual = ops.qk_norm_rope(q, k, *weights, positions, inv_freq, 1e-6)
    for a, x, weight in zip(actual, (q, k), weights, strict=True):
        module: Any = SimpleNamespace(weight=weight, eps=1e-6)
        assert torch.equal(a, apply_rotary(RMSNorm.forward(module, x), *angles))


def raw(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, a, b, A_log, dt_bias of 2 key and 4 value heads."""
    shapes = ((tokens, 2, 16), (tokens, 2, 16), (tokens, 4, 24), (tokens, 4), (tokens, 4), 4, 4)
    return tuple(
        3 * randn(*((s,) if isinstance(s, int) else s), dtype=dtype, seed=i)
        for i, s in enumerate(shapes)
    )


def folded(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the plain model hands to the rule."""
    q, k, v, a, b, A_log, dt_bias = args
    return l2_normalize(q), l2_normalize(k), v, log_decay(a, A_log, dt_bias), b.sigmoid()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_models_delta_rule(dtype: torch.dtype) -> None:
    args = raw(70, dtype)
    assert torch.equal(ops.fused_gated_delta_rule(*args), ops.gated_delta_rule(*folded(args)))
    state, metadata = randn(2, 4, 24, 16), chunk_metadata([3, 67])
    for a, e in zip(
        ops.fused_gated_delta_rule_prefill(*args, state, *metadata),
        ops.gated_delta_rule_prefill(*folded(args), state, *metadata),
        strict=True,
    ):
        assert torch.equal(a, e)
    args, state = raw(5, dtype), randn(5, 4, 24, 16)
    for a, e in zip(
        ops.fused_gated_delta_rule_decode(*args, state),
        ops.gated_delta_rule_decode(*folded(args), state),
        strict=True,
    ):
        assert torch.equal(a, e)


STATES: dict[str, tuple[Callable[[int], tuple[Tensor, ...]], tuple[int, ...]]] = {
    "causal_conv1d": (lambda n: (randn(n, 20), randn(20, 4, seed=1)), (20, 4)),
    "fused_gated_delta_rule": (raw, (4, 24, 16)),
}


@pytest.mark.parametrize("name", STATES)
def test_a_decode_step_is_gather_op_scatter(name: str) -> None:
    make, shape = STATES[name]
    args, pool = make(3), randn(9, *shape, seed=9)
    slots = torch.tensor([7, 2, 5])
    expected, new = getattr(ops, f"{name}_decode")(*args, pool[slots])
    kept = pool.clone()
    kept[slots] = new
    assert torch.equal(getattr(ops, f"{name}_decode_slots")(*args, pool, slots), expected)
    assert torch.equal(pool, kept)


@pytest.mark.parametrize("name", STATES)
def test_a_prefill_is_masked_gather_op_scatter(name: str) -> None:
    make, shape = STATES[name]
    lengths, computed = (5, 1, 66), torch.tensor([0, 3, 64], dtype=torch.int32)
    args, pool = make(sum(lengths)), randn(9, *shape, seed=9)
    slots, metadata = torch.tensor([7, 2, 5]), chunk_metadata(lengths)
    initial = pool[slots]
    initial[0] = 0.0
    pool[7] = torch.nan  # its last owner's
    expected, new = getattr(ops, f"{name}_prefill")(*args, initial, *metadata)
    kept = pool.clone()
    kept[slots] = new
    slot_form = getattr(ops, f"{name}_prefill_slots")
    assert torch.equal(slot_form(*args, pool, slots, computed, *metadata), expected)
    assert torch.equal(pool, kept)


@pytest.mark.parametrize("name", STATES)
def test_steps_on_a_slot_are_the_sequence(name: str) -> None:
    """A prefill that starts in a slot of NaN, then a later chunk, then single steps."""
    make, shape = STATES[name]
    tokens, ends = 80, (3, 70, 71, 72, 80)
    args = make(tokens)
    whole = getattr(ops, name)(*args)
    pool, slots = torch.full((3, *shape), torch.nan), torch.tensor([2])
    pieces, start = [], 0
    for end in ends:
        rows = tuple(x[start:end] if x.shape[0] == tokens else x for x in args)
        if end - start == 1:
            pieces.append(getattr(ops, f"{name}_decode_slots")(*rows, pool, slots))
        else:
            computed = torch.tensor([start], dtype=torch.int32)
            slot_form = getattr(ops, f"{name}_prefill_slots")
            pieces.append(slot_form(*rows, pool, slots, computed, *chunk_metadata([end - start])))
        start = end
    limit = 1e-5 * float(whole.abs().max())
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=limit)
    assert pool[:2].isnan().all()


@pytest.mark.parametrize("name", STATES)
def test_padding_rows_share_slot_0(name: str) -> None:
    make, shape = STATES[name]
    args, pool = make(5), randn(9, *shape, seed=9)
    slots = torch.tensor([7, 0, 5, 0, 0])
    pool[0] = torch.nan
    expected, new = getattr(ops, f"{name}_decode")(*args, pool[slots])
    y = getattr(ops, f"{name}_decode_slots")(*args, pool, slots)
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert torch.equal(pool[[7, 5]], new[[0, 2]])


@pytest.mark.parametrize("name", STATES)
def test_a_sequence_without_tokens_leaves_its_slot_alone(name: str) -> None:
    make, shape = STATES[name]
    args, pool = make(4), randn(9, *shape, seed=9)
    kept, slots = pool.clone(), torch.tensor([7, 2, 5])
    computed = torch.tensor([0, 0, 8], dtype=torch.int32)
    slot_form = getattr(ops, f"{name}_prefill_slots")
    slot_form(*args, pool, slots, computed, *chunk_metadata([4, 0, 0]))
    changed = (pool != kept).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [7]


def test_importing_the_ops_imports_no_kernel() -> None:
    code = (
        "import sys, minivllm.ops; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('triton', 'fla')"
        " or m.startswith('minivllm.ops.kernels.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_kernel_has_a_readable_name() -> None:
    """As it stands in the code of a bound graph."""
    calls = [
        implementation.call
        for op in OPS.values()
        for implementation in op.implementations
        if implementation.package == "triton"
    ]
    named = {call.__name__ for call in calls}
    assert len(named) == len(calls) > 16 and all(name.endswith("_triton") for name in named)
