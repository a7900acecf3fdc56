"""A GPU for triton without a GPU: kernels are compiled for it, and a launch of one is an error.

    monkeypatch.setattr(driver, "_active", Target(90))
    launcher(*meta_tensors)              # with JITFunction.run as triton has it: raises Launched

Triton keeps what it has compiled by the number of the device; each target has one of its own, so
that nothing of another test is found again.
"""

from __future__ import annotations

import itertools
from typing import Any

from triton.backends.compiler import GPUTarget

SHARED_MEMORY = 227 * 1024  # bytes: of a Hopper GPU
_devices = itertools.count(100)


class Launched(AssertionError):
    """A kernel would have been launched."""


class _Utils:
    """What triton asks of a device when it brings code there."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[Any, Any, int, int, int]:
        return object(), object(), 32, 0, 1024  # module, function, registers, spills, threads


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        raise Launched(self.name)


class Target:
    """A driver that names an architecture and has no device."""

    launcher_cls = _Launcher
    utils = _Utils()

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.device = next(_devices)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0
