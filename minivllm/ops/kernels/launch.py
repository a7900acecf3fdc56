"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

    _kernel[grid](..., **pdl())          # the launcher; the kernel takes `PDL: tl.constexpr`
    wait_for_inputs(PDL)                 # in the kernel, before it touches anything but weights

A launch costs about a microsecond between the end of one kernel and the first load of the next.
With PDL the next kernel's programs are placed as soon as the last of this one's have started; they
may read what no kernel writes (weights) and then wait, on the device, until this kernel is done
and its writes are visible. As every kernel waits before it reads or writes anything else, so has
this one before it: what was done when a wait returns includes all kernels before, and memory may
be reused as if they ran one after the other. A kernel that knows nothing of this (cuBLAS, torch)
starts when all before it have ended; what nobody has written since then may be read before a wait
as well (states in `passes/prefetch_states.py`). Needs compute capability 9.0.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel's programs be placed; those of this one have all been."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def ask_for(place, SIZE: tl.constexpr):
    """Have SIZE bytes from each place brought into L2, for who reads them behind its wait.

    Places and SIZE are multiples of 16 bytes, and the memory is there. Compute capability 9.0.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place.to(tl.int64), tl.full(place.shape, SIZE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel's programs be placed, and wait until the kernels before are done."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def pdl() -> dict[str, Any]:
    """A launch's options: `PDL` for the kernel, and `launch_pdl` where the device knows it."""
    if triton.knobs.runtime.interpret:
        return {"PDL": False}
    if _supported(driver.active.get_current_device()):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _supported(device: int) -> bool:
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def is_hopper() -> bool:
    """Whether the current device is a Hopper GPU: 227 KiB of shared memory a program, and TMA."""
    if triton.knobs.runtime.interpret:
        return False
    return _is_hopper(driver.active.get_current_device())


@functools.cache
def _is_hopper(device: int) -> bool:
    target = driver.active.get_current_target()
    return target.backend == "cuda" and 90 <= target.arch < 100
