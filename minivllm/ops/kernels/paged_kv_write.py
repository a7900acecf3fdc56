"""Kernel of `paged_kv_write` (`ops/paged_attention.py`): one launch for keys and values."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minivllm.ops.kernels.launch import pdl, wait_for_inputs
from minivllm.ops.kernels.numerics import rows_of


@triton.jit
def _copy_token(
    source, target, head_source, head_target, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, d = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (d < D)
    values = tl.load(source + head * head_source + d, mask=mask)
    tl.store(target + head * head_target + d, values, mask=mask)


@triton.jit
def _write_kernel(
    k_cache,
    v_cache,
    k,
    v,
    slot_mapping,
    k_block,
    k_position,
    k_cache_head,
    v_block,
    v_position,
    v_cache_head,
    k_token,
    k_head,
    v_token,
    v_head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + token).to(tl.int64)
    block, position = place // BLOCK_SIZE, place % BLOCK_SIZE
    if tl.program_id(1) == 0:
        target = k_cache + block * k_block + position * k_position
        _copy_token(
            k + token * k_token, target, k_head, k_cache_head, HEADS, D, BLOCK_HEADS, BLOCK_D
        )
    else:
        target = v_cache + block * v_block + position * v_position
        _copy_token(
            v + token * v_token, target, v_head, v_cache_head, HEADS, D, BLOCK_HEADS, BLOCK_D
        )


def paged_kv_write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor
) -> None:
    """As `ops.paged_attention.define_write`; the last dim of each tensor is contiguous."""
    _, block_size, heads, dim = k_cache.shape
    assert k_cache.stride(-1) == 1 and v_cache.stride(-1) == 1
    k_rows, v_rows = rows_of(k), rows_of(v)
    block_heads, block_dim = triton.next_power_of_2(heads), triton.next_power_of_2(dim)
    _write_kernel[(k.shape[0], 2)](
        k_cache,
        v_cache,
        k,
        v,
        slot_mapping.contiguous(),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        k_rows.token,
        k_rows.head,
        v_rows.token,
        v_rows.head,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        D=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_dim,
        num_warps=min(4, max(1, block_heads * block_dim // 256)),
        **pdl(),
    )
