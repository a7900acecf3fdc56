"""The kernels of prefill attention in triton's interpreter, held to the op's definition.

Run by `test_prefill_attention.py`, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import test_ops
import torch
from interpreted_kernels import DTYPES, FAR, tolerant
from prefill_attention_arguments import prefill_args, shared_sequence
from torch import Tensor

from minivllm.ops.kernels import prefill_attention
from minivllm.ops.kernels.prefill_attention import EXACT, HOPPER, HOPPER_FEW, PORTABLE, Tile

pytest_plugins = ["interpreted_fixtures"]

TILES = (EXACT, PORTABLE, HOPPER_FEW)
# new tokens, history, surplus tokens: one token; ends on and off block edges; empty sequences
CASES = (
    ((1,), (0,), 0),
    ((1,), (130,), 30),
    ((70,), (0,), 0),
    ((5, 1, 33), (0, 190, 63), 0),
    ((3, 0, 0, 64), (0, 7, 0, 64), 2),
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for each."""
    monkeypatch.setattr(prefill_attention, "PROGRAMS", 16)


def use(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "tile_for", lambda dtype, rows: tile)


def set_splits(splits: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "prefill_splits", lambda programs: splits)
    monkeypatch.setattr(prefill_attention, "MIN_SHARE", share)


def assert_attends(args: tuple[Any, ...]) -> Tensor:
    """The kernel's result, which is the definition's in float32."""
    op = tolerant("paged_attention_prefill")
    actual = prefill_attention.paged_attention_prefill(*args)
    expected = op.definition(*test_ops.floats(lambda x: x.float(), args))
    assert actual.dtype == args[0].dtype and actual.is_contiguous()
    test_ops.assert_near(actual, expected, op.tolerance[args[0].dtype])
    assert expected.isfinite().all()
    return actual


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_lengths(
    tile: Tile,
    case: tuple[Sequence[int], Sequence[int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of the padding sequence are zeros; NaN beside the sequences' tokens does not spread."""
    use(tile, monkeypatch)
    new, history, surplus = case
    o = assert_attends(prefill_args(new, history, surplus=surplus))
    assert torch.equal(o[sum(new) :], torch.zeros(surplus, 4, 32))


@pytest.mark.parametrize("tile", [PORTABLE, HOPPER_FEW], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tile, monkeypatch)
    assert_attends(prefill_args((20, 1, 9), (50, 130, 0), dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dim", [16, 80, 256])
@pytest.mark.parametrize("tile", [EXACT, HOPPER_FEW], ids=str)
def test_head_dims(tile: Tile, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tile, monkeypatch)
    assert_attends(prefill_args((9, 2), (60, 0), dim=dim))


@pytest.mark.parametrize("group", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("tile", [EXACT, PORTABLE], ids=str)
def test_groups(tile: Tile, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tile, monkeypatch)
    assert_attends(prefill_args((6, 2), (60, 3), heads=(group * 2, 2)))


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_block_sizes(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for tile in (PORTABLE, HOPPER_FEW):
        use(tile, monkeypatch)
        assert_attends(prefill_args((33, 17, 1), (0, 15, 70), block_size=block_size))


@pytest.mark.parametrize(("splits", "share"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 3), (9, 1)])
@pytest.mark.parametrize("tile", [PORTABLE, HOPPER_FEW], ids=str)
def test_splits(tile: Tile, splits: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as blocks, fewer and more; rows that see nothing of a share that others see."""
    set_splits(splits, share, monkeypatch)
    use(tile, monkeypatch)
    assert_attends(prefill_args((40, 1), (50, 500), heads=(2, 1), surplus=3))


@pytest.mark.parametrize("place", [0, 130, 299])
def test_large_scores(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of some hundreds, the largest in one share: the others weigh nothing."""
    set_splits(5, 1, monkeypatch)
    use(HOPPER, monkeypatch)
    args = prefill_args((20,), (300,))
    args[0].mul_(40)
    block = args[4][place // 64]
    args[1][block, place % 64] = args[0][7].unflatten(0, (2, 2)).sum(1) / 10
    assert_attends(args)


def test_more_sequences_than_are_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(HOPPER, monkeypatch)
    counts = [int(n % 13 == 0) for n in range(131)]
    assert_attends(prefill_args(counts, list(range(131)), heads=(2, 1)))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_others_change_nothing(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same T and N, bit for bit."""
    use(tile, monkeypatch)
    first = prefill_args((40, 1, 30), (30, 200, 0))
    second = prefill_args((40, 13, 18), (30, 0, 100), seed=1)
    shared_sequence(first, second)
    one, other = assert_attends(first), assert_attends(second)
    assert torch.equal(one[:40], other[:40]) and not torch.equal(one[40:], other[40:])


@pytest.mark.parametrize("tile", [PORTABLE, HOPPER_FEW], ids=str)
def test_far_blocks(tile: Tile, far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets that no 32 bits hold."""
    use(tile, monkeypatch)
    args = list(prefill_args((70,), (65,), dtype=torch.bfloat16))
    expected = assert_attends(tuple(args))
    own = args[4][:3].long()
    away = torch.tensor([FAR, 3, FAR - 5])
    for i in (1, 2):
        near = args[i]
        args[i] = far(FAR + 1, *near.shape[1:])
        args[i][away] = near[own]
    args[4] = away.int()
    assert torch.equal(prefill_attention.paged_attention_prefill(*args), expected)


def test_nothing_to_do() -> None:
    args = list(prefill_args((3,), (0,)))
    args[0], args[5], args[6] = args[0][:0], torch.zeros_like(args[5]), torch.zeros_like(args[6])
    assert prefill_attention.paged_attention_prefill(*args).shape == (0, 4, 32)
