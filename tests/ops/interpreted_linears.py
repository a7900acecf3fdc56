"""The Triton kernels of linears, interpreted: their tiles, and where they round.

Run by `test_linears_interpreted.py`, in a process of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_ops
import torch
from interpreted_kernels import DTYPES, KERNELS, LINEARS, tolerant

from bench.kernels import mismatch
from minivllm.ops import OPS
from minivllm.ops.kernels import linear
from minivllm.ops.kernels.linear import LINEAR, PARTS, SILU_MUL, Operand, Tile

pytest_plugins = ["interpreted_fixtures"]


@pytest.mark.parametrize("name", LINEARS)
def test_roundings_around_a_product_stand_where_torch_has_them(name: str) -> None:
    """float16 to the bit, but for some results on the edge of two roundings: the product adds in
    another order."""
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


class Watched:
    """What each program of a product asks for ahead, and the weights that it reads, in order.

    Attributes:
        programs: for each, the ranges of addresses it asks for and those of each step that it
            reads; a range is of one row.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: list[tuple[set[tuple[int, int]], list[set[tuple[int, int]]]]] = []
        self.read = linear._weights
        monkeypatch.setattr(linear, "pdl", lambda: {"PDL": True})
        monkeypatch.setattr(linear, "wait_for_inputs", lambda PDL: None)
        monkeypatch.setattr(linear, "let_next_start", self.start)
        monkeypatch.setattr(linear, "ask_for", self.ask)
        monkeypatch.setattr(linear, "_weights", self.load)

    def start(self, PDL: Any) -> None:
        self.programs.append((set(), []))

    def ask(self, place: Any, SIZE: Any) -> None:
        asked, steps = self.programs[-1]
        assert not asked and not steps
        starts = place.handle.data.astype(int).ravel()
        asked |= {(start, start + int(SIZE)) for start in starts.tolist()}

    def load(self, w: Any, n: Any, n_mask: Any, step: Any, d: Any, D: Any, K: Any) -> Any:
        rows = n.handle.data[np.broadcast_to(n_mask.handle.data, n.handle.data.shape)]
        first = 2 * (rows * int(K) + int(step) * int(D)) + int(w.handle.data.item())
        self.programs[-1][1].append({(int(a), int(a) + 2 * int(D)) for a in first})
        return self.read(w, n, n_mask, step, d, D, K)


@pytest.mark.parametrize(("end", "programs"), [(LINEAR, 0), (SILU_MUL, 0), (PARTS, 4)])
@pytest.mark.parametrize("gate", ["plain", "gate", "norm"])
@pytest.mark.parametrize(("early", "ahead"), [(0, 2), (1, 1), (1, 2), (2, 9)])
def test_a_product_asks_for_what_it_reads_first(
    early: int, ahead: int, gate: str, end: Any, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the weights in registers, and nothing outside the weight, whose end is in a tile."""
    torch.manual_seed(0)
    rows, heads, dim, outputs = 5, 6, 128, 70
    x, gates, norm = torch.randn(rows, heads, dim), torch.randn(rows, heads, dim), torch.ones(dim)
    weight = torch.randn(outputs, heads * dim).bfloat16()
    x, gates, norm = (t.bfloat16() for t in (x, gates, norm))
    operand = {
        "plain": Operand(x.flatten(1)),
        "gate": Operand(x, gates),
        "norm": Operand(x, gates, norm, 1e-6),
    }[gate]
    size = 33 if end == SILU_MUL else outputs
    quiet = Tile("dot", 16, 64, 4, 2, programs)
    expected = linear.product(quiet, operand, weight, end, size)
    watched = Watched(monkeypatch)
    tile = Tile("dot", 16, 64, 4, 2, programs, early, ahead)
    actual = linear.product(tile, operand, weight, end, size)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-5)
    steps = 3 if programs else heads
    assert len(watched.programs) == 2 * heads // steps
    for asked, read in watched.programs:
        assert len(read) == steps
        wanted = read[early : early + ahead]
        rows_of_all = zip(*(sorted(step) for step in wanted), strict=True)
        whole = {(row[0][0], row[-1][1]) for row in rows_of_all}
        # rows behind the weight's end ask for its first one
        assert whole <= asked
        assert all(start - weight.data_ptr() < 2 * heads * dim for start, _ in asked - whole)
        for start, stop in asked:
            assert weight.data_ptr() <= start < stop <= weight.data_ptr() + weight.nbytes
            assert start % 16 == 0 and stop % 16 == 0
