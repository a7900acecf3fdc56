"""Every Triton kernel, interpreted, over its op's examples and the shapes of models.

Run by `test_kernels_interpreted.py`, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import test_ops
import torch
from interpreted_kernels import (
    DTYPES,
    KERNELS,
    LINEARS,
    example,
    tolerant,
)
from torch import Tensor

from bench.kernels import Shapes, mismatch, model_config
from minivllm.ops import OPS, Implementation
from minivllm.ops.op import HALF_DTYPES

pytest_plugins = ["interpreted_fixtures"]
STEP = ("decode_inputs", "greedy_tokens")  # around the decode graph
CHUNKED = ("fused_gated_delta_rule_prefill", "fused_gated_delta_rule_prefill_slots")


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


def test_roundings_of_the_delta_rule_stand_where_torch_has_them() -> None:
    """q, k and beta are rounded to float16, all else is float32: states differ by its ulps."""
    op = OPS["fused_gated_delta_rule_decode_slots"]
    args = op.examples(torch.Generator().manual_seed(1), torch.float16)[0]
    expected_args = test_ops.clones(args)
    KERNELS[op.name].call(*args)
    op.implementations[0].call(*expected_args)
    test_ops.assert_near(args[7], expected_args[7], 1e-6)


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
    """But for the chunked rule, whose products are of half precision and TF32."""
    for name, implementation in KERNELS.items():
        assert isinstance(implementation, Implementation)
        assert implementation.devices == ("cuda",)
        dtypes = HALF_DTYPES if name in CHUNKED else DTYPES.values()
        assert set(implementation.dtypes) == set(dtypes)
