"""The causal convolution against `torch.nn.functional.conv1d` and SiLU in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.chunks import chunk_metadata

ops = torch.ops.minivllm

CHANNELS = 20
TOLERANCE = 1e-6  # of the largest expected value


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def formula(x: Tensor, weight: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence in float64: its outputs `[T, C]` and its last W inputs `[C, W]`.

    Args:
        history: `[C, W]`, the W inputs before x.
    """
    taps = weight.shape[1]
    inputs = torch.cat([history, x.T], dim=1).double()
    y = F.conv1d(inputs[None], weight.double()[:, None], groups=x.shape[1])[0]
    return F.silu(y[:, 1:]).T, inputs[:, -taps:]


def prefill(
    x: Tensor, weight: Tensor, state: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return ops.causal_conv1d_prefill(x, weight, state, *chunk_metadata(lengths))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize("taps", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64, 65])
def test_a_whole_sequence_starts_from_zeros(length: int, taps: int) -> None:
    x, weight = randn(length, CHANNELS), randn(CHANNELS, taps, seed=1)
    expected, _ = formula(x, weight, torch.zeros(CHANNELS, taps))
    assert_near(ops.causal_conv1d(x, weight), expected)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 64, 65])
def test_a_sequence_with_history(length: int, taps: int) -> None:
    x, weight = randn(length, CHANNELS), randn(CHANNELS, taps, seed=1)
    state = randn(1, CHANNELS, taps, seed=2)
    y, new_state = prefill(x, weight, state, [length])
    assert y.shape == (length, CHANNELS)
    if length:
        assert_near(y, formula(x, weight, state[0])[0])
    expected = torch.cat([state[0], x.T], dim=1)[:, -taps:]
    assert torch.equal(new_state[0], expected)  # inputs are copied, never computed


@pytest.mark.parametrize(
    "lengths", [(1,), (0, 1), (2, 0, 3), (1, 1, 1, 1), (5, 4, 3, 2, 1, 0), (70, 0, 0, 2), (0, 0)]
)
def test_packed_sequences_keep_apart(lengths: tuple[int, ...]) -> None:
    x, weight = randn(sum(lengths), CHANNELS), randn(CHANNELS, 4, seed=1)
    states = randn(len(lengths), CHANNELS, 4, seed=2)
    y, new_states = prefill(x, weight, states, lengths)
    start = 0
    for n, length in enumerate(lengths):
        mine = x[start : start + length]
        if length:
            assert_near(y[start : start + length], formula(mine, weight, states[n])[0])
        assert torch.equal(new_states[n], torch.cat([states[n], mine.T], dim=1)[:, -4:])
        start += length
    assert start == y.shape[0]


@pytest.mark.parametrize("cuts", [(0,), (1,), (2,), (3,), (4,), (5,), (1, 2, 3, 4), (2, 2, 7)])
def test_a_state_carries_over_any_split(cuts: tuple[int, ...]) -> None:
    x, weight, start_state = randn(9, CHANNELS), randn(CHANNELS, 4, seed=1), torch.zeros(1, 20, 4)
    pieces, state = [], start_state
    for start, end in zip((0, *cuts), (*cuts, 9), strict=True):
        y, state = prefill(x[start:end], weight, state, [end - start])
        pieces.append(y)
    assert_near(torch.cat(pieces), prefill(x, weight, start_state, [9])[0].double())
    assert_near(torch.cat(pieces), formula(x, weight, start_state[0])[0])
    assert torch.equal(state[0], x[-4:].T)


def test_steps_are_the_sequence() -> None:
    x, weight = randn(7, CHANNELS), randn(CHANNELS, 4, seed=1)
    state = randn(1, CHANNELS, 4, seed=2)
    expected, expected_state = formula(x, weight, state[0])
    steps = []
    for t in range(7):
        y, state = ops.causal_conv1d_decode(x[t : t + 1], weight, state)
        steps.append(y)
    assert_near(torch.cat(steps), expected)
    assert torch.equal(state[0].double(), expected_state)


def test_the_oldest_entry_of_a_state_is_never_read() -> None:
    """A state holds W inputs; an output reads itself and W - 1 of them."""
    x, weight, state = randn(3, CHANNELS), randn(CHANNELS, 4, seed=1), randn(1, CHANNELS, 4, seed=2)
    expected = prefill(x, weight, state, [3])[0]
    state[:, :, 0] = torch.nan
    assert torch.equal(prefill(x, weight, state, [3])[0], expected)
    y, new_state = ops.causal_conv1d_decode(x[:1], weight, state)
    assert_near(y, expected[:1].double())
    assert not new_state.isnan().any()


@pytest.mark.parametrize("poisoned", [0, 1, 2, 3])
def test_nan_stays_in_its_sequence(poisoned: int) -> None:
    lengths = (3, 1, 0, 5)
    x, weight = randn(9, CHANNELS), randn(CHANNELS, 4, seed=1)
    states = randn(4, CHANNELS, 4, seed=2)
    clean_y, clean_states = prefill(x, weight, states, lengths)
    start = sum(lengths[:poisoned])
    x[start : start + lengths[poisoned]] = torch.nan
    states[poisoned] = torch.nan
    y, new_states = prefill(x, weight, states, lengths)
    others = torch.ones(9, dtype=torch.bool)
    others[start : start + lengths[poisoned]] = False
    assert torch.equal(y[others], clean_y[others])
    assert y[~others].isnan().all()
    for n in range(4):
        if n == poisoned:
            assert new_states[n].isnan().all()
        else:
            assert torch.equal(new_states[n], clean_states[n])


def test_nan_stays_in_its_row_of_a_step() -> None:
    x, weight, states = randn(3, CHANNELS), randn(CHANNELS, 4, seed=1), randn(3, CHANNELS, 4)
    clean_y, clean_states = ops.causal_conv1d_decode(x, weight, states)
    states[1] = torch.nan
    y, new_states = ops.causal_conv1d_decode(x, weight, states)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean_y[[0, 2]])
    assert torch.equal(new_states[[0, 2]], clean_states[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    x, weight = randn(9, CHANNELS).to(dtype), randn(CHANNELS, 4, seed=1).to(dtype)
    state = randn(1, CHANNELS, 4, seed=2).to(dtype)
    y, new_state = prefill(x, weight, state, [9])
    assert (y.dtype, new_state.dtype) == (dtype, dtype)
    expected, _ = formula(x, weight, state[0])
    # one rounding of the result, half an ulp of it
    torch.testing.assert_close(y.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
