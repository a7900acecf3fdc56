"""The chunked delta rule's kernels, and the convolution over padded indices, in the interpreter.

Run by `test_chunked_delta_rule.py`, in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import chunk_state_arguments as states
import pytest
import torch
import torch.nn.functional as F
from test_ops import assert_near, listed
from torch import Tensor

from minivllm.ops import OPS
from minivllm.ops.chunks import CHUNK_SIZE, chunk_tensors, max_chunks, padded_chunk_lists
from minivllm.ops.examples import pool, scattered_slots
from minivllm.ops.fused_gated_delta_rule import example_rows, unfolded
from minivllm.ops.kernels import kernel

pytest_plugins = ["interpreted_fixtures"]

LENGTHS = ((1,), (64, 3), (5, 0, 129, 1), (0, 70), ())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launcher allocates is poisoned until a kernel writes it."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_unit_rows(key_heads: int, dtype: torch.dtype) -> None:
    """Of column slices; in half precision each is rounded once."""
    for tokens in (0, 1, 40):
        rows = example_rows(torch.Generator().manual_seed(0), dtype, tokens, key_heads)
        q, k, v, *_ = unfolded(*(x.double() for x in rows))
        actual = kernel("unit_rows", "unit_rows")(*rows[:3])
        for x, expected in zip(actual, (q, k, v), strict=True):
            assert x.dtype == dtype and x.is_contiguous()
            torch.testing.assert_close(x.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def wy_definition(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """w `[T, HV, K]` and u `[T, HV, V]`, in float64, by a solver of triangular systems."""
    k = k.double().repeat_interleave(v.shape[1] // k.shape[1], dim=1)
    w, u = torch.zeros_like(k), torch.zeros_like(v, dtype=torch.float64)
    for start, end in itertools.pairwise(bounds):
        for at in range(start, end, CHUNK_SIZE):
            part = slice(at, min(at + CHUNK_SIZE, end))
            keys, values = k[part].transpose(0, 1), v[part].double().transpose(0, 1)
            decay, write = g[part].double().cumsum(0).T, beta[part].double().T
            since = (decay[:, :, None] - decay[:, None]).exp()
            system = (write[:, :, None] * since * (keys @ keys.mT)).tril(-1)
            system += torch.eye(system.shape[-1], dtype=system.dtype)

            def solved(x: Tensor, system: Tensor = system) -> Tensor:
                return torch.linalg.solve_triangular(system, x, upper=False).transpose(0, 1)

            w[part] = solved((write * decay.exp())[..., None] * keys)
            u[part] = solved(write[..., None] * values)
    return w, u


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "one key"])
@pytest.mark.parametrize("lengths", [*LENGTHS, (130,)], ids=str)
def test_wy(lengths: tuple[int, ...], alike: bool, key_heads: int) -> None:
    """Padded; the hardest system has one key all along that is written in full and never decays."""
    tokens, seqs = sum(lengths) + 30, len(lengths) + 2
    q, k, v, a, b, A_log, dt_bias = (
        x.clone()
        for x in example_rows(torch.Generator().manual_seed(0), torch.float32, tokens, key_heads)
    )
    if alike:
        k[:], a[:], b[:] = k[0].clone(), -9, 9
    metadata = chunk_tensors(
        *padded_chunk_lists(lengths, tokens, seqs, max_chunks(tokens, seqs) + 2)
    )
    _, k, v, g, beta = unfolded(q, k, v, a, b, A_log, dt_bias)
    cu_seqlens, chunk_indices = metadata
    wy = kernel("chunk_wy", "chunk_wy")(k, v, a, b, A_log, dt_bias, *metadata)
    w, u = wy_definition(k, v, g, beta, cu_seqlens.tolist())
    assert_near(wy.w, w.float(), 2e-6)
    assert_near(wy.u, u.float(), 2e-6)
    for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for at in range(start, end, CHUNK_SIZE):
            part = slice(at, min(at + CHUNK_SIZE, end))
            assert_near(wy.decay[part].exp2(), g[part].cumsum(0).exp(), 1e-6)
        if end == start:
            assert wy.chunk_offsets[n] == -7, "nothing is read there"
        else:
            assert chunk_indices[wy.chunk_offsets[n]].tolist() == [n, 0]


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
    metadata = chunk_tensors(
        *padded_chunk_lists(lengths, tokens, seqs, max_chunks(tokens, seqs) + 2)
    )
    expected_state = state.clone()
    actual = listed(triton_call(x, weight, state, slots, computed, *metadata, *heads))
    expected = op.definition(x, weight, expected_state, slots, computed, *metadata, *heads)
    for y, wanted in zip(actual, listed(expected), strict=True):
        assert y.isfinite().all()
        assert_near(y, wanted, op.tolerance[torch.float32])
    assert_near(state[1:], expected_state[1:], op.tolerance[torch.float32])
