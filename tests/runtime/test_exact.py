"""Sums and orders that nothing can change."""

from __future__ import annotations

import pytest
import torch

from minivllm.runtime.exact import WEIGHT_UNITS, key_ids, leading, order_keys, units

CORNERS = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, torch.inf, -torch.inf, 1.0, -1.0]


@pytest.mark.parametrize("size", [1, 2, 12, 997])
def test_keys_sort_by_value_then_lowest_id(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(5, size, generator=generator)
    rows[1:3] = (rows[1:3] * 2).round()  # with ties
    rows[3] = torch.tensor((CORNERS * 100)[:size])
    order = order_keys(rows).argsort(dim=-1, descending=True)
    assert torch.equal(order, rows.argsort(dim=-1, descending=True, stable=True))
    keys = order_keys(rows)
    assert torch.equal(key_ids(keys, size), torch.arange(size).expand(5, -1))
    assert all(len(set(row)) == size for row in keys.tolist())
    for count in {1, size // 2, size}:
        values, ids = leading(rows, count)
        assert torch.equal(ids, order[:, :count])
        assert torch.equal(values, rows.gather(-1, order[:, :count]))


def test_units_are_exact_and_their_sum_fits() -> None:
    assert units(torch.tensor([1.0, 0.5, 2.0**-44, 2.0**-46, 0.0])).tolist() == [
        2**44,
        2**43,
        1,
        0,
        0,
    ]
    total = units(torch.ones(1, 248_320)).sum(-1)
    assert total.tolist() == [248_320 * int(WEIGHT_UNITS)]
    assert 2**18 * WEIGHT_UNITS < 2**63
