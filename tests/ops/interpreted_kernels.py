"""The kernels as triton's interpreter runs them on the CPU: what the `interpreted_*.py` share.

`interpreter.py` runs those files, each in a process of its own.

The interpreter truncates where a GPU rounds to nearest when it stores bfloat16, so bfloat16 gets
three times the tolerance here; float16 it rounds rightly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import test_ops
import torch
import triton

from minivllm.ops import OPS, Op

assert triton.knobs.runtime.interpret, "run by interpreter.py"

KERNELS = {
    name: implementation
    for name, op in OPS.items()
    for implementation in op.implementations
    if implementation.package == "triton"
}
LINEARS = tuple(name for name in OPS if "linear" in name)
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


FAR = 8195  # a slot whose offset, at 262,144 elements a slot, no 32 bits hold
