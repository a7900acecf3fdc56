"""Every Triton kernel, compiled to machine code at the models' real shapes, without a GPU.

The launchers themselves are called, with meta tensors: blocks, warps and specialisations are then
exactly those of a run. Only the driver is replaced, by one that names an architecture and has no
device, and a launch ends where the machine code is there.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from gpu_target import Target  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from bench.kernels import Shapes, model_config  # noqa: E402
from minivllm.ops import OPS  # noqa: E402
from minivllm.ops.kernels import kernel  # noqa: E402
from minivllm.ops.paged_attention import BLOCK_SIZE  # noqa: E402

# these have tests of their own
ELSEWHERE = (
    "paged_attention_prefill",
    "causal_conv1d_qkv_prefill_slots",
    "fused_gated_delta_rule_prefill",
    "fused_gated_delta_rule_prefill_slots",
)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {
    name: implementation.call
    for name, op in OPS.items()
    for implementation in op.implementations
    if implementation.package == "triton" and name not in ELSEWHERE
}
# bytes a thread: tiles are measured on sm_90; newer Tritons spill two registers on sm_80
PRODUCT_STACK = {90: 0, 80: 8}
MAX_REGISTERS = {90: 80, 80: 112}  # a thread; 24 and 16 warps fit on an SM
LINEARS = tuple(name for name in KERNELS if "linear" in name)
# products have a row or two of the weight, or an accumulator, in registers; one program an SM
PRODUCTS = ("_vector_kernel", "_dot_kernel")
# tiles of keys and values in shared memory let no more than three programs of four warps on an SM
DECODE_ATTENTION = "_paged_decode_kernel"
DECODE_ATTENTION_REGISTERS = 128
PRODUCT_REGISTERS = 200
# a lane keeps 16 logits, and the highest of each column with its place
GREEDY_REGISTERS = {90: 96, 80: 112}
# one warp a program, with several loads of 16 bytes a thread on their way
WARP_KERNELS = ("_qk_norm_rope_kernel", "_prefill_kernel")
WARP_REGISTERS = 152
# cos and sin of large angles reduce them by a table on the stack; nothing is spilled there
STACK = {"_qk_norm_rope_kernel": 40}


@dataclass(frozen=True)
class Compiled:
    """One kernel's code: its machine code, PTX, what it takes of a thread, and shared memory."""

    name: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    registers: int
    stack: int
    local: int
    shared: int


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]], list[Compiled]]:
    """Compiles what a list of launches needs, each variant once in a run of the tests."""
    run, kept = JITFunction.run, tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        kept = kept.parent  # of all workers

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
        monkeypatch.setenv("TRITON_CACHE_DIR", str(kept / "triton"))
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
        built.metadata.shared,
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
            if name == "paged_attention_prefill":
                _, *cache, _, seq_lens, _ = args
                yield kernel("paged_attention", "gather_blocks"), (*cache, seq_lens)
    for name, args in around_a_step(32, dtype):
        yield KERNELS[name], args


def around_a_step(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What runs before and behind the decode graph, as `DecodeRunner` calls it."""

    def int64(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    positions, slots = int64(2, 320)[:, :rows]
    tables = torch.empty(321, 64, dtype=torch.int32, device="meta")
    logits = torch.empty(rows, 248_320, dtype=dtype, device="meta")
    yield "decode_inputs", (positions, slots, int64(321), tables)
    yield "greedy_tokens", (logits, slots, 248_077, int64(rows), int64(321))


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
        "_inputs_kernel",
        "_best_kernel",
        "_choose_kernel",
        DECODE_ATTENTION,
        "_combine_kernel",
        "_gather_blocks_kernel",
        "_dot_kernel",
        "_sum_add_rms_norm_kernel",
    }
    counts = Counter(k.name for k in found)
    # a weight's shape is compiled in; out and down projections may be split into as many parts
    assert counts.pop("_dot_kernel") == 6 and counts.pop("_sum_add_rms_norm_kernel") in (1, 2)
    # of the norm, with and without a sum; of few tokens' rotations and of many's; of both mixers,
    # one named _decode_kernel
    assert counts.total() == 17, "a size that changes from call to call was specialised on"
    for k in found:
        assert k.cubin.startswith(b"\x7fELF")
        assert f".target sm_{capability}" in k.ptx
        stack = PRODUCT_STACK[capability] if k.name in PRODUCTS else STACK.get(k.name, 0)
        assert k.local == 0 and k.stack <= stack, f"{k.name} spills: {k}"
        limit = MAX_REGISTERS[capability]
        limit = DECODE_ATTENTION_REGISTERS if k.name == DECODE_ATTENTION else limit
        limit = PRODUCT_REGISTERS if k.name in PRODUCTS else limit
        limit = WARP_REGISTERS if k.name in WARP_KERNELS else limit
        limit = GREEDY_REGISTERS[capability] if k.name == "_best_kernel" else limit
        assert k.registers <= limit, f"{k.name}: {k.registers} registers"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_compile(dtype: str, compiled: Any) -> None:
    """float32 without a product that may run as TF32; states in bfloat16."""
    found = compiled(90, launches("tiny", getattr(torch, dtype), torch.bfloat16))
    products = ("_dot_kernel", "_sum_add_rms_norm_kernel")
    assert len([k for k in found if k.name not in products]) == 17
    assert any(k.name in products for k in found) == (dtype == "float16")
    for k in found:
        assert k.cubin.startswith(b"\x7fELF")
        matrix_product = k.name in (DECODE_ATTENTION, "_dot_kernel") and dtype == "float16"
        assert ("mma" in k.ptx) == matrix_product
        assert "tf32" not in k.ptx


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_states_move_in_16_bytes(state_dtype: torch.dtype, compiled: Any) -> None:
    """A state is read and written by whole vectors, once each."""
    shapes = Shapes(model_config("miniqwen08b"), torch.bfloat16, "meta", state_dtype)
    sets = dict(shapes.stateful("decode", 256, 256, 1))
    name = "fused_gated_delta_rule_decode_slots"
    (k,) = compiled(90, iter([(KERNELS[name], sets[name][0])]))
    # 8 rows of 128 floats by 32 threads: eight vectors of four; 16 of bfloat16: eight of eight.
    # One more load of float32 has the 8 values, and the other 16 are an element each.
    loads = len(re.findall(r"ld\.global\.v4\.b32", k.ptx))
    assert loads == (9 if state_dtype == torch.float32 else 8)
    assert len(re.findall(r"st\.global\.v4\.b32", k.ptx)) == 8
    assert len(re.findall(r"ld\.global\.v2\.b32", k.ptx)) == 2  # q and k
    assert not re.search(r"(ld|st)\.global\.b32", k.ptx)


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_state_stays_in_registers(
    state_dtype: torch.dtype, dim: int, capability: int, compiled: Any
) -> None:
    """Of half of them, so that 16 programs fit on an SM."""
    rows, gates, weights = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((3, 4, dim), (3, 4), 4)
    )
    state = torch.empty(5, 4, dim, dim, dtype=state_dtype, device="meta")
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    args = rows, rows, rows, gates, gates, weights, weights, state, slots
    (k,) = compiled(capability, iter([(KERNELS["fused_gated_delta_rule_decode_slots"], args)]))
    assert k.local == k.stack == 0 and k.registers <= 128, k


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("heads", [(6, 2), (40, 1)])
@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_attention_of_other_models(
    dtype: str, dim: int, heads: tuple[int, int], capability: int, compiled: Any
) -> None:
    """No spills, and a program's tiles fit into the shared memory of a consumer's GPU (99 KiB)."""
    args = decode_attention(heads, dim, getattr(torch, dtype))
    attention, _ = compiled(capability, iter([(KERNELS["paged_attention_decode"], args)]))
    assert attention.name == DECODE_ATTENTION
    assert attention.local == 0 and attention.stack == 0, attention
    assert attention.shared <= 99 * 1024


def decode_attention(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, sequences: int = 1, width: int = 64
) -> tuple[Any, ...]:
    """Inputs without data; a layer's caches are views of a pool of blocks of several layers."""
    pool = torch.empty(100, 3, BLOCK_SIZE, heads[1], dim, dtype=dtype, device="meta")
    q = torch.empty(sequences, heads[0], dim, dtype=dtype, device="meta")
    table = torch.empty(sequences, width, dtype=torch.int32, device="meta")
    return q, pool[:, 1], pool[:, 2], table, table[:, 0].contiguous(), dim**-0.5


@pytest.mark.parametrize("chunk_slots", [False, True])
def test_the_convolution_moves_16_bytes(chunk_slots: bool, compiled: Any) -> None:
    """Eight channels a thread, or four of half a line; each input of a run is loaded once."""
    from minivllm.ops.kernels import causal_conv1d

    width = causal_conv1d.PREFILL_BLOCK_C // 32 // causal_conv1d.PREFILL_WARPS // 2
    shapes = Shapes(model_config("miniqwen08b"), torch.bfloat16, "meta")
    name = "causal_conv1d_prefill_slots"
    args = dict(shapes.stateful("prefill", 1, 8192, 1))[name][0]
    extra = (torch.empty(128, dtype=torch.int32, device="meta"),) if chunk_slots else ()
    (k,) = compiled(90, iter([(KERNELS[name], (*args, *extra))]))
    # three tokens before a run, then those that are loaded ahead in the loop's body
    loads = len(re.findall(rf"ld\.global\.v{width}\.b32", k.ptx))
    assert loads >= 3 + causal_conv1d.PREFILL_AHEAD
    stores = len(re.findall(rf"st\.global\.v{width}\.b32", k.ptx))
    assert stores >= causal_conv1d.PREFILL_AHEAD


def test_logits_move_in_16_bytes(compiled: Any) -> None:
    """But for the last block of a row, which ends anywhere."""
    args = dict(around_a_step(256, torch.bfloat16))["greedy_tokens"]
    best, _ = compiled(90, iter([(KERNELS["greedy_tokens"], args)]))
    assert best.name == "_best_kernel"
    assert len(re.findall(r"ld\.global\.v4\.b32", best.ptx)) >= 1
    assert "griddepcontrol.wait" in best.ptx


def test_heads_move_in_16_bytes(compiled: Any) -> None:
    shapes = Shapes(model_config("miniqwen08b"), torch.bfloat16, "meta")
    args = dict(shapes.token_wise(8192, 1))["qk_norm_rope"][0]
    (k,) = compiled(90, iter([(KERNELS["qk_norm_rope"], args)]))
    assert re.search(r"ld\.global\.v4\.b32", k.ptx) and re.search(r"st\.global\.v4\.b32", k.ptx)
    assert not re.search(r"(ld|st)\.global\.b16", k.ptx), "an element by itself"


def test_the_first_kernel_of_a_step_waits_for_all_before(compiled: Any) -> None:
    """It is launched without PDL, which the kernels that read states early rely on."""
    args = dict(around_a_step(32, torch.bfloat16))["decode_inputs"]
    (k,) = compiled(90, iter([(KERNELS["decode_inputs"], args)]))
    assert "griddepcontrol" not in k.ptx


def test_keys_and_values_move_in_16_bytes(compiled: Any) -> None:
    """Straight to shared memory, two tiles ahead."""
    args = decode_attention((8, 2), 256, torch.bfloat16)
    attention, _ = compiled(90, iter([(KERNELS["paged_attention_decode"], args)]))
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", attention.ptx)
    assert copies and set(copies) == {"0x10"}
    assert attention.shared >= 2 * 2 * 32 * 256 * 2


def test_decode_attention_is_built_once(compiled: Any) -> None:
    """Whatever the batch and the width of the block table; the combination for few splits too."""
    calls = [
        decode_attention((8, 2), 256, torch.bfloat16, sequences, width)
        for sequences in (1, 2, 16, 17, 256)
        for width in (1, 2, 16, 17, 4096)
    ]
    launch = KERNELS["paged_attention_decode"]
    found = compiled(90, ((launch, args) for args in calls))
    counts = Counter(k.name for k in found)
    assert counts == {DECODE_ATTENTION: 1, "_combine_kernel": 2}


def linears(
    rows: int, model: str = "miniqwen08b", dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The linears of a decode step."""
    for name, (args, *_) in Shapes(model_config(model), dtype, "meta").linears(rows, 1):
        yield KERNELS[name], args


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64])
def test_linears_compile_at_every_tile(rows: int, capability: int, compiled: Any) -> None:
    """No spills; what is not Hopper's may be a consumer's GPU, with 99 KiB of shared memory."""
    found = compiled(capability, linears(rows))
    names = Counter(k.name for k in found)
    products = names["_vector_kernel"], names["_dot_kernel"]
    # above 32 rows x is gated by a kernel of its own, and the product is the vendor's
    assert products == {1: (6, 0), 2: (3, 3), 64: (0, 4)}.get(rows, (0, 6))
    for k in found:
        assert k.local == 0 and k.stack <= PRODUCT_STACK[capability], f"{k.name} spills: {k}"
        assert k.shared <= (227 if capability == 90 else 99) * 1024, k
        assert k.registers <= 255
        # only Hopper starts a kernel before the one before it has ended
        assert ("griddepcontrol" in k.ptx) == (capability == 90)
        if k.name == "_dot_kernel":
            assert ("wgmma" in k.ptx) == (capability == 90)
            copies = re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", k.ptx)
            if not copies:  # all of its weights are asked for before the wait
                before, _ = k.ptx.split("griddepcontrol.wait")
                assert "ld.global.v4.b32" in before
            assert set(copies) <= {"0x10"}


@pytest.mark.parametrize("rows", [16, 32])
def test_linears_fit_into_a_consumers_blackwell(rows: int, compiled: Any) -> None:
    """It starts kernels early as Hopper does, with 99 KiB of shared memory."""
    found = [k for k in compiled(120, linears(rows)) if k.name == "_dot_kernel"]
    assert found and all("griddepcontrol" in k.ptx for k in found)
    assert max(k.shared for k in found) <= 99 * 1024


def test_weights_are_read_before_the_wait(compiled: Any) -> None:
    """In 16 bytes, all of a program's rows; x comes behind it."""
    launch, args = next(linears(1))
    (k,) = compiled(90, iter([(launch, args)]))
    before, behind = k.ptx.split("griddepcontrol.wait")
    # 8 rows of 1,024 in bfloat16 by 64 threads
    assert len(re.findall(r"ld\.global\.v4\.b32", before)) == 16
    assert re.search(r"ld\.global", behind) and "st.global" not in before
    assert before.index("griddepcontrol.launch_dependents") < before.index("ld.global")


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("rows", [8, 64])
def test_weights_are_asked_for_before_the_wait(rows: int, capability: int, compiled: Any) -> None:
    """Two steps of 128 columns, or what there is, where steps end as rows do; nothing is loaded."""
    w = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    odd, narrow = w[:, :1000].contiguous(), w[:, :128].contiguous()
    for weight, size in ((w, 512), (odd, None), (narrow, 256)):
        x = torch.empty(rows, weight.shape[1], dtype=torch.bfloat16, device="meta")
        (k,) = compiled(capability, iter([(KERNELS["linear"], (x, weight))]))
        asked = re.findall(r"cp\.async\.bulk\.prefetch\.L2\.global", k.ptx)
        assert len(asked) == (capability == 90 and size is not None)
        if asked:
            before, _ = k.ptx.split("griddepcontrol.wait")
            assert "prefetch.L2" in before and not re.search(r"ld\.global|cp\.async\.cg", before)
            assert re.search(rf"\b{size};", before)


@pytest.mark.parametrize("name", LINEARS)
def test_batches_of_a_tile_share_their_code(name: str, compiled: Any) -> None:
    def calls() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
        for rows in (3, 8, 16):
            yield from (c for c in linears(rows, "tiny") if c[0] is KERNELS[name])

    found = Counter(k.name for k in compiled(90, calls()))
    shapes = 2 if name == "linear" else 1
    assert found.pop("_dot_kernel") == shapes
    assert found == ({"_sum_add_rms_norm_kernel": 1} if name.endswith("add_rms_norm") else {})


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - set(LINEARS)))
def test_batches_share_their_code(name: str, compiled: Any) -> None:
    """Nothing compiles after start-up: 1 row, 16, 17 and 300 run the same machine code."""

    def rows(x: Any, count: int) -> Any:
        return x[:count] if isinstance(x, Tensor) and x.shape[0] == 300 else x

    shapes = Shapes(model_config("tiny"), torch.bfloat16, "meta")
    if name == "causal_conv1d_prefill_slots":
        calls = [dict(shapes.stateful("prefill", n, 65 * n, 1))[name][0] for n in (1, 16, 17)]
    elif name in ("decode_inputs", "greedy_tokens"):
        calls = [dict(around_a_step(n, torch.bfloat16))[name] for n in (1, 16, 17, 300)]
    else:
        (args, *_) = dict(shapes.decode(300))[name]
        calls = [tuple(rows(x, n) for x in args) for n in (1, 16, 17, 300)]
    # of two kernels one after the other; of few tokens and of many
    kernels = 2 if name in ("paged_attention_decode", "greedy_tokens", "qk_norm_rope") else 1
    assert len(compiled(90, ((KERNELS[name], args) for args in calls))) == kernels
