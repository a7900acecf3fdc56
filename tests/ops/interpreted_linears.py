"""The Triton kernels of linears, interpreted: their tiles, and where they round.

Run by `test_linears_interpreted.py`, in a process of its own.
"""

from __future__ import annotations

import pytest
import test_ops
import torch
from interpreted_kernels import (
    DTYPES,
    KERNELS,
    LINEARS,
    tolerant,
)

from bench.kernels import mismatch
from minivllm.ops import OPS

pytest_plugins = ["interpreted_fixtures"]


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
