"""What a named op is, and how one of its implementations is chosen for a device and dtype.

Owns the `minivllm::` operator library. Does not own any op: those are one file each beside this
one, collected in `minivllm.ops.OPS`.

    op = OPS["gated_delta_rule_decode"]
    implementation = op.choose(torch.device("cuda"), torch.bfloat16)

An op is a schema, a *definition* (the plainest code that is right: loops, float32), a fake for
tracing, and named implementations. The traced graph names the op; `compiler/bind.py` replaces
it, once, by the implementation it chose. Called through the dispatcher (the plain model, the
tests) an op runs its first implementation, which needs torch alone and runs on every device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from minivllm.errors import UserError

NAMESPACE = "minivllm"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: as printed, and as `compiler.implementations` names it.
        call: the function, with the op's signature.
        devices: device types it runs on.
        dtypes: activation dtypes for which it is exact enough to be chosen.
        package: an importable package it needs beside torch, or None.
        capturable: it neither reads sizes on the host nor waits for the device, so that a CUDA
            Graph can hold it.
    """

    name: str
    call: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    package: str | None = None
    capturable: bool = True

    def obstacle(
        self, device: torch.device, dtype: torch.dtype, *, packages: bool = True
    ) -> str | None:
        """Why this implementation cannot be used, or None if it can.

        Args:
            packages: whether the package that it needs must be installed.
        """
        if device.type not in self.devices:
            return f"runs on {'/'.join(self.devices)} only"
        if dtype not in self.dtypes:
            names = "/".join(str(d).removeprefix("torch.") for d in self.dtypes)
            return f"takes {names} only"
        if packages and self.package is not None and not is_importable(self.package):
            return f"needs the package {self.package}, which is not installed"
        return None


@dataclass(frozen=True)
class Op:
    """A named op of the `minivllm` library.

    Attributes:
        name: the op's name without its namespace.
        definition: what the op means; tests hold every implementation to it.
        implementations: in order of preference for a device, except that the first one
            (torch alone, every device and dtype) is the substitute of all others.
        examples: `examples(generator, dtype)` gives argument tuples that cover the op's shapes.
        tolerance: per dtype, the largest error against the definition in float32, relative to
            the largest magnitude of the expected output; the reason stands beside each value.
        overload: what the traced graph calls.
    """

    name: str
    definition: Callable[..., Any]
    implementations: tuple[Implementation, ...]
    examples: Callable[[torch.Generator, torch.dtype], list[tuple[Any, ...]]]
    tolerance: Mapping[torch.dtype, float]
    overload: torch._ops.OpOverload = field(repr=False)

    def choose(
        self, device: torch.device, dtype: torch.dtype, forced: str | None = None
    ) -> tuple[Implementation, str | None]:
        """Choose an implementation; returns it with a warning if a better one is missing.

        Raises:
            UserError: `forced` names no implementation of this op, or one that cannot run here.
        """
        by_name = {i.name: i for i in self.implementations}
        if forced is not None:
            able = [n for n, i in by_name.items() if i.obstacle(device, dtype) is None]
            if forced not in able:
                known = by_name.get(forced)
                reason = "is not known" if known is None else known.obstacle(device, dtype)
                raise UserError(
                    f"compiler.implementations.{self.name}={forced!r} {reason} "
                    f"(here: {device.type}, {dtype}); choose one of {', '.join(able)}"
                )
            return by_name[forced], None
        substitute, *preferred = self.implementations
        chosen, missing = substitute, None
        for implementation in preferred:
            obstacle = implementation.obstacle(device, dtype)
            if obstacle is None:
                chosen = implementation
                break
            if missing is None and obstacle.startswith("needs the package"):
                missing = f"{self.name}: {implementation.name} {obstacle}"
        return chosen, missing and f"{missing}; {chosen.name} is used, which is slower"

    def best(
        self, device: torch.device, dtype: torch.dtype, forced: str | None = None
    ) -> Implementation:
        """What `choose` would choose on a machine on which every package is installed.

        Raises:
            UserError: `forced` names no implementation of this op for this device and dtype.
        """
        able = [i for i in self.implementations if not i.obstacle(device, dtype, packages=False)]
        if forced is None:
            return able[min(1, len(able) - 1)]  # the first is the substitute of the others
        for implementation in able:
            if implementation.name == forced:
                return implementation
        raise UserError(
            f"compiler.implementations.{self.name}={forced!r} is no implementation of it for "
            f"{device.type} and {dtype}; choose one of {', '.join(i.name for i in able)}"
        )


def define_op(
    schema: str,
    *,
    definition: Callable[..., Any],
    fake: Callable[..., Any],
    implementations: tuple[Implementation, ...],
    examples: Callable[[torch.Generator, torch.dtype], list[tuple[Any, ...]]],
    tolerance: Mapping[torch.dtype, float],
) -> Op:
    """Register an op under `minivllm::` and return its record.

    `Library.define` with `impl` costs about 2 µs a call, `torch.library.custom_op` 6–22 µs.

    Args:
        schema: `name(Tensor x, ...) -> ...`; mutated arguments are marked `(a!)`.
        fake: shapes, dtypes and strides of the outputs, without data.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementations[0].call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return Op(name, definition, implementations, examples, tolerance, overload)


def is_importable(package: str) -> bool:
    """Whether `package` is installed, without importing it."""
    return importlib.util.find_spec(package) is not None
