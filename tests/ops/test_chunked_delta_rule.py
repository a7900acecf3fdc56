"""Packed sequences in buffers of a fixed size: the indices, and the chunked rule over them.

What needs no GPU: the padded indices; the ops' torch forms over them; our kernels in triton's
interpreter (`interpreted_chunks.py`) and compiled to machine code. On a GPU: all of them
against the op's definition, and captured replays against exact, uncaptured calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import chunk_state_arguments as states
import pytest
import test_ops
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import run_interpreted
from test_kernels_compile import compiled  # noqa: F401
from torch import Tensor

from bench.kernels import Shapes, model_config
from minivllm.ops import OPS
from minivllm.ops.chunks import (
    CHUNK_SIZE,
    chunk_metadata,
    chunk_tensors,
    max_chunks,
    padded_chunk_lists,
)
from minivllm.ops.kernels import kernel

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SLOT_OPS = (
    "causal_conv1d_prefill_slots",
    "fused_gated_delta_rule_prefill_slots",
    "causal_conv1d_qkv_prefill_slots",
)
TOKENS, SEQS = 320, 5  # of the bucket
BATCHES: list[tuple[int, ...]] = [
    (320,),  # fills it
    (1,),
    (64, 64, 64, 64, 64),
    (130, 0, 3),
    (63, 65, 1, 128),
    (5, 200),
]


@st.composite
def buckets(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Lengths and the tokens, sequences and chunks of a bucket that holds them."""
    lengths = draw(st.lists(st.integers(0, 200), max_size=6))
    surplus = draw(st.integers(0, 300))
    tokens = sum(lengths) + surplus
    seqs = len(lengths) + draw(st.integers(1 if surplus or not lengths else 0, 4))
    return lengths, tokens, seqs, max_chunks(tokens, seqs) + draw(st.integers(0, 3))


@given(buckets())
@settings(max_examples=300, deadline=None)
def test_padded_indices(bucket: tuple[list[int], int, int, int]) -> None:
    lengths, tokens, seqs, chunks = bucket
    cu_seqlens, chunk_indices = chunk_tensors(*padded_chunk_lists(*bucket))
    assert cu_seqlens.dtype == chunk_indices.dtype == torch.int32
    assert cu_seqlens.shape == (seqs + 1,) and chunk_indices.shape == (chunks, 2)
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == tokens
    padded = cu_seqlens.diff().tolist()
    assert padded[: len(lengths) - (seqs == len(lengths))] == lengths[: seqs - 1]
    assert not any(padded[len(lengths) : -1]), "a surplus sequence has tokens"
    exact, exact_rows = chunk_metadata(padded)
    assert torch.equal(cu_seqlens, exact)
    # one row for each chunk, in order, and then rows that no kernel computes
    rows = chunk_indices.tolist()
    assert rows[: len(exact_rows)] == exact_rows.tolist()
    behind = [seqs - 1, -(-padded[-1] // CHUNK_SIZE)]
    assert rows[len(exact_rows) :] == [behind] * (chunks - len(exact_rows))
    assert behind[1] * CHUNK_SIZE >= padded[-1]
    assert min(min(row) for row in [*rows, [0]]) >= 0
    assert max([n for n, _ in rows], default=0) < seqs


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_no_lengths_have_more_chunks(lengths: list[int]) -> None:
    assert len(chunk_metadata(lengths)[1]) <= max_chunks(sum(lengths), len(lengths))


def test_some_lengths_have_as_many_chunks() -> None:
    for tokens, seqs in ((1, 1), (3, 5), (66, 3), (512, 8), (8192, 32)):
        longest = tokens - min(tokens, seqs) + 1
        lengths = [1] * (min(tokens, seqs) - 1) + [longest]
        assert max_chunks(tokens, seqs) - len(chunk_metadata(lengths)[1]) in (0, 1)


def test_what_does_not_fit_is_refused() -> None:
    for lengths, tokens, seqs, chunks in (
        ((65,), 64, 2, 9),
        ((3, 4), 7, 1, 9),
        ((3, 4), 8, 2, 9),
        ((65,), 65, 1, 1),
        ((), 0, 0, 0),
    ):
        with pytest.raises(AssertionError):
            chunk_tensors(*padded_chunk_lists(lengths, tokens, seqs, chunks))


def padded(x: Tensor, size: int, value: float = 0) -> Tensor:
    """x with rows of `value` behind its own."""
    return torch.cat([x, x.new_full((size - x.shape[0], *x.shape[1:]), value)])


class Bucket:
    """The arguments of a prefill on slots: exact ones, and the same in buffers of a fixed size.

    Args:
        config: a model's preset; the rows are column slices, as in its graph.
    """

    def __init__(self, config: str, dtype: torch.dtype, device: str) -> None:
        self.shapes = Shapes(model_config(config), dtype, device)
        self.device = device
        self.conv, self.recurrent = self.shapes.pools(SEQS + 2)
        c = self.shapes.config
        self.heads = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
        self.weight = self.shapes.random(c.conv_dim, c.linear_conv_kernel_dim)
        *_, self.A_log, self.dt_bias = self.shapes.recurrent_rows(1)

    def rows(self, name: str, tokens: int) -> tuple[Tensor, ...]:
        """What an op takes of each token."""
        if name != SLOT_OPS[1]:
            return (self.shapes.mixer_row(tokens)[0],)
        return self.shapes.recurrent_rows(tokens)[:5]

    def arguments(
        self, name: str, rows: Sequence[Tensor], state: Tensor, places: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        if name != SLOT_OPS[1]:
            heads = self.heads if name == SLOT_OPS[2] else ()
            return (*rows, self.weight, state, *places, *heads)
        return (*rows, self.A_log, self.dt_bias, state, *places)

    def pool(self, name: str) -> Tensor:
        return (self.recurrent if name == SLOT_OPS[1] else self.conv).clone()

    def places(self, lengths: Sequence[int], whole: bool) -> list[Tensor]:
        """slots, num_computed_tokens, cu_seqlens, chunk_indices; padded if `whole`."""
        slots = torch.tensor([3, 1, 6, 2, 5][: len(lengths)])
        computed = torch.tensor([0, 64, 0, 128, 7][: len(lengths)], dtype=torch.int32)
        if whole:
            slots, computed = (padded(x, SEQS) for x in (slots, computed))
            sizes = (TOKENS, SEQS, max_chunks(TOKENS, SEQS))
            metadata = chunk_tensors(*padded_chunk_lists(lengths, *sizes))
        else:
            metadata = chunk_metadata(lengths)
        return [x.to(self.device) for x in (slots, computed, *metadata)]


@pytest.mark.parametrize("lengths", BATCHES, ids=str)
@pytest.mark.parametrize("name", SLOT_OPS)
def test_padding_changes_nothing(name: str, lengths: tuple[int, ...]) -> None:
    """Neither a token's output nor a slot of a sequence; slot 0 is nobody's."""
    torch.manual_seed(0)
    bucket, op = Bucket("tiny", torch.float32, "cpu"), OPS[name].overload
    total = sum(lengths)
    rows = bucket.rows(name, TOKENS)
    exact_state, state = bucket.pool(name), bucket.pool(name)
    exact = bucket.arguments(
        name, [x[:total] for x in rows], exact_state, bucket.places(lengths, whole=False)
    )
    expected = test_ops.listed(op(*exact))
    state[0] = torch.nan
    whole = bucket.arguments(name, rows, state, bucket.places(lengths, whole=True))
    for o, e in zip(test_ops.listed(op(*whole)), expected, strict=True):
        # torch's vectorised sigmoid and exp round by where an element lies
        test_ops.assert_near(o[:total], e, 1e-6)
    test_ops.assert_near(state[1:], exact_state[1:], 1e-6)


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_chunks.py")


# on the GPU


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a launcher allocates is full of NaN, and of absurd offsets, until written."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan if x.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", filled)
    yield


def gpu(*more: Any) -> Any:
    def mark(function: Any) -> Any:
        for one in (*GPU, *more):
            function = one(function)
        return function

    return mark


@gpu()
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_the_stages_are_the_definition(lengths: tuple[int, ...], poisoned: None) -> None:
    """At a model's head dims, padded: the rows and states of every sequence, padding's too."""
    torch.manual_seed(0)
    bucket = Bucket("tiny", torch.bfloat16, "cuda")
    op = OPS["fused_gated_delta_rule_prefill"]
    rows = (*bucket.rows(SLOT_OPS[1], TOKENS), bucket.A_log, bucket.dt_bias)
    initial = torch.randn(SEQS, *bucket.recurrent.shape[1:], device="cuda")
    _, _, *metadata = bucket.places(lengths, whole=True)
    call = op.choose(torch.device("cuda"), torch.bfloat16)[0].call
    o, final = call(*rows, initial, *metadata)
    exact = [x.float().cpu() for x in (*rows, initial)]
    expected_o, expected_final = op.definition(*exact, *(x.cpu() for x in metadata))
    test_ops.assert_near(o.cpu(), expected_o, op.tolerance[torch.bfloat16])
    test_ops.assert_near(final.cpu(), expected_final, op.tolerance[torch.bfloat16])
    empty = metadata[0].diff() == 0
    assert torch.equal(final[empty], initial[empty])


@gpu()
@pytest.mark.parametrize("name", SLOT_OPS)
def test_replays_are_exact_calls(name: str, poisoned: None) -> None:
    """One capture, batches of any lengths through it, twice each: every bit of an exact call."""
    torch.manual_seed(0)
    bucket = Bucket("tiny", torch.bfloat16, "cuda")
    call = OPS[name].choose(torch.device("cuda"), torch.bfloat16)[0].call
    rows = bucket.rows(name, TOKENS)
    places = bucket.places(BATCHES[0], whole=True)
    state = bucket.pool(name)
    arguments = bucket.arguments(name, rows, state, places)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = test_ops.listed(call(*arguments))
    for lengths in (*BATCHES, *reversed(BATCHES)):
        total = sum(lengths)
        fresh = bucket.rows(name, TOKENS)
        for buffer, x in zip(rows, fresh, strict=True):
            buffer.copy_(x)
        for buffer, x in zip(places, bucket.places(lengths, whole=True), strict=True):
            buffer.copy_(x)
        state.copy_(bucket.pool(name))
        exact_state = bucket.pool(name)
        exact_state[0] = state[0] = torch.nan  # padding's: reaches nobody
        exact = bucket.arguments(
            name, [x[:total] for x in fresh], exact_state, bucket.places(lengths, whole=False)
        )
        expected = test_ops.listed(call(*exact))
        graph.replay()
        for o, e in zip(outputs, expected, strict=True):
            assert e.isfinite().all()
            assert torch.equal(o[:total], e), lengths
            assert o.isfinite().all(), "padding starts from zeros, and writes its rows"
        assert torch.equal(state[1:], exact_state[1:]), lengths


@pytest.mark.parametrize(
    ("name", "registers"), [("unit_rows", 64), ("chunk_wy", 255), ("chunk_output", 255)]
)
def test_the_kernels_compile(name: str, registers: int, compiled: Any) -> None:  # noqa: F811
    """To machine code of both architectures: one variant for a model, whatever the lengths."""
    launch = kernel(name, name)

    def launches(model: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        shapes = Shapes(model_config(model), torch.bfloat16, "meta")
        for lengths in ((512,), (3000, 1, 70)):
            q, k, v, *gates = shapes.recurrent_rows(sum(lengths))
            metadata = [x.to("meta") for x in chunk_metadata(lengths)]
            before = k.new_empty(len(metadata[1]), v.shape[1], k.shape[2], v.shape[2])
            rows = {
                "unit_rows": (q, k, v),
                "chunk_wy": (k, v, *gates, *metadata),
                "chunk_output": (q, k, v, before, gates[0].float(), *metadata),
            }
            yield launch, rows[name]

    for capability, model in ((90, "miniqwen08b"), (80, "miniqwen08b"), (90, "tiny")):
        (found,) = compiled(capability, launches(model))
        assert found.local == found.stack == 0 and found.registers <= registers, found
        assert found.shared <= 99 * 1024, found


def test_the_state_kernel_compiles(compiled: Any) -> None:  # noqa: F811
    """With snapshots and without; 99 KiB of shared memory, a consumer's GPU's, hold its stages."""
    launch = kernel("chunk_states", "chunk_states")

    def launches(model: str, kept: bool) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        c = model_config(model)
        heads, key_heads = c.linear_num_value_heads, c.linear_num_key_heads
        for lengths in ((512,), (3000, 1, 70)):
            *arguments, chunk_slots = states.arguments(
                lengths, [0] * len(lengths), kept={}, entries=5, heads=heads, key_heads=key_heads,
                K=c.linear_key_head_dim, V=c.linear_value_head_dim, dtype=torch.bfloat16,
            )  # fmt: skip
            to_meta = (x.to("meta") if isinstance(x, Tensor) else x for x in arguments)
            yield launch, (*to_meta, chunk_slots.to("meta") if kept else None)

    for capability, shared in ((90, 227), (80, 99)):
        # three sequences of the larger model's heads fill the card
        for (model, tiles), kept in itertools.product(
            (("miniqwen08b", 2), ("tiny", 1)), (True, False)
        ):
            found = compiled(capability, launches(model, kept))
            assert len(found) == tiles, "a size that changes from call to call was specialised on"
            for k in found:
                assert k.name == "_state_kernel" and k.local == k.stack == 0, k
                assert k.registers <= 255 and k.shared <= shared * 1024, k


@pytest.mark.parametrize(("capability", "shared"), [(90, 227), (80, 99)])
@pytest.mark.parametrize("dim", [128, 256])
def test_the_state_kernel_fits_at_any_tile(
    dim: int,
    capability: int,
    shared: int,
    compiled: Any,  # noqa: F811
) -> None:
    """Few sequences and many, of heads that are wider than those of the models too."""
    for seqs in (1, 32):
        arguments = states.arguments(
            [65] * seqs, [0] * seqs, kept={}, entries=seqs + 1, heads=16, key_heads=16,
            K=dim, V=dim, dtype=torch.bfloat16,
        )  # fmt: skip
        to_meta = tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)
        (found,) = compiled(capability, iter([(kernel("chunk_states", "chunk_states"), to_meta)]))
        assert found.shared <= shared * 1024, found


def test_other_head_dims_compile(compiled: Any) -> None:  # noqa: F811
    """Keys and values of different dims, and value heads that share a key head."""
    examples = OPS["fused_gated_delta_rule_prefill"].examples(torch.Generator(), torch.float16)
    launches = []
    for rows in examples:
        q, k, v, *gates, _, cu_seqlens, chunk_indices = (x.to("meta") for x in rows)
        places = cu_seqlens, chunk_indices
        before = k.new_empty(len(chunk_indices), v.shape[1], k.shape[2], v.shape[2])
        launches += [
            (kernel("unit_rows", "unit_rows"), (q, k, v)),
            (kernel("chunk_wy", "chunk_wy"), (k, v, *gates, *places)),
            (kernel("chunk_output", "chunk_output"), (q, k, v, before, gates[0].float(), *places)),
        ]
    assert compiled(90, iter(launches))
