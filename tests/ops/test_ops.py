"""Every op of the library, held to its own definition, schema and fake.

What is particular to one op stands in that op's file; here is what holds for all of them, so that
an op that is added without examples, tolerance or a right fake fails at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from minivllm.ops import OPS, Implementation, Op
from minivllm.ops.op import ALL_DTYPES, NAMESPACE, is_importable

NAMES = tuple(OPS)
INTEGER_OPS = ("decode_inputs",)  # no argument has the model's dtype
DTYPES = {str(d).removeprefix("torch."): d for d in ALL_DTYPES}
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
)


def cases() -> list[Any]:
    """(op, implementation, device, dtype), each marked with what it needs."""
    found = []
    for op in OPS.values():
        for implementation in op.implementations:
            for device in implementation.devices:
                missing = implementation.package and not is_importable(implementation.package)
                marks = list(GPU) if device == "cuda" else []
                marks.append(
                    pytest.mark.skipif(bool(missing), reason=f"needs {implementation.package}")
                )
                name = f"{op.name}-{implementation.name}-{device}"
                found += [
                    pytest.param(op, implementation, device, d, marks=marks, id=f"{name}-{d}")
                    for d in implementation.dtypes
                ]
    return found


def floats(change: Callable[[Tensor], Tensor], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` with every floating tensor changed."""
    return tuple(change(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def wide_rows(x: Tensor) -> Tensor:
    """x as every second row of a wider buffer whose other rows are NaN."""
    buffer = x.new_full((x.shape[0], 2, *x.shape[1:]), torch.nan)
    buffer[:, 0] = x
    return buffer[:, 0]


def transposed(x: Tensor) -> Tensor:
    """x with its first dim innermost in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def gapped(x: Tensor) -> Tensor:
    """x with a NaN between any two neighbours of its last dim."""
    buffer = x.new_full((*x.shape, 2), torch.nan)
    buffer[..., 0] = x
    return buffer[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "given": lambda x: x,
    "contiguous": lambda x: x.contiguous(),
    "wide_rows": wide_rows,
    "transposed": transposed,
    "gapped": gapped,
}


def examples(op: Op, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return op.examples(torch.Generator().manual_seed(0), dtype)


def clones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies that keep the strides, gaps included."""

    def clone(x: Tensor) -> Tensor:
        copy = x.untyped_storage().clone()
        return x.new_empty(0).set_(copy, x.storage_offset(), x.shape, x.stride())

    return tuple(clone(a) if isinstance(a, Tensor) else a for a in args)


def written(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that the schema says the op changes."""
    declared = op.overload._schema.arguments
    return [
        value
        for value, argument in zip(args, declared, strict=False)  # the last may be left out
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def listed(outputs: Any) -> list[Tensor]:
    if outputs is None:
        return []
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def results(op: Op, call: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """What a call returns and what it leaves in the arguments it may change."""
    return listed(call(*args)) + written(op, args)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Same NaN places, and elsewhere within `tolerance` of the largest expected magnitude."""
    scale = expected.nan_to_num().abs().max() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=0, atol=float(tolerance * scale), equal_nan=True
    )


def test_every_op_of_the_namespace_is_listed() -> None:
    prefix = f"{NAMESPACE}::"
    defined = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)}
    assert defined == {f"{prefix}{name}" for name in OPS}


@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_complete(name: str) -> None:
    op = OPS[name]
    assert op.name == name
    assert op.overload is getattr(torch.ops.minivllm, name).default
    assert callable(op.definition)
    assert set(op.tolerance) == set(ALL_DTYPES)
    for dtype, tolerance in op.tolerance.items():
        # no looser than eight roundings of the dtype, and float32 never looser than half
        assert 0 <= tolerance <= max(8 * torch.finfo(dtype).eps, 1e-5)
    substitute = op.implementations[0]
    assert (substitute.devices, substitute.dtypes, substitute.package) == (
        ("cpu", "cuda"),
        ALL_DTYPES,
        None,
    )
    names = [i.name for i in op.implementations]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_examples_fit_the_schema(name: str, dtype: str) -> None:
    op = OPS[name]
    given = examples(op, DTYPES[dtype])
    assert len(given) >= 2
    parameters = op.overload._schema.arguments
    for args in given:
        assert len(args) == len(parameters)
        typed = any(isinstance(a, Tensor) and a.dtype == DTYPES[dtype] for a in args)
        assert typed != (name in INTEGER_OPS)
    assert any(not a.is_contiguous() for args in given for a in args if isinstance(a, Tensor)), (
        "no example is a slice of a wider row"
    )
    shapes = {tuple(a.shape for a in args if isinstance(a, Tensor)) for args in given}
    assert len(shapes) >= 2, "all examples have one size"


@pytest.mark.parametrize(("op", "implementation", "device", "dtype"), cases())
def test_an_implementation_is_its_definition(
    op: Op, implementation: Implementation, device: str, dtype: torch.dtype
) -> None:
    layouts = dict(LAYOUTS)
    if implementation.package:
        # a package's kernels may ask for rows whose last dim is contiguous
        del layouts["transposed"], layouts["gapped"]
    for layout, given in itertools.product(layouts.values(), examples(op, dtype)):
        exact = clones(floats(lambda x: x.float(), given))
        expected = results(op, op.definition, exact)
        args = tuple(a.to(device) if isinstance(a, Tensor) else a for a in given)
        args = clones(floats(layout, args))
        before = clones(args)
        outputs = listed(implementation.call(*args))

        actual = outputs + written(op, args)
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_near(a.cpu(), e, op.tolerance[dtype])
        changed = {id(a) for a in written(op, args)}
        for a, b in zip(args, before, strict=True):
            if isinstance(a, Tensor) and id(a) not in changed:
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        for output in outputs:
            assert output.is_contiguous()
        owned = [a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)]
        own = [o.untyped_storage().data_ptr() for o in outputs if o.numel()]
        assert not set(own) & set(owned), "an output aliases an input"
        assert len(set(own)) == len(own), "two outputs share memory"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_fake_is_the_real_output_without_data(name: str, dtype: str) -> None:
    op = OPS[name]
    for layout, given in itertools.product(LAYOUTS.values(), examples(op, DTYPES[dtype])):
        args = clones(floats(layout, given))
        real = listed(op.overload(*args))
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = listed(
                op.overload(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
            )
        assert [describe(f) for f in fake] == [describe(r) for r in real]


def describe(x: Tensor) -> tuple[Any, ...]:
    """All that a fake must foretell; the stride of a dim of size 1 says nothing."""
    strides = [s for s, size in zip(x.stride(), x.shape, strict=True) if size != 1]
    return tuple(x.shape), x.dtype, x.device, strides


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    op = OPS[name]
    for args in examples(op, torch.float32):
        # opcheck compares by values, and NaN equals nothing
        torch.library.opcheck(op.overload, clones(floats(torch.nan_to_num, args)))


@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_may_be_passed_twice(name: str) -> None:
    """As q and k of a layer that shares them would be."""
    op = OPS[name]
    if name in INTEGER_OPS or written(op, examples(op, torch.float32)[0]):
        return
    for given in examples(op, torch.float32):
        first: dict[Any, Tensor] = {}
        args = tuple(
            first.setdefault((a.shape, a.dtype), a) if isinstance(a, Tensor) else a for a in given
        )
        apart = clones(args)
        for a, e in zip(listed(op.overload(*args)), listed(op.definition(*apart)), strict=True):
            assert_near(a, e, op.tolerance[torch.float32])
