"""The convolution that leaves q, k and v apart: its machine code, and its bits on a GPU.

What holds for every op is in `test_ops.py`; what the kernel computes, in the interpreter's files.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_kernels_compile import compiled  # noqa: F401
from torch import Tensor

from bench.kernels import Shapes, model_config
from minivllm.ops.chunks import chunk_metadata, chunk_tensors, max_chunks, padded_chunk_lists
from minivllm.ops.kernels import kernel

QKV = kernel("causal_conv1d", "causal_conv1d_qkv_prefill_slots")
NAME = "causal_conv1d_qkv_prefill_slots"
REGISTERS = 152  # a thread: as the other kernels of one warp a program


def arguments(
    model: str, dtype: torch.dtype, lengths: tuple[int, ...], kept: bool
) -> tuple[Any, ...]:
    """A launch's, without data."""
    shapes, tokens = Shapes(model_config(model), dtype, "meta"), sum(lengths)
    (args, *_) = dict(shapes.stateful("prefill", len(lengths), tokens, 1))[NAME]
    metadata = [x.to("meta") for x in chunk_metadata(lengths)]
    chunk_slots = torch.empty(len(metadata[1]), dtype=torch.int32, device="meta")
    return (*args[:5], *metadata, *args[7:], *([chunk_slots] if kept else []))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("model", ["miniqwen08b", "tiny"])
@pytest.mark.parametrize("capability", [90, 80])
def test_the_kernel_compiles(
    capability: int,
    model: str,
    kept: bool,
    compiled: Any,  # noqa: F811
) -> None:
    """One variant for a model, whatever the lengths; 16 bytes a thread, in and out; no spills."""
    sizes = ((64,), (3000, 1, 70), (512, 512))
    launches = ((QKV, arguments(model, torch.bfloat16, lengths, kept)) for lengths in sizes)
    (k,) = compiled(capability, iter(launches))
    assert k.name == "_qkv_prefill_kernel" and k.local == k.stack == 0, k
    assert k.registers <= REGISTERS, k
    # of q or k and of v: three tokens before a run, then those that are loaded ahead in the loop
    assert len(re.findall(r"ld\.global\.v4\.b32", k.ptx)) >= 2 * (3 + 4)
    assert len(re.findall(r"st\.global\.v4\.b32", k.ptx)) == 2 * 4
    # a head's lanes alone add up its length: no shared memory, and no barrier
    heads = len(re.findall(r"shfl\.sync\.bfly", k.ptx))
    assert heads == 4 * {"miniqwen08b": 4, "tiny": 3}[model]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_compile(dtype: str, compiled: Any) -> None:  # noqa: F811
    (k,) = compiled(90, iter([(QKV, arguments("tiny", getattr(torch, dtype), (65,), True))]))
    assert k.local == k.stack == 0 and "tf32" not in k.ptx, k


@pytest.mark.parametrize("heads", [(3, 80, 96, 6), (2, 512, 256, 2), (17, 16, 16, 34)])
def test_other_heads_compile(heads: tuple[int, ...], compiled: Any) -> None:  # noqa: F811
    """Not a power of two, wider than a program, more than a program has."""
    key_heads, key_dim, value_dim, value_heads = heads
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    x = torch.empty(65, channels, dtype=torch.bfloat16, device="meta")
    weight, pool = x.new_empty(channels, 4), x.new_empty(3, channels, 4)
    slots = torch.empty(1, dtype=torch.int64, device="meta")
    places = slots, slots.int(), *(m.to("meta") for m in chunk_metadata([65]))
    (k,) = compiled(90, iter([(QKV, (x, weight, pool, *places, key_heads, key_dim, value_dim))]))
    assert k.local == k.stack == 0, k


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("lengths", [(512,), (1,), (300, 0, 77, 64)], ids=str)
@pytest.mark.parametrize("model", ["miniqwen08b", "tiny"])
def test_every_bit_of_the_convolution_and_the_copies(model: str, lengths: tuple[int, ...]) -> None:
    """In one launch what two give apart: the same sums in the same order."""
    torch.manual_seed(0)
    shapes, tokens = Shapes(model_config(model), torch.bfloat16, "cuda"), sum(lengths) + 9
    c, seqs = shapes.config, len(lengths) + 1
    heads = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    metadata = chunk_tensors(*padded_chunk_lists(lengths, tokens, seqs, max_chunks(tokens, seqs)))
    slots = torch.cat([torch.arange(len(lengths)) + 1, torch.zeros(1, dtype=torch.int64)])
    computed = torch.tensor([64, 0, 3, 0][:seqs], dtype=torch.int32)
    places = [x.to("cuda") for x in (slots, computed, *metadata)]
    x, weight = shapes.mixer_row(tokens)[0], shapes.random(c.conv_dim, 4)
    pool, _ = shapes.pools(seqs + 1)
    pools = pool.clone(), pool.clone()
    keys = heads[0] * heads[1]

    y = kernel("causal_conv1d", "causal_conv1d_prefill_slots")(x, weight, pools[0], *places)
    q, k, v = y.split([keys, keys, c.value_dim], dim=-1)
    rows: list[Tensor] = [t.unflatten(-1, (-1, heads[1])) for t in (q, k)]
    rows.append(v.unflatten(-1, (-1, heads[2])))
    expected = kernel("unit_rows", "unit_rows")(*rows)
    actual = QKV(x, weight, pools[1], *places, *heads)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(pools[0][1:], pools[1][1:])
