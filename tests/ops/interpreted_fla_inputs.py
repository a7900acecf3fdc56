"""The kernels around FLA's, and the convolution over padded indices, in the interpreter.

Run by `test_fla_chunks.py`, in a process of its own.
"""

from __future__ import annotations

import itertools

import chunk_state_arguments as states
import pytest
import torch
import torch.nn.functional as F
import triton
from test_ops import assert_near, listed
from torch import Tensor

from minivllm.ops import OPS
from minivllm.ops.examples import pool, scattered_slots
from minivllm.ops.fla import CHUNK_SIZE, SOLVE_BLOCK, max_chunks, padded_chunk_metadata
from minivllm.ops.fused_gated_delta_rule import example_rows, unfolded
from minivllm.ops.kernels import kernel

assert triton.knobs.runtime.interpret, "run by test_fla_chunks.py"

LENGTHS = ((1,), (64, 3), (5, 0, 129, 1), (0, 70), ())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launcher allocates is poisoned until a kernel writes it."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("surplus", [0, 30, 70])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_inputs(lengths: tuple[int, ...], surplus: int, key_heads: int) -> None:
    tokens, seqs = sum(lengths) + surplus, len(lengths) + 2
    rows = example_rows(torch.Generator().manual_seed(0), torch.float32, tokens, key_heads)
    metadata = padded_chunk_metadata(lengths, tokens, seqs, max_chunks(tokens, seqs) + 2)
    x = kernel("fla_inputs", "fla_inputs")(*rows, *metadata)
    q, k, v, g, beta = unfolded(*rows)
    for actual, expected in ((x.q, q), (x.k, k), (x.v, v), (x.beta, beta)):
        assert_near(actual, expected, 1e-6)
    cu_seqlens, chunk_indices = metadata
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        for at in range(start, end, CHUNK_SIZE):
            part = slice(at, min(at + CHUNK_SIZE, end))
            assert_near(x.decay[part].exp2(), g[part].cumsum(0).exp(), 1e-6)
        if end == start:
            assert x.chunk_offsets[n] == -7, "FLA reads nothing there"
        else:
            assert chunk_indices[x.chunk_offsets[n]].tolist() == [n, 0]
        block = torch.arange(CHUNK_SIZE) // SOLVE_BLOCK
        own = block[torch.arange(end - start) % CHUNK_SIZE]
        above = (block[None] > own[:, None])[:, None].expand(-1, v.shape[1], -1)
        inverse = x.inverse[start:end]
        assert (inverse[above] == 0).all() and inverse[~above].isnan().all()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_what_is_normalized_stays_where_it_is(lengths: tuple[int, ...]) -> None:
    """q, k and v are handed on, or made contiguous; all else is as it is without."""
    tokens, seqs = sum(lengths) + 70, len(lengths) + 2
    rows = example_rows(torch.Generator().manual_seed(0), torch.float32, tokens, 2)
    metadata = padded_chunk_metadata(lengths, tokens, seqs, max_chunks(tokens, seqs) + 2)
    launch = kernel("fla_inputs", "fla_inputs")
    own = tuple(t.contiguous() for t in rows[:3])
    expected = launch(*rows, *metadata)
    for given in (rows[:3], own):
        x = launch(*given, *rows[3:], *metadata, True)
        for actual, t in zip(x[:3], given, strict=True):
            assert torch.equal(actual, t) and actual.is_contiguous()
            assert (actual.data_ptr() == t.data_ptr()) == (given is own)
        for actual, wanted in zip(x[3:], expected[3:], strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def test_half_precision_rounds_once() -> None:
    rows = example_rows(torch.Generator().manual_seed(0), torch.float16, 67, 2)
    x = kernel("fla_inputs", "fla_inputs")(*rows, *padded_chunk_metadata((67,), 67, 1, 2))
    q, k, v, g, _ = unfolded(*rows)
    assert x.q.dtype == x.k.dtype == x.v.dtype == x.inverse.dtype == torch.float16
    assert x.decay.dtype == x.beta.dtype == torch.float32
    assert torch.equal(x.v, v)
    for actual, expected in ((x.q, q), (x.k, k)):
        torch.testing.assert_close(actual, expected, rtol=2**-10, atol=2**-14)
    assert_near(x.beta, rows[4].float().sigmoid(), 1e-6)
    assert_near(x.decay[64:].exp2(), g[64:].cumsum(0).exp(), 1e-6)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths, computed, kept",
    [
        ((1,), (0,), {}),
        ((64, 3), (64, 0), {0: 5}),
        ((5, 0, 192, 64), (0, 7, 64, 0), {1: 6, 2: 7, 4: 8}),
        ((0, 130), (3, 1), {2: 4}),
    ],
    ids=str,
)
def test_states(
    lengths: tuple[int, ...], computed: tuple[int, ...], kept: dict[int, int], key_heads: int
) -> None:
    """States, corrections and snapshots; what no chunk or token owns stays as it was."""
    torch.manual_seed(0)
    arguments = states.arguments(lengths, computed, kept=kept, entries=9, key_heads=key_heads)
    expected = states.expected(arguments)
    before, corrections = kernel("chunk_states", "chunk_states")(*arguments)
    for actual, wanted in zip((before, corrections, arguments.state), expected, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
        assert_near(actual.nan_to_num(), wanted.float().nan_to_num(), 1e-6)


@pytest.mark.parametrize("heads", [(), (2, 6, 4)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_over_padded_indices(lengths: tuple[int, ...], heads: tuple[int, ...]) -> None:
    """Surplus chunks write nothing; padding's tokens are rows like any other, of slot 0."""
    op = OPS["causal_conv1d_qkv_prefill_slots" if heads else "causal_conv1d_prefill_slots"]
    triton_call = next(i.call for i in op.implementations if i.name == "triton")
    generator = torch.Generator().manual_seed(0)
    tokens, seqs, channels = sum(lengths) + 67, len(lengths) + 2, 40
    x, weight = torch.randn(tokens, channels), torch.randn(channels, 4)
    slots = F.pad(scattered_slots(generator, len(lengths), 9), (0, 2))
    state = pool(torch.randn(len(lengths), channels, 4), slots[: len(lengths)], 9)
    computed = F.pad(torch.arange(len(lengths), dtype=torch.int32), (0, 2))
    metadata = padded_chunk_metadata(lengths, tokens, seqs, max_chunks(tokens, seqs) + 2)
    expected_state = state.clone()
    actual = listed(triton_call(x, weight, state, slots, computed, *metadata, *heads))
    expected = op.definition(x, weight, expected_state, slots, computed, *metadata, *heads)
    for y, wanted in zip(actual, listed(expected), strict=True):
        assert y.isfinite().all()
        assert_near(y, wanted, op.tolerance[torch.float32])
    assert_near(state[1:], expected_state[1:], op.tolerance[torch.float32])
