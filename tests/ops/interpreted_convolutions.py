"""The Triton kernels of a prefill's convolutions, interpreted.

Run by `test_convolutions_interpreted.py`, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_ops
import torch
from interpreted_kernels import (
    CONVOLUTIONS,
    DTYPES,
    KERNELS,
    TRUNCATION,
    assert_as_defined,
    example,
)
from torch import Tensor

from minivllm.ops import OPS
from minivllm.ops.chunks import chunk_metadata

pytest_plugins = ["interpreted_fixtures"]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_padding_sequences_of_a_prefill_share_a_slot(name: str) -> None:
    args = list(example(name))
    lengths = (5, 3, 66, 4)
    args[0] = torch.randn(sum(lengths), args[0].shape[1])
    args[3][[1, 3]] = 0
    args[4][[1, 3]] = 0
    args[5:7] = chunk_metadata(lengths)
    assert_as_defined(name, tuple(args[:-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 8, 8, 1), (2, 24, 12, 4), (3, 128, 40, 3), (17, 16, 16, 34)])
def test_a_convolution_of_q_k_v_is_that_of_all_then_their_lengths(
    heads: tuple[int, int, int, int], dtype: str
) -> None:
    """v and the states to the bit; q and k but for the order of a sum, from the rounded output."""
    *given, value_heads = heads
    key_heads, key_dim, value_dim = given
    channels, lengths = 2 * key_heads * key_dim + value_dim * value_heads, (66, 0, 5)
    torch.manual_seed(0)
    x, weight = torch.randn(71, channels), torch.randn(channels, 4)
    pool = torch.randn(5, channels, 4)
    x, weight, pool = (t.to(DTYPES[dtype]) for t in (x, weight, pool))
    computed = torch.tensor([64, 3, 0], dtype=torch.int32)
    places = torch.tensor([2, 4, 1]), computed, *chunk_metadata(lengths)
    states = pool.clone(), pool.clone()
    y = KERNELS["causal_conv1d_prefill_slots"].call(x, weight, states[0], *places)
    q, k, v = KERNELS["causal_conv1d_qkv_prefill_slots"].call(x, weight, states[1], *places, *given)
    keys = key_heads * key_dim
    assert torch.equal(v.flatten(1), y[:, 2 * keys :]) and torch.equal(*states)
    eps = TRUNCATION * torch.finfo(DTYPES[dtype]).eps
    for unit, raw in ((q, y[:, :keys]), (k, y[:, keys : 2 * keys])):
        rows = raw.float().unflatten(1, (key_heads, key_dim))
        expected = rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(unit.float(), expected, rtol=eps, atol=eps**2)


@pytest.mark.parametrize(("computed", "backwards"), [(0, True), (5, False)])
@pytest.mark.parametrize("length", [1, 3, 4, 16, 63, 64, 65, 67, 129, 192])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_states_behind_chunks(name: str, length: int, computed: int, backwards: bool) -> None:
    """What a sequence that is cut there would leave, and all else as without them."""
    op, heads = OPS[name], CONVOLUTIONS[name]

    def call(of: Callable[..., Any], *args: Tensor) -> Tensor:
        """The outputs side by side."""
        outputs = test_ops.listed(of(*args[:7], *heads, *args[7:]))
        return torch.cat([y.flatten(1) for y in outputs], dim=1)

    torch.manual_seed(0)
    x, weight = torch.randn(length + 2, 40), torch.randn(40, 4)
    pool = torch.randn(9, 40, 4)
    pool[1 if computed else 2] = torch.nan  # what no sequence may read
    slots = torch.tensor([2, 8])
    counts = torch.tensor([computed, 1], dtype=torch.int32)
    cu_seqlens, chunk_indices = chunk_metadata([length, 2])
    chunks = len(chunk_indices)
    entries = torch.tensor([*(3, 0, 5, 6)[: chunks - 1], 4], dtype=torch.int32)
    if backwards:
        chunk_indices, entries = chunk_indices.flip(0), entries.flip(0)
    expected_state, state = pool.clone(), pool.clone()
    places = slots, counts, cu_seqlens, chunk_indices
    expected = call(KERNELS[name].call, x, weight, expected_state, *places)
    actual = call(KERNELS[name].call, x, weight, state, *places, entries)
    assert torch.equal(actual, expected) and expected.isfinite().all()
    for (n, chunk), entry in zip(chunk_indices.tolist(), entries.tolist(), strict=True):
        start, end = cu_seqlens[n : n + 2].tolist()
        cut = x[start : min(end, start + 64 * (chunk + 1))]
        metadata = chunk_metadata([len(cut)])
        cut_state = pool.clone()
        call(op.definition, cut, weight, cut_state, slots[n : n + 1], counts[n : n + 1], *metadata)
        left = cut_state[slots[n]]
        assert left.isfinite().all()
        if len(cut) == end - start:
            assert torch.equal(expected_state[slots[n]], left)
        if entry:
            expected_state[entry] = left
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 129])
@pytest.mark.parametrize("computed", [0, 1])
def test_convolution_lengths(length: int, computed: int) -> None:
    """States shorter than the window, and ends on and off the edges of chunks."""
    name = "causal_conv1d_prefill_slots"
    x, weight, state, slots, num_computed_tokens, *_ = example(name)
    x = torch.randn(length, x.shape[1])
    state = torch.randn_like(state) if computed else torch.full_like(state, torch.nan)
    num_computed_tokens = torch.tensor([computed], dtype=torch.int32)
    metadata = chunk_metadata([length])
    assert_as_defined(name, (x, weight, state, slots[:1], num_computed_tokens, *metadata))


def test_chunks_run_in_any_order() -> None:
    """The last chunk of a sequence may be done before its first has read the slot."""
    name = "causal_conv1d_prefill_slots"
    *args, chunk_indices, chunk_slots = example(name)
    exact = test_ops.clones(tuple(args))
    actual = KERNELS[name].call(*args, chunk_indices.flip(0), chunk_slots.flip(0))
    expected = OPS[name].definition(*exact, chunk_indices, chunk_slots)
    tolerance = OPS[name].tolerance[torch.float32]
    test_ops.assert_near(actual, expected, tolerance)
    test_ops.assert_near(args[2], exact[2], tolerance)


def test_a_sequence_without_tokens_leaves_its_slot_alone() -> None:
    name = "causal_conv1d_prefill_slots"
    x, weight, state, slots, num_computed_tokens, *_ = example(name)
    state = torch.randn_like(state)
    before = state.clone()
    num_computed_tokens[:] = torch.tensor([0, 0, 5, 5])
    args = (x[:6], weight, state, slots, num_computed_tokens, *chunk_metadata([3, 0, 3, 0]))
    assert_as_defined(name, args)
    for n, same in enumerate((False, True, False, True)):
        assert torch.equal(state[slots[n]], before[slots[n]]) == same
