"""Fixtures of the tests that run in triton's interpreter, for files that name it as their plugin.

    pytest_plugins = ["interpreted_fixtures"]

The interpreter's matrix product takes bfloat16's bits for integers, and it forgets what it finds of
overflows: that is put right here, and some of what it does again and again is done once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from interpreted_kernels import FAR
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


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


@pytest.fixture(autouse=True)
def no_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer of less than 64 bits that overflows is an error, as an index would be wrong.

    Triton computes as much by six operations of its own, a quarter of the time that all takes, and
    drops the result unless the interpreter debugs.
    """
    operators = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}

    def check(self: Any, lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
        values = lhs.handle.data, rhs.handle.data
        dtype = values[0].dtype
        if dtype.itemsize < 8 and dtype != np.bool_:
            exact = operators[operation.__name__](*(x.astype(np.int64) for x in values))
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            assert low <= exact.min() and exact.max() <= high, f"{operation.__name__} overflows"

    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check)


@pytest.fixture(autouse=True)
def shapes_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one shape share its constants: a fifth of the time that all takes."""
    init = tl.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def quick(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known[shape]
        else:
            init(self, handle, type)
            known[shape] = self.numel, self.shape

    monkeypatch.setattr(tl.tensor, "__init__", quick)


@pytest.fixture(autouse=True)
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch puts the interpreter in the place of triton's language once for each module.

    Triton does so at every call of a jitted function, `tl.sum` and `tl.cdiv` among them: a third of
    the time that all takes, and nothing is left to be done after the first.
    """
    launch, patch = GridExecutor.__call__, interpreter._patch_lang
    done: set[int] = set()

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    def once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return None
        done.add(module)
        return patch(fn)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter, "_patch_lang", once)


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
