"""How an op's implementation is chosen, without any of the packages and without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minivllm.ops.op as op_module
from minivllm.errors import UserError
from minivllm.ops import OPS, Implementation, Op

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FLA_OPS = (
    "causal_conv1d_prefill",
    "causal_conv1d_decode",
    "gated_delta_rule_prefill",
    "gated_delta_rule_decode",
)
PACKAGES = dict.fromkeys(FLA_OPS, "fla")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `is_importable` find these packages and no others."""

    def only(*packages: str) -> None:
        monkeypatch.setattr(op_module, "is_importable", lambda name: name in packages)

    return only


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_gets_the_substitute_without_a_warning(
    name: str, dtype: torch.dtype, installed: Callable[..., None]
) -> None:
    installed("fla", "flash_attn")
    implementation, warning = OPS[name].choose(CPU, dtype)
    assert implementation is OPS[name].implementations[0]
    assert (implementation.name, warning) == ("torch", None)


@pytest.mark.parametrize("name", PACKAGES)
def test_cuda_gets_the_package(name: str, installed: Callable[..., None]) -> None:
    installed("fla", "flash_attn")
    for dtype in (torch.bfloat16, torch.float16):
        implementation, warning = OPS[name].choose(CUDA, dtype)
        assert (implementation.name, warning) == (PACKAGES[name], None)


@pytest.mark.parametrize("name", PACKAGES)
def test_float32_on_cuda_is_exact(name: str, installed: Callable[..., None]) -> None:
    """FLA may use TF32; that is no missing package."""
    installed()
    implementation, warning = OPS[name].choose(CUDA, torch.float32)
    assert (implementation.name, warning) == ("torch", None)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_a_warning(name: str, installed: Callable[..., None]) -> None:
    installed()
    implementation, warning = OPS[name].choose(CUDA, torch.bfloat16)
    package = PACKAGES[name]
    assert implementation.name == "torch"
    assert warning == (
        f"{name}: {package} needs the package {package}, which is not installed; "
        "torch is used, which is slower"
    )


@pytest.mark.parametrize(
    ("packages", "chosen", "in_float32"),
    [
        (("triton", "flash_attn"), "triton", "triton"),
        (("triton",), "triton", "triton"),
        (("flash_attn",), "flash_attn", "torch"),  # which takes half precision only
        ((), "torch", "torch"),
    ],
)
def test_the_order_of_prefill_attention(
    packages: tuple[str, ...], chosen: str, in_float32: str, installed: Callable[..., None]
) -> None:
    """Ours, then flash-attn, then torch's; a warning names what is missed most."""
    installed(*packages)
    op = OPS["paged_attention_prefill"]
    for dtype, expected in ((torch.bfloat16, chosen), (torch.float32, in_float32)):
        implementation, warning = op.choose(CUDA, dtype)
        assert implementation.name == expected
        missing = (
            f"{op.name}: triton needs the package triton, which is not installed; "
            f"{expected} is used, which is slower"
        )
        assert warning == (None if "triton" in packages else missing)
        assert op.best(CUDA, dtype).name == "triton"


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_forced_implementation(device: torch.device, installed: Callable[..., None]) -> None:
    installed("fla")
    implementation, warning = OPS["gated_delta_rule_decode"].choose(
        device, torch.bfloat16, forced="torch"
    )
    assert (implementation.name, warning) == ("torch", None)


def test_forced_and_possible(installed: Callable[..., None]) -> None:
    installed("fla")
    implementation, warning = OPS["causal_conv1d_decode"].choose(CUDA, torch.bfloat16, forced="fla")
    assert (implementation.name, warning) == ("fla", None)


@pytest.mark.parametrize(
    ("forced", "device", "dtype", "packages", "reason"),
    [
        ("triton", CPU, torch.float32, (), "'triton' is not known"),
        ("", CPU, torch.float32, (), "'' is not known"),
        ("fla", CPU, torch.float32, ("fla",), "'fla' runs on cuda only (here: cpu, torch.float32)"),
        ("fla", CUDA, torch.float32, ("fla",), "'fla' takes bfloat16/float16 only (here: cuda"),
        ("fla", CUDA, torch.bfloat16, (), "'fla' needs the package fla, which is not installed"),
    ],
)
def test_forced_and_impossible(
    forced: str,
    device: torch.device,
    dtype: torch.dtype,
    packages: tuple[str, ...],
    reason: str,
    installed: Callable[..., None],
) -> None:
    installed(*packages)
    with pytest.raises(UserError) as error:
        OPS["gated_delta_rule_prefill"].choose(device, dtype, forced)
    message = str(error.value)
    assert message.startswith(f"compiler.implementations.gated_delta_rule_prefill={reason}")
    assert message.endswith("choose one of torch")  # what can run here


def toy_op(*implementations: Implementation) -> Op:
    def nothing(*args: Any) -> list[Any]:
        return []

    return Op(
        "toy",
        definition=nothing,
        implementations=implementations,
        examples=nothing,
        tolerance={},
        overload=torch.ops.aten.relu.default,
    )


def test_the_order_of_preference(installed: Callable[..., None]) -> None:
    """The first that can run, of those behind the substitute; what was missed before it is told."""
    substitute, first, second = (
        Implementation(name, torch.relu, package=package)
        for name, package in (("torch", None), ("first", "a"), ("second", "b"))
    )
    op = toy_op(substitute, first, second)
    installed("a", "b")
    assert op.choose(CPU, torch.float32) == (first, None)
    installed("b")
    implementation, warning = op.choose(CPU, torch.float32)
    assert implementation is second
    assert warning == (
        "toy: first needs the package a, which is not installed; second is used, which is slower"
    )
    installed()
    implementation, warning = op.choose(CPU, torch.float32)
    assert implementation is substitute
    assert warning is not None and "torch is used" in warning


def test_is_importable() -> None:
    assert op_module.is_importable("torch")
    assert not op_module.is_importable("no_such_package_as_this")
