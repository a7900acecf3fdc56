"""The Triton kernels that read and write slots of states, interpreted; of convolutions, the most
stands in `interpreted_convolutions.py`.

Run by `test_slots_interpreted.py`, in a process of its own.
"""

from __future__ import annotations

from typing import Any

import chunk_state_arguments as states
import pytest
import test_ops
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from interpreted_kernels import (
    CONVOLUTIONS,
    FAR,
    KERNELS,
    assert_as_defined,
    example,
)

from minivllm.ops import OPS
from minivllm.ops.kernels import kernel
from minivllm.ops.kernels.numerics import softplus

pytest_plugins = ["interpreted_fixtures"]

chunk_states = kernel("chunk_states", "chunk_states")


def test_softplus_keeps_small_values() -> None:
    x = torch.tensor(
        [-80.0, -30.0, -17.5, -5.0, -1e-3, 0.0, 3.0, 15.9, 16.7, 20.0, 20.1, 88.0, 500.0]
    )

    @triton.jit
    def run(x, y, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(y + i, softplus(tl.load(x + i)))

    x = F.pad(x, (0, 16 - len(x)))
    y = torch.empty(16)
    run[(1,)](x, y, SIZE=16)
    torch.testing.assert_close(y, F.softplus(x.double()).float(), rtol=5e-7, atol=0)


@triton.jit
def _places(x, y):
    tl.store(y, tl.load(x) * 65536)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_that_overflows_is_an_error(dtype: torch.dtype) -> None:
    """As `interpreted_fixtures` promises of all that runs in the interpreter."""
    x, y = torch.tensor([65536], dtype=dtype), torch.zeros(1, dtype=torch.int64)
    if dtype == torch.int32:
        with pytest.raises(Exception, match="mul overflows"):
            _places[(1,)](x, y)
    else:
        _places[(1,)](x, y)
        assert y.item() == 2**32


def test_strong_gates() -> None:
    """Decays of nearly 0 and nearly 1, and projections past softplus's threshold."""
    args = example("fused_gated_delta_rule_decode_slots")
    a, A_log = args[3], args[5]
    a[0], a[1], a[2] = -40.0, 30.0, 21.0
    A_log.fill_(2.7)
    assert_as_defined("fused_gated_delta_rule_decode_slots", args)


def test_vectors_of_zeros_have_no_direction() -> None:
    args = example("fused_gated_delta_rule_decode_slots")
    args[0].zero_(), args[1].zero_()
    assert_as_defined("fused_gated_delta_rule_decode_slots", args)


@pytest.mark.parametrize(
    "name", ["causal_conv1d_decode_slots", "fused_gated_delta_rule_decode_slots"]
)
def test_padding_rows_share_a_slot_of_nan(name: str) -> None:
    """Their outputs are written, whatever they are, and reach no other row."""
    args, op = example(name), OPS[name]
    at = [a.name for a in op.overload._schema.arguments].index("state")
    state, slots = args[at : at + 2]
    slots[[1, 3, 4]] = 0
    exact = test_ops.clones(args)
    y, expected = KERNELS[name].call(*args), op.definition(*exact)
    real = torch.tensor([0, 2])
    test_ops.assert_near(y[real], expected[real], op.tolerance[torch.float32])
    places = slots[real]
    test_ops.assert_near(state[places], exact[at][places], op.tolerance[torch.float32])
    assert state[1:].isnan().any(), "no slot was poisoned"
    state[0] = 1.0  # now with a clean padding slot: every row must come out finite
    assert KERNELS[name].call(*args).isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "causal_conv1d_decode_slots",
        *CONVOLUTIONS,
        "fused_gated_delta_rule_decode_slots",
    ],
)
def test_far_slots(name: str, far: Any) -> None:
    args = list(example(name, torch.bfloat16))
    at = [a.name for a in OPS[name].overload._schema.arguments].index("state")
    near, slots = args[at].nan_to_num(), args[at + 1]
    args[at], expected_args = near, test_ops.clones(tuple(args))
    expected = KERNELS[name].call(*expected_args)
    pool, shift = far(FAR + 1, *near.shape[1:]), FAR + 1 - near.shape[0]
    pool[slots + shift] = near[slots]
    args[at : at + 2] = pool, slots + shift
    if name in CONVOLUTIONS:
        kept = args[-1][args[-1] > 0].long()
        args[-1] = torch.where(args[-1] > 0, args[-1] + shift, 0).int()
        slots = torch.cat([slots, kept])
    actual = test_ops.listed(KERNELS[name].call(*args))
    for a, e in zip(actual, test_ops.listed(expected), strict=True):
        assert torch.equal(a, e)
    assert torch.equal(pool[slots + shift], expected_args[at][slots])


def test_far_states_by_chunks(far: Any) -> None:
    """The state that a sequence starts from, where it ends, and a snapshot between."""
    near = states.arguments([65, 3], [64, 0], entries=7, kept={0: 5}, K=8, V=3, heads=2)
    pool, at = far(FAR + 1, 2, 3, 8), near.state.shape[0] - 1
    far_places = near._replace(
        state=pool,
        slots=near.slots + FAR - at,
        chunk_slots=torch.where(near.chunk_slots > 0, near.chunk_slots + FAR - at, 0).int(),
    )
    pool[FAR - at :] = near.state.nan_to_num().bfloat16()
    near = near._replace(state=near.state.nan_to_num().bfloat16())
    for got, expected in zip(chunk_states(*far_places), chunk_states(*near), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(pool[FAR - at :], near.state)
