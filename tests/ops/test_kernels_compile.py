"""Every Triton kernel, compiled to machine code at the models' real shapes, without a GPU.

The launchers themselves are called, with meta tensors: blocks, warps and specialisations are then
exactly those of a run. Only the driver is replaced, by one that names an architecture and has no
device, and a launch ends where the machine code is there.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from bench.kernels import Shapes, model_config  # noqa: E402
from minivllm.ops import OPS  # noqa: E402
from minivllm.ops.kernels import kernel  # noqa: E402

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {
    name: implementation.call
    for name, op in OPS.items()
    for implementation in op.implementations
    if implementation.package == "triton"
}
MAX_REGISTERS = {90: 80, 80: 112}  # a thread; 24 and 16 warps fit on an SM
# cos and sin of large angles reduce them by a table on the stack; nothing is spilled there
STACK = {"_qk_norm_rope_kernel": 40}


@dataclass(frozen=True)
class Compiled:
    """One kernel's code: its machine code, PTX, and what the machine code takes of a thread."""

    name: str
    cubin: bytes
    ptx: str
    registers: int
    stack: int
    local: int


class Target:
    """A driver that names an architecture and has no device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[int, Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]], list[Compiled]]:
    """Compiles what a list of launches needs, each variant once."""
    run = JITFunction.run

    def compile_all(
        capability: int, launches: Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]
    ) -> list[Compiled]:
        found: dict[str, Any] = {}

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            assert all(0 < size < 2**31 for size in grid) and all(s < 2**16 for s in grid[1:])
            built = run(self, *args, grid=grid, warmup=True, **options)
            found[built.hash] = self.__name__, built

        monkeypatch.setattr(driver, "_active", Target(capability))
        monkeypatch.setattr(JITFunction, "run", compile_only)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        for launch, args in launches:
            launch(*args)
        return [resources(name, built, tmp_path / "cubin") for name, built in found.values()]

    return compile_all


def resources(name: str, built: Any, file: Path) -> Compiled:
    file.write_bytes(built.asm["cubin"])
    command = [str(TOOL), "--dump-resource-usage", str(file)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return Compiled(
        name,
        built.asm["cubin"],
        built.asm["ptx"],
        int(used["REG"]),
        int(used["STACK"]),
        int(used["LOCAL"]),
    )


def launches(
    model: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Every kernel at a model's shapes: a decode step of 32, a prefill of 8,192 tokens."""
    shapes = Shapes(model_config(model), dtype, "meta", state_dtype)
    for sets in (shapes.decode(32), shapes.prefill(8192)):
        for name, (args, *_) in sets:
            if name in KERNELS:
                yield KERNELS[name], args
            if name == "fused_gated_delta_rule_prefill_slots":
                state, slots, computed, cu_seqlens, _ = args[7:]
                final = state[:1].float()
                yield kernel("slots", "gather_states"), (state, slots, computed)
                yield kernel("slots", "scatter_states"), (final, state, slots, cu_seqlens)


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("model", ["miniqwen08b", "tiny"])
def test_every_kernel_compiles(model: str, capability: int, compiled: Any) -> None:
    found = compiled(capability, launches(model, torch.bfloat16, torch.float32))
    assert {k.name for k in found} == {
        "_rms_norm_kernel",
        "_gated_rms_norm_kernel",
        "_silu_mul_kernel",
        "_sigmoid_mul_kernel",
        "_qk_norm_rope_kernel",
        "_write_kernel",
        "_decode_kernel",
        "_prefill_kernel",
        "_gather_kernel",
        "_scatter_kernel",
    }
    # of the norm, with and without a sum; of both mixers, one named _decode_kernel
    assert len(found) == 12, "a size that changes from call to call was specialised on"
    for k in found:
        assert k.cubin.startswith(b"\x7fELF")
        assert f".target sm_{capability}" in k.ptx
        assert k.local == 0 and k.stack <= STACK.get(k.name, 0), f"{k.name} spills: {k}"
        assert k.registers <= MAX_REGISTERS[capability], f"{k.name}: {k.registers} registers"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_compile(dtype: str, compiled: Any) -> None:
    """float32 without a product that may run as TF32; states in bfloat16."""
    found = compiled(90, launches("tiny", getattr(torch, dtype), torch.bfloat16))
    assert len(found) == 12
    for k in found:
        assert k.cubin.startswith(b"\x7fELF")
        assert "mma" not in k.ptx


def test_states_move_in_16_bytes(compiled: Any) -> None:
    """A float32 state is read and written by whole vectors, once each."""
    shapes = Shapes(model_config("miniqwen08b"), torch.bfloat16, "meta")
    sets = dict(shapes.stateful("decode", 256, 256, 1))
    name = "fused_gated_delta_rule_decode_slots"
    (k,) = compiled(90, iter([(KERNELS[name], sets[name][0])]))
    # 8 rows of 128 floats by 32 threads: eight vectors of four; one more load has the 8 values
    assert len(re.findall(r"ld\.global\.v4\.b32", k.ptx)) == 9
    assert len(re.findall(r"st\.global\.v4\.b32", k.ptx)) == 8
    assert len(re.findall(r"ld\.global\.v2\.b32", k.ptx)) == 2  # q and k
    assert not re.search(r"(ld|st)\.global\.b32", k.ptx)


@pytest.mark.parametrize("name", KERNELS)
def test_batches_share_their_code(name: str, compiled: Any) -> None:
    """Nothing compiles after start-up: 1 row, 16, 17 and 300 run the same machine code."""

    def rows(x: Any, count: int) -> Any:
        return x[:count] if isinstance(x, Tensor) and x.shape[0] == 300 else x

    shapes = Shapes(model_config("tiny"), torch.bfloat16, "meta")
    if name == "causal_conv1d_prefill_slots":
        calls = [dict(shapes.stateful("prefill", n, 65 * n, 1))[name][0] for n in (1, 16, 17)]
    else:
        (args, *_) = dict(shapes.decode(300))[name]
        calls = [tuple(rows(x, n) for x in args) for n in (1, 16, 17, 300)]
    assert len(compiled(90, ((KERNELS[name], args) for args in calls))) == 1
