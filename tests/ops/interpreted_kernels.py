"""The Triton kernels, run by triton's interpreter on the CPU and held to the ops' definitions.

pytest does not collect this file by itself: the interpreter must be chosen before triton is
imported, so `test_kernels_interpreted.py` runs it in a process of its own.

The interpreter truncates where a GPU rounds to nearest when it stores bfloat16, so bfloat16 gets
three times the tolerance here; float16 it rounds rightly. Its matrix product takes bfloat16's bits
for integers, so that is put right here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chunk_state_arguments as states
import numpy as np
import pytest
import test_ops
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from bench.kernels import Shapes, mismatch, model_config
from minivllm.ops import OPS, Implementation, Op
from minivllm.ops.chunks import chunk_metadata
from minivllm.ops.kernels import kernel
from minivllm.ops.kernels.numerics import softplus
from minivllm.ops.paged_attention import BLOCK_SIZE, MAX_SPLITS

assert triton.knobs.runtime.interpret, "run by test_kernels_interpreted.py"

chunk_states = kernel("chunk_states", "chunk_states")
KERNELS = {
    name: implementation
    for name, op in OPS.items()
    for implementation in op.implementations
    if implementation.package == "triton"
}
LINEARS = tuple(name for name in OPS if "linear" in name)
STEP = ("decode_inputs", "greedy_tokens")  # around the decode graph
CHUNKED = ("fused_gated_delta_rule_prefill", "fused_gated_delta_rule_prefill_slots")
# of a prefill, with what they take of the heads: 40 channels, in all
CONVOLUTIONS: dict[str, tuple[int, ...]] = {
    "causal_conv1d_prefill_slots": (),
    "causal_conv1d_qkv_prefill_slots": (2, 6, 4),
}
TRUNCATION = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tolerant(name: str) -> Op:
    """The op, with the tolerance that the interpreter needs."""
    op = OPS[name]
    bfloat16 = TRUNCATION * op.tolerance[torch.bfloat16]
    return replace(op, tolerance={**op.tolerance, torch.bfloat16: bfloat16})


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a launcher allocates is full of NaN until a kernel writes it."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bfloat16 by value."""
    create_dot = InterpreterBuilder.create_dot

    def values(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16 or x.data.dtype != np.uint16:
            return x
        widened = (x.data.astype(np.uint32) << 16).view(np.float32)
        return type(x)(widened, tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, values(a), values(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def test_every_kernel_is_here() -> None:
    assert set(KERNELS) == {
        "rms_norm",
        "add_rms_norm",
        "gated_rms_norm",
        "silu_mul",
        "sigmoid_mul",
        "qk_norm_rope",
        "causal_conv1d_prefill_slots",
        "causal_conv1d_qkv_prefill_slots",
        "causal_conv1d_decode_slots",
        "fused_gated_delta_rule_decode_slots",
        *CHUNKED,
        "paged_kv_write",
        "paged_attention_prefill",
        "paged_attention_decode",
        *STEP,
        *LINEARS,
    }


@pytest.mark.parametrize("name", KERNELS)
def test_the_examples(name: str) -> None:
    """Odd sizes, strided rows, NaN in unused slots and beside rows; inputs stay as they were."""
    check = test_ops.test_an_implementation_is_its_definition
    check(OPS[name], KERNELS[name], "cpu", torch.float32)


@pytest.mark.parametrize("name", KERNELS)
def test_the_examples_in_bfloat16(name: str) -> None:
    op = tolerant(name)
    for args in test_ops.examples(op, torch.bfloat16):
        exact = test_ops.clones(test_ops.floats(lambda x: x.float(), args))
        actual = test_ops.results(op, KERNELS[name].call, args)
        for a, e in zip(actual, test_ops.results(op, op.definition, exact), strict=True):
            test_ops.assert_near(a, e, op.tolerance[torch.bfloat16])


def assert_shapes(sets: Iterable[tuple[str, list[tuple[Any, ...]]]], names: Iterable[str]) -> None:
    """The kernels among `sets`, which must be `names`, give what their definitions give."""
    ran = set()
    for name, (args, *_) in sets:
        if name in KERNELS:
            wrong = mismatch(tolerant(name), KERNELS[name].call, args, torch.bfloat16)
            assert wrong is None, f"{name}: {wrong}"
            ran.add(name)
    assert ran == set(names)


@pytest.mark.parametrize(("model", "tokens"), [("tiny", 2), ("miniqwen08b", 1)])
def test_the_shapes_of_a_model(model: str, tokens: int) -> None:
    torch.manual_seed(0)
    config = model_config(model)
    prefill = {"causal_conv1d_prefill_slots", "causal_conv1d_qkv_prefill_slots", CHUNKED[1]}
    shapes = Shapes(config, torch.bfloat16, "cpu")
    # thousands of programs a product at real sizes: bench/linear.py checks them, on a GPU
    left_out = {
        *prefill,
        CHUNKED[0],
        "paged_attention_prefill",
        *STEP,
        *(LINEARS if model == "miniqwen08b" else ()),
    }
    decode = (s for s in shapes.decode(tokens) if s[0] not in left_out)
    assert_shapes(decode, KERNELS.keys() - left_out)
    assert_shapes(shapes.stateful("prefill", 1, 65, 1), prefill)


def test_states_in_bfloat16() -> None:
    torch.manual_seed(0)
    name = "fused_gated_delta_rule_decode_slots"
    shapes = Shapes(model_config("tiny"), torch.bfloat16, "cpu", state_dtype=torch.bfloat16)
    assert_shapes((s for s in shapes.decode(2) if s[0] == name), {name})


@pytest.mark.parametrize(
    "name",
    ["rms_norm", "add_rms_norm", "gated_rms_norm", "silu_mul", "sigmoid_mul", "qk_norm_rope"],
)
def test_roundings_stand_where_torch_has_them(name: str) -> None:
    """float16 to the bit, but for the rare result that lies on the edge of two roundings."""
    op, wrong, total = OPS[name], 0, 0
    for args in op.examples(torch.Generator().manual_seed(1), torch.float16):
        actual = test_ops.listed(KERNELS[name].call(*args))
        expected = test_ops.listed(op.implementations[0].call(*args))
        for a, e in zip(actual, expected, strict=True):
            wrong += int((a != e).sum())
            total += e.numel()
    assert wrong <= 0.002 * total, f"{wrong} of {total} differ"


@pytest.mark.parametrize("name", LINEARS)
def test_roundings_around_a_product_stand_where_torch_has_them(name: str) -> None:
    """As above; the product adds in another order, and so a few more results are on an edge."""
    op, wrong, total = OPS[name], 0, 0
    for args in op.examples(torch.Generator().manual_seed(1), torch.float16):
        actual = test_ops.listed(KERNELS[name].call(*args))
        widened = test_ops.floats(lambda x: x.float(), args)
        expected = test_ops.listed(op.implementations[0].call(*args))
        exact = test_ops.listed(op.definition(*widened))
        for a, e, x in zip(actual, expected, exact, strict=True):
            wrong += int((a != e).sum())
            total += e.numel()
            # and no rounding less either: the errors are those of torch's ops
            assert float((a.float() - x).square().sum()) > 0.9 * float(
                (e.float() - x).square().sum()
            )
    assert wrong <= 0.01 * total, f"{wrong} of {total} differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("name", LINEARS)
def test_linears_at_every_tile(name: str, rows: int, dtype: str) -> None:
    """Sizes that are no multiple of a tile, heads of several steps, rows that no program holds."""
    torch.manual_seed(0)
    op, outputs = tolerant(name), 70
    heads, dim = (17 if rows <= 2 else 3), 256
    x, gate = torch.randn(2, rows, heads, 2 * dim)[..., dim:]
    weight = torch.randn(outputs, heads * dim) / (heads * dim) ** 0.5
    before = {"gated_rms_norm": (x, gate, torch.randn(dim), 1e-6), "sigmoid_mul": (x, gate)}
    behind = torch.randn(rows, outputs), torch.randn(outputs), 1e-6, 1.0, False
    args = (*before.get(name.partition("_linear")[0], (x.flatten(1),)), weight)
    args += {"linear": (), "linear_silu_mul": (33,)}.get(name, behind)
    args = test_ops.floats(lambda x: x.to(DTYPES[dtype]), args)
    wrong = mismatch(op, KERNELS[name].call, args, DTYPES[dtype])
    assert wrong is None, wrong


def test_roundings_of_the_delta_rule_stand_where_torch_has_them() -> None:
    """q, k and beta are rounded to float16, all else is float32: states differ by its ulps."""
    op = OPS["fused_gated_delta_rule_decode_slots"]
    args = op.examples(torch.Generator().manual_seed(1), torch.float16)[0]
    expected_args = test_ops.clones(args)
    KERNELS[op.name].call(*args)
    op.implementations[0].call(*expected_args)
    test_ops.assert_near(args[7], expected_args[7], 1e-6)


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


def example(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The last example of an op: its most general one."""
    return OPS[name].examples(torch.Generator().manual_seed(0), dtype)[-1]


def assert_as_defined(name: str, args: tuple[Any, ...], rows: slice = slice(None)) -> None:
    """A kernel's results, of `rows`, and every slot that they name but slot 0."""
    op = OPS[name]
    exact = test_ops.clones(args)
    actual = test_ops.listed(KERNELS[name].call(*args))
    expected = test_ops.listed(op.definition(*exact))
    for a, e in zip(actual, expected, strict=True):
        test_ops.assert_near(a[rows], e[rows], op.tolerance[torch.float32])
    for a, e in zip(test_ops.written(op, args), test_ops.written(op, exact), strict=True):
        test_ops.assert_near(a[1:], e[1:], op.tolerance[torch.float32])


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


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("computed", [0, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 16, 63, 64, 65, 67, 129, 192])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_states_behind_chunks(name: str, length: int, computed: int, backwards: bool) -> None:
    """What a sequence that is cut there would leave, and all else as without them."""
    kernel_call, heads = KERNELS[name].call, CONVOLUTIONS[name]

    def call(*args: Tensor) -> Tensor:
        """The outputs side by side."""
        outputs = test_ops.listed(kernel_call(*args[:7], *heads, *args[7:]))
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
    expected = call(x, weight, expected_state, slots, counts, cu_seqlens, chunk_indices)
    actual = call(x, weight, state, slots, counts, cu_seqlens, chunk_indices, entries)
    assert torch.equal(actual, expected) and expected.isfinite().all()
    for (n, chunk), entry in zip(chunk_indices.tolist(), entries.tolist(), strict=True):
        start, end = cu_seqlens[n : n + 2].tolist()
        cut = x[start : min(end, start + 64 * (chunk + 1))]
        metadata = chunk_metadata([len(cut)])
        cut_state = pool.clone()
        call(cut, weight, cut_state, slots[n : n + 1], counts[n : n + 1], *metadata)
        if entry:
            expected_state[entry] = cut_state[slots[n]]
            assert cut_state[slots[n]].isfinite().all()
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


FAR = 8195  # a slot whose offset, at 262,144 elements a slot, no 32 bits hold


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Any]:
    """Pools of more than 2**31 elements in a sparse file: nothing is stored but what is written."""

    def pool(*shape: int) -> Tensor:
        size = (FAR + 1) * 262_144
        memory = torch.from_file(str(next(names)), shared=True, size=size, dtype=torch.bfloat16)
        strides = torch.empty(shape, device="meta").stride()[1:]
        return memory.as_strided(shape, (262_144, *strides))

    names = (tmp_path / f"pool{i}" for i in itertools.count())
    yield pool
    for file in tmp_path.iterdir():
        file.unlink()


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


def test_far_blocks(far: Any) -> None:
    k_cache, v_cache = (far(FAR + 1, 4, 2, 24) for _ in range(2))
    k, v = torch.randn(2, 3, 2, 24).bfloat16()
    places = torch.tensor([4 * FAR + 1, 7, 4 * FAR - 2])
    KERNELS["paged_kv_write"].call(k_cache, v_cache, k, v, places)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[places // 4, places % 4], rows)


def pool_of_blocks(
    counts: Sequence[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Caches of one layer of three, as views of a pool of bytes, and each sequence's blocks.

    Everything is NaN so far; block 0 and one more are nobody's.
    """
    shape = (block_size, kv_heads, dim)
    size = dtype.itemsize * block_size * kv_heads * dim
    pool = torch.full((sum(counts) + 2, 6 * size), 0xFF, dtype=torch.uint8)
    caches = [pool[:, i * size : (i + 1) * size].view(dtype).unflatten(-1, shape) for i in (2, 3)]
    assert all(c.isnan().all() and c.stride(0) == 6 * block_size * kv_heads * dim for c in caches)
    order = (torch.randperm(sum(counts) + 1)[:-1] + 1).to(torch.int32)
    return caches[0], caches[1], list(order.split(list(counts)))


def decode_args(
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """A decode batch: NaN in unused places, foreign blocks behind each sequence's own."""
    torch.manual_seed(0)
    counts = [-(-length // block_size) for length in lengths]
    k_cache, v_cache, blocks = pool_of_blocks(counts, heads[1], dim, block_size, dtype)
    for length, own in zip(lengths, blocks, strict=True):
        place = own[torch.arange(length) // block_size].long(), torch.arange(length) % block_size
        k_cache[place] = torch.randn(length, heads[1], dim).to(dtype)
        v_cache[place] = torch.randn(length, heads[1], dim).to(dtype)
    foreign = [n for n in range(k_cache.shape[0]) if not any(n in own for own in blocks)][-1]
    table = torch.full((len(lengths), max(counts) + 2), foreign, dtype=torch.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    q = torch.randn(len(lengths), 2, heads[0], dim).to(dtype)[:, 1]
    return q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32), dim**-0.5


def assert_decodes(args: tuple[Any, ...]) -> Tensor:
    """The decode kernel's result, which is the definition's in float32."""
    op = tolerant("paged_attention_decode")
    actual = KERNELS[op.name].call(*args)
    expected = op.definition(*test_ops.floats(lambda x: x.float(), args))
    assert actual.dtype == args[0].dtype and actual.is_contiguous()
    test_ops.assert_near(actual, expected, op.tolerance[args[0].dtype])
    assert expected.isfinite().all()
    return actual


def set_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    from minivllm.ops.kernels import paged_attention

    monkeypatch.setattr(paged_attention, "num_splits", lambda *shape: splits)


LENGTHS = (1, 63, 0, 64, 65, 127, 128, 129, 130, 300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_decode_head_dims(dim: int, dtype: str) -> None:
    assert_decodes(decode_args(LENGTHS, dim=dim, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 17])
def test_decode_groups(group: int, dtype: str) -> None:
    for kv_heads in (1, 3):
        heads = group * kv_heads, kv_heads
        assert_decodes(decode_args((65, 0, 300), heads=heads, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 7, MAX_SPLITS])
def test_decode_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as blocks, fewer, and more; shares that are whole, partial, and none."""
    set_splits(monkeypatch, splits)
    for dtype in (torch.float32, torch.bfloat16):
        assert_decodes(decode_args(LENGTHS, dtype=dtype))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decode_block_sizes(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for splits in (1, 3):
        set_splits(monkeypatch, splits)
        assert_decodes(decode_args((15, 16, 17, 129, 0, 300), block_size=block_size))


@pytest.mark.parametrize("place", [0, 130, 299])
def test_decode_large_scores(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of some hundreds, the largest in one share: the others weigh nothing."""
    set_splits(monkeypatch, 5)
    args = decode_args((300, 300))
    q, k_cache, _, table, *_ = args
    q.mul_(40)
    for n in range(2):
        block = table[n, place // BLOCK_SIZE]
        k_cache[block, place % BLOCK_SIZE] = q[n].unflatten(0, (2, 2)).sum(1) / 10
    assert_decodes(args)


def test_decode_padding_rows_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even their block table."""
    for splits in (1, 4):
        set_splits(monkeypatch, splits)
        args = decode_args((0, 130, 0, 1))
        args[3][[0, 2]] = 2**31 - 1
        o = KERNELS["paged_attention_decode"].call(*args)
        assert torch.equal(o[[0, 2]], torch.zeros(2, 4, 32))
        args[3][[0, 2]] = 0
        assert torch.equal(o, assert_decodes(args))


def test_decode_far_blocks(far: Any) -> None:
    args = list(decode_args((200, 65), dtype=torch.bfloat16))
    expected = assert_decodes(tuple(args))
    used = [args[3][0, :4], args[3][1, :2]]
    table = torch.full_like(args[3], FAR - 7)
    table[0, :4] = torch.arange(FAR, FAR - 4, -1)
    table[1, :2] = torch.tensor([3, FAR - 5])
    for i in (1, 2):
        near = args[i]
        args[i] = far(FAR + 1, *near.shape[1:])
        for row, own in zip(table, used, strict=True):
            args[i][row[: len(own)].long()] = near[own.long()]
    args[3] = table
    assert torch.equal(KERNELS["paged_attention_decode"].call(*args), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (1, 80), (3, 16), (2, 256)])
def test_gathered_blocks(heads: int, dim: int, dtype: str) -> None:
    """Side by side, zeros past each sequence's end and in what is nobody's."""
    torch.manual_seed(0)
    lengths, counts = (65, 0, 1, 64, 0, 130), (2, 0, 1, 3, 1, 3)  # some have more than they need
    k_cache, v_cache, blocks = pool_of_blocks(counts, heads, dim, BLOCK_SIZE, DTYPES[dtype])
    expected = torch.zeros(2, sum(counts) + 2, BLOCK_SIZE, heads, dim)
    first = 0
    for length, count, own in zip(lengths, counts, blocks, strict=True):
        rows = torch.randn(2, length, heads, dim).to(DTYPES[dtype])
        place = own[torch.arange(length) // BLOCK_SIZE].long(), torch.arange(length) % BLOCK_SIZE
        k_cache[place], v_cache[place] = rows
        expected[:, first : first + count].flatten(1, 2)[:, :length] = rows
        first += count
    kv_indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    kv_indices = F.pad(torch.cat(blocks), (0, 2))  # two that are nobody's
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    gather = kernel("paged_attention", "gather_blocks")
    gathered = gather(k_cache, v_cache, kv_indptr, kv_indices, seq_lens)
    for actual, wanted in zip(gathered, expected, strict=True):
        assert actual.is_contiguous() and torch.equal(actual.float(), wanted.flatten(0, 1))


def test_blocks_of_many_sequences() -> None:
    """More than one load of `kv_indptr` holds, many of them empty."""
    torch.manual_seed(0)
    counts = torch.randint(0, 2, (300,))
    counts[[0, -1]] = 1
    total = int(counts.sum())
    k_cache = torch.randn(total, 16, 1, 8)
    kv_indptr = F.pad(counts.cumsum(0), (1, 0)).int()
    kv_indices = torch.randperm(total).int()
    seq_lens = (counts * torch.randint(1, 17, (300,))).int()
    gather = kernel("paged_attention", "gather_blocks")
    k, v = gather(k_cache, -k_cache, kv_indptr, kv_indices, seq_lens)
    expected = k_cache[kv_indices.long()]
    expected[torch.arange(16)[None] >= seq_lens[counts > 0][:, None]] = 0
    assert torch.equal(k, expected.flatten(0, 1)) and torch.equal(v, -k)


def test_no_blocks_to_gather() -> None:
    empty, zeros = torch.zeros(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    cache = torch.full((2, 16, 2, 8), torch.nan)
    k, v = kernel("paged_attention", "gather_blocks")(cache, cache, zeros, empty, zeros[:2])
    assert k.shape == v.shape == (0, 2, 8)


def test_far_blocks_are_gathered(far: Any) -> None:
    k_cache, v_cache = (far(FAR + 1, 16, 2, 24) for _ in range(2))
    rows = torch.randn(2, 2, 16, 2, 24).bfloat16()
    for cache, values in zip((k_cache, v_cache), rows, strict=True):
        cache[FAR], cache[FAR - 3] = values
    kv_indptr, seq_lens = torch.tensor([0, 2]).int(), torch.tensor([32]).int()
    gathered = kernel("paged_attention", "gather_blocks")(
        k_cache, v_cache, kv_indptr, torch.tensor([FAR, FAR - 3]).int(), seq_lens
    )
    for actual, values in zip(gathered, rows, strict=True):
        assert torch.equal(actual, values.flatten(0, 1))


def test_one_tensor_may_be_passed_twice() -> None:
    """q and k of one projection, and a norm of a sum with itself."""
    for name, twice in (
        ("qk_norm_rope", {1: 0, 3: 2}),
        ("add_rms_norm", {1: 0}),
        ("gated_rms_norm", {1: 0}),
        ("silu_mul", {1: 0}),
        ("sigmoid_mul", {1: 0}),
        ("fused_gated_delta_rule_decode_slots", {1: 0, 4: 3, 6: 5}),
    ):
        args = list(example(name))
        for target, source in twice.items():
            args[target] = args[source]
        op, exact = OPS[name], test_ops.clones(tuple(args))
        actual = test_ops.results(op, KERNELS[name].call, tuple(args))
        for a, e in zip(actual, test_ops.results(op, op.definition, exact), strict=True):
            test_ops.assert_near(a, e, op.tolerance[torch.float32])


def test_keys_may_be_their_own_values() -> None:
    k_cache, v_cache, k, _, places = example("paged_kv_write")
    KERNELS["paged_kv_write"].call(k_cache, v_cache, k, k, places)
    block_size = k_cache.shape[1]
    for cache in (k_cache, v_cache):
        assert torch.equal(cache[places // block_size, places % block_size], k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("many", [(1, 2, 4), (4, 2, 1), (4, 4, 4), (8, 1, 2)])
def test_rotations_of_many_tokens(
    many: tuple[int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of several tokens, filled and not, and of more heads than there are."""
    from minivllm.ops.kernels import qk_norm_rope

    monkeypatch.setattr(qk_norm_rope, "MANY_TOKENS", 1)
    monkeypatch.setattr(qk_norm_rope, "TILE_OF_MANY", many)
    if dtype == "float32":
        test_the_examples("qk_norm_rope")
    elif dtype == "bfloat16":
        test_the_examples_in_bfloat16("qk_norm_rope")
    else:
        test_roundings_stand_where_torch_has_them("qk_norm_rope")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [1, 15, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_tokens_of_several_parts(
    rows: int, limit: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one block and of several; the lowest of equals wherever they lie."""
    from minivllm.ops.kernels import decode_step

    monkeypatch.setattr(decode_step, "GREEDY_BLOCK", 16)
    monkeypatch.setattr(decode_step, "GREEDY_PROGRAMS", 12)
    torch.manual_seed(limit)
    # few values: the highest is there many times
    logits = torch.randint(-3, 4, (rows, limit + 5)).to(DTYPES[dtype])
    logits[:, limit:] = 50.0
    slots = torch.randperm(7)[:rows]
    greedy, tokens = torch.full((rows,), 77), torch.arange(100, 107)
    KERNELS["greedy_tokens"].call(logits, slots, limit, greedy, tokens)
    for n, row in enumerate(logits[:, :limit].tolist()):
        lowest = row.index(max(row))
        assert greedy[n] == lowest
        assert tokens[slots[n]] == (lowest if slots[n] else 0)
    untouched = sorted(set(range(7)) - set(slots.tolist()))
    assert tokens[untouched].tolist() == [100 + s for s in untouched]


@pytest.mark.parametrize("place", [0, 40, 89])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_token_of_logits_that_are_not_finite(
    value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN beats every number, whatever comes before or behind it in its lane."""
    from minivllm.ops.kernels import decode_step

    monkeypatch.setattr(decode_step, "GREEDY_BLOCK", 16)
    monkeypatch.setattr(decode_step, "GREEDY_PROGRAMS", 4)
    logits = torch.randn(2, 90)
    logits[0, place] = value
    logits[1, 3] = -value
    greedy, tokens = torch.zeros(2, dtype=torch.int64), torch.full((3,), 77)
    KERNELS["greedy_tokens"].call(logits, torch.tensor([2, 1]), 90, greedy, tokens)
    second = -1 if value != value else int(logits[1].argmax())
    assert greedy.tolist() == [-1, second]
    assert tokens.tolist() == [77, max(second, 0), 0]


def test_decode_inputs_of_long_tables() -> None:
    """More blocks than a program loads at once; behind a row's position lie zeros."""
    tables = torch.randint(1, 2**31 - 1, (4, 700), dtype=torch.int32)
    rows = torch.tensor([[64 * 256, 64 * 699 + 63, 64 * 255 + 63, 0], [3, 1, 2, 0]])
    tokens = torch.tensor([0, 11, 12, 13])
    found = KERNELS["decode_inputs"].call(*rows, tokens, tables)
    expected = OPS["decode_inputs"].definition(*rows, tokens, tables)
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)
    assert found[1].count_nonzero(1).tolist() == [257, 700, 256, 1]


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_to_do(name: str) -> None:
    """No rows at all: nothing is written, and shapes are right."""
    op = OPS[name]
    args = list(example(name))
    names = [a.name for a in op.overload._schema.arguments]
    pools = {"state", "k_cache", "v_cache", "weight", "A_log", "dt_bias", "q_weight", "k_weight"}
    for i, (argument, value) in enumerate(zip(names, args, strict=True)):
        if isinstance(value, Tensor) and argument not in pools | {"inv_freq", "cu_seqlens"}:
            args[i] = value[:0]
    if "cu_seqlens" in names:
        args[names.index("cu_seqlens")] = torch.zeros(1, dtype=torch.int32)
    kept = test_ops.clones(tuple(args))
    for output in test_ops.listed(KERNELS[name].call(*args)):
        assert output.shape[0] == 0
    for a, b in zip(test_ops.written(op, tuple(args)), test_ops.written(op, kept), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_the_kernels_are_for_cuda_in_every_dtype() -> None:
    for implementation in KERNELS.values():
        assert isinstance(implementation, Implementation)
        assert implementation.devices == ("cuda",)
        assert set(implementation.dtypes) == set(DTYPES.values())
