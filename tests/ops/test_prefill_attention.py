"""Prefill attention's own kernels: in triton's interpreter, compiled, and on a GPU.

The interpreter needs a process of its own, for `interpreted_prefill_attention.py`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import test_ops
import torch
from interpreter import run_interpreted
from prefill_attention_arguments import prefill_args, shared_sequence
from torch import Tensor

from minivllm.ops import OPS
from minivllm.ops.op import is_importable
from minivllm.ops.paged_attention import BLOCK_SIZE

pytest.importorskip("triton")

from test_kernels_compile import Target, compiled  # noqa: F401
from triton.runtime import driver

from minivllm.ops.kernels.prefill_attention import (
    EXACT,
    HOPPER,
    HOPPER_FEW,
    MAX_SPLITS,
    PORTABLE,
    paged_attention_prefill,
    prefill_splits,
    tile_for,
)

OP = OPS["paged_attention_prefill"]
KERNEL, COMBINE = "_paged_prefill_kernel", "_combine_tiles_kernel"
HEADS, DIM = (8, 2), 256  # the 0.8B's
STACK = {90: 96, 80: 16}  # bytes a thread, of values that only the lines behind the loop need


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_prefill_attention.py")


def shapes(
    tokens: int,
    sequences: int = 2,
    heads: tuple[int, int] = HEADS,
    dim: int = DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    """Arguments without data; caches are views of a pool of several layers."""
    pool = torch.empty(9, 3, 2, BLOCK_SIZE, heads[1], dim, dtype=dtype, device="meta")
    q = torch.empty(tokens, heads[0], dim, dtype=dtype, device="meta")
    starts, blocks, lengths = (
        torch.empty(n, dtype=torch.int32, device="meta") for n in (sequences + 1, 300, sequences)
    )
    return q, pool[:, 1, 0], pool[:, 1, 1], starts, blocks, starts, lengths, dim**-0.5


def test_the_number_of_splits() -> None:
    """Every multiprocessor has work for a short part; a grid that fills the card is not split."""
    assert prefill_splits(0) == prefill_splits(1) == prefill_splits(8) == MAX_SPLITS
    assert prefill_splits(132) == 2
    assert prefill_splits(133) == prefill_splits(1000) == 1


@pytest.mark.parametrize(
    ("capability", "few", "many"),
    [(80, PORTABLE, PORTABLE), (90, HOPPER_FEW, HOPPER), (120, PORTABLE, PORTABLE)],
)
def test_the_tile_of_a_device(
    capability: int, few: Any, many: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_active", Target(capability))
    for dtype in (torch.bfloat16, torch.float16):
        assert tile_for(dtype, 1) == tile_for(dtype, 8 * 2048) == few
        assert tile_for(dtype, 8 * 3776) == many
    assert tile_for(torch.float32, 1) == EXACT


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [
        ((8, 2), 256, torch.bfloat16),
        ((40, 1), 256, torch.bfloat16),
        ((6, 2), 80, torch.bfloat16),
        ((8, 2), 32, torch.bfloat16),
        ((6, 2), 80, torch.float32),
        ((8, 2), 256, torch.float32),
    ],
    ids=str,
)
def test_it_compiles(
    dtype: torch.dtype,
    dim: int,
    heads: tuple[int, int],
    capability: int,
    compiled: Any,  # noqa: F811
) -> None:
    """What is not Hopper's fits into a consumer's 99 KiB."""
    args = shapes(16, heads=heads, dim=dim, dtype=dtype)
    attention, combine = compiled(capability, iter([(paged_attention_prefill, args)]))
    assert (attention.name, combine.name) == (KERNEL, COMBINE)
    assert attention.local == combine.local == combine.stack == 0
    assert attention.stack <= (STACK[capability] if dtype == torch.bfloat16 else 8)
    assert attention.shared <= (227 if capability == 90 else 99) * 1024
    assert ("wgmma" in attention.ptx) == (capability == 90 and dtype == torch.bfloat16)
    assert "tf32" not in attention.ptx
    for k in (attention, combine):
        assert ("griddepcontrol" in k.ptx) == (capability == 90)


def test_keys_and_values_move_in_16_bytes(compiled: Any) -> None:  # noqa: F811
    """Straight to shared memory, a step ahead; whole blocks as one copy each on Hopper."""
    for capability, tokens, rows, keys in ((90, 100, 64, 64), (90, 4096, 128, 64), (80, 9, 64, 32)):
        launch = (paged_attention_prefill, shapes(tokens))
        attention, *_ = compiled(capability, iter([launch]))
        pattern = r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)"
        copies = re.findall(pattern, attention.ptx)
        assert set(copies) <= {"0x10"} and (copies or capability == 90)
        assert ("cp.async.bulk.tensor" in attention.ptx) == (capability == 90)
        # queries, and keys and values of the steps under way
        held = rows + 2 * 2 * keys if capability == 90 else 2 * keys
        assert attention.shared >= held * 256 * 2


def test_it_is_built_once_for_each_tile(compiled: Any) -> None:  # noqa: F811
    """Whatever the tokens, the sequences and the number of splits."""
    calls = [shapes(t, n) for t in (1, 16, 17, 1024, 4096) for n in (1, 2, 16, 33)]
    found = compiled(90, ((paged_attention_prefill, args) for args in calls))
    assert sorted(k.name for k in found) == [COMBINE, KERNEL, KERNEL]


def needs_gpu(test: Any) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    return pytest.mark.gpu(skip(test))


def on_gpu(
    new: tuple[int, ...], history: tuple[int, ...], dtype: torch.dtype, **options: Any
) -> tuple[Any, ...]:
    args = prefill_args(new, history, HEADS, DIM, dtype, **options)
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in args)


GPU_CASES = {
    "long": ((2048,), (0,)),
    "history": ((64,), (1984,)),
    "ragged": ((1, 63, 300, 129), (700, 0, 64, 3)),
    "many": ((100,) * 32, (0,) * 32),
}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", GPU_CASES)
def test_the_model_s_shapes(case: str, dtype: torch.dtype) -> None:
    args = on_gpu(*GPU_CASES[case], dtype, surplus=20)
    expected = OP.definition(*test_ops.floats(lambda x: x.float(), args))
    actual = paged_attention_prefill(*args)
    test_ops.assert_near(actual, expected, OP.tolerance[dtype])
    assert (actual[-20:] == 0).all()


@needs_gpu
@pytest.mark.skipif(not is_importable("flash_attn"), reason="needs flash-attn")
@pytest.mark.parametrize("case", GPU_CASES)
def test_it_is_no_less_exact_than_flash_attn(case: str) -> None:
    (flash,) = (i.call for i in OP.implementations if i.name == "flash_attn")
    args = on_gpu(*GPU_CASES[case], torch.bfloat16)
    expected = OP.definition(*test_ops.floats(lambda x: x.float(), args))
    error, theirs = (
        float((call(*args).float() - expected).square().mean().sqrt())
        for call in (paged_attention_prefill, flash)
    )
    assert 0 < error <= 1.1 * theirs


@needs_gpu
def test_a_replay_with_other_sequences() -> None:
    """One captured launch serves any batch of its T and N, and others change nothing."""
    first = on_gpu((300, 5, 200), (100, 700, 0), torch.bfloat16)
    second = on_gpu((300, 200, 5), (100, 0, 700), torch.bfloat16, seed=1)
    shared_sequence(first, second)
    fresh = [paged_attention_prefill(*args) for args in (first, second)]
    assert torch.equal(fresh[0][:300], fresh[1][:300])
    static = tuple(a.clone() if isinstance(a, Tensor) else a for a in first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = paged_attention_prefill(*static)
    for args, expected in zip((first, second), fresh, strict=True):
        for buffer, value in zip(static, args, strict=True):
            if isinstance(buffer, Tensor):
                buffer.copy_(value)
        graph.replay()
        assert torch.equal(o, expected)
