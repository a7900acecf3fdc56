"""Kernels built ahead: what is found, that threads build it, and that nothing is ever launched."""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from gpu_target import Launched, Target  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import minivllm.runtime.kernel_builds as module  # noqa: E402
from bench.kernels import model_config  # noqa: E402
from minivllm.compiler.bind import bind  # noqa: E402
from minivllm.compiler.compile import CompiledModel, compile_model  # noqa: E402
from minivllm.compiler.graph import META  # noqa: E402
from minivllm.config import CompilerOptions  # noqa: E402
from minivllm.errors import UserError  # noqa: E402
from minivllm.ops import Implementation, Op  # noqa: E402
from minivllm.runtime.decode_runner import DecodeRunner, bucket_sizes  # noqa: E402
from minivllm.runtime.kernel_builds import (  # noqa: E402
    KernelBuilds,
    MetaSteps,
    StepSizes,
    kernel_builds,
    prefill_sizes,
    recorded_launches,
)
from minivllm.runtime.newest_tokens import NewestTokens  # noqa: E402
from minivllm.runtime.pools import EntryPool, of_kind  # noqa: E402
from minivllm.runtime.prefill_inputs import Row, prefill_inputs  # noqa: E402
from minivllm.runtime.prefill_runner import PrefillRunner, prefill_buckets  # noqa: E402
from minivllm.runtime.warmup import largest_prefill, prefills  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
SEQS, TOKENS, MODEL_LEN = 256, 8192, 4096
Kernels = dict[tuple[str, str], None]  # name and triton's key, in the order found


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Target:
    target = Target(90)
    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return target


@pytest.fixture(scope="module", params=["tiny", "miniqwen08b"])
def compiled(request: pytest.FixtureRequest) -> CompiledModel:
    return compile_model(model_config(request.param), DTYPE, CompilerOptions(mode="compiled"))


def all_sizes(compiled: CompiledModel) -> StepSizes:
    vocabulary = compiled.decode.output.meta["val"].shape[1]
    return StepSizes(
        bucket_sizes(SEQS),
        prefill_buckets(TOKENS, SEQS),
        [*prefills(MODEL_LEN), largest_prefill(TOKENS, MODEL_LEN)],
        MODEL_LEN // 64,
        vocabulary - 3,
    )


def recorded(launch_all: Callable[[], Any]) -> Kernels:
    """What would be built."""
    found: Kernels = {}

    def take(function: Any, key: str, build: Callable[[], Any]) -> None:
        found[f"{function.__module__}.{function.__name__}", key] = None

    with recorded_launches(take), torch.inference_mode():
        launch_all()
    return found


def run_as_runners_do(compiled: CompiledModel, sizes: StepSizes) -> None:
    """Every step through the real runners, with whole graphs and inputs as they make them."""

    def call_of(op: Op, chosen: Implementation) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if chosen.package == "triton":
                chosen.call(*args)
            return op.overload(*args)

        call.__name__ = call.__qualname__ = op.name
        return call

    weights = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device=META)
        for graph in compiled.graphs.values()
        for name, spec in graph.weights.items()
    }
    pools: dict[str, Tensor] = {}
    for kind in ("slot", "block"):
        pools |= EntryPool(of_kind(compiled.decode.states, kind), SEQS + 1, META).views
    prefill, decode = (
        bind(compiled.graphs[phase], weights, pools, CUDA, DTYPE, None, call_of)
        for phase in ("prefill", "decode")
    )
    newest = NewestTokens(SEQS + 1, META)
    prefiller = PrefillRunner(prefill, META, newest)
    for bucket in sizes.buckets:
        inputs = prefill_inputs([], bucket)
        prefill(**inputs.views(inputs.tensor().to(META)))
    for parts in sizes.prefills:
        prefiller.run([Row([0] * end, start, end, 1, [1] * 64) for start, end in parts])
    decoder = DecodeRunner(decode, META, newest, max_num_seqs=SEQS, max_blocks=sizes.max_blocks)
    for rows in sizes.decode:
        decoder.run([0] * rows, range(1, rows + 1), [[1]] * rows)


@pytest.mark.slow
def test_it_finds_what_whole_graphs_launch(compiled: CompiledModel) -> None:
    sizes = all_sizes(compiled)
    found = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, {}).launch(sizes))
    whole = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, {}, reduced=False).launch(sizes))
    assert found.keys() == whole.keys()
    runners = recorded(lambda: run_as_runners_do(compiled, sizes))
    around = {"_inputs_kernel", "_best_kernel", "_choose_kernel"}
    missed = set(found) - set(runners)
    assert set(runners) <= set(found)
    for name, _ in missed:  # the runners launch these through implementations of meta's own
        assert name.rpartition(".")[2] in around, name
    names = Counter(name.rpartition(".")[2] for name, _ in found)
    assert {*around, "_paged_prefill_kernel", "_paged_decode_kernel", "_dot_kernel"} <= set(names)
    assert len(found) > 40


def test_no_other_size_needs_another_kernel(compiled: CompiledModel) -> None:
    """Exact prefills of any lengths and widths of the block table, as `LLM` may run them."""
    sizes = all_sizes(compiled)
    found = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, {}).launch(sizes))
    chance = random.Random(0)
    ends = [[chance.randrange(1, 1200) for _ in range(chance.randrange(1, 41))] for _ in range(60)]
    others = StepSizes(
        range(1, SEQS + 1, 5),
        [],
        [tuple((0, end) for end in parts) for parts in ends],
        1,
        sizes.vocab_limit,
    )
    more = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, {}).launch(others))
    assert set(more) <= set(found), [name for name, _ in set(more) - set(found)]


def test_the_choice_behind_a_prefill_needs_no_other_kernel(compiled: CompiledModel) -> None:
    """So it is launched behind decode steps alone."""
    sizes, steps = all_sizes(compiled), MetaSteps(compiled, CUDA, DTYPE, {})
    found = recorded(lambda: steps.launch(sizes))
    behind = recorded(
        lambda: [
            steps._launch_around(steps._run("prefill", step), sizes)
            for step in prefill_sizes(sizes.buckets, sizes.prefills)
        ]
    )
    names = {name.rpartition(".")[2] for name, _ in behind}
    assert {"_best_kernel", "_choose_kernel"} <= names and set(behind) <= set(found)


@pytest.mark.slow
def test_threads_build_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Afterwards triton has every kernel in memory: not one is missing, and none is launched."""
    config = model_config("miniqwen08b")
    compiled = compile_model(config, DTYPE, CompilerOptions(mode="compiled"))
    steps, sizes = MetaSteps(compiled, CUDA, DTYPE, {}), all_sizes(compiled)
    found = recorded(lambda: steps.launch(sizes))
    builds = KernelBuilds(lambda: steps.launch(sizes), None)
    builds.wait()
    assert builds.count == len(found) and builds.seconds > 0
    assert not caplog.records
    assert recorded(lambda: steps.launch(sizes)) == {}


@triton.jit
def _good(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i) + 1)


@triton.jit
def _bad(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE + 1), 0)  # SIZE is a power of two, SIZE + 1 is none


def launch_good(size: int = 64) -> None:
    x = torch.empty(size, device="meta")
    _good[(1,)](x, x, SIZE=size)


def launch_bad() -> None:
    _bad[(1,)](torch.empty(64, device="meta"), SIZE=64)


def test_a_built_kernel_is_not_launched() -> None:
    builds = KernelBuilds(launch_good, None)
    builds.wait()
    assert builds.count == 1
    assert recorded(launch_good) == {}
    with pytest.raises(Launched):
        launch_good()
    assert list(recorded(lambda: launch_good(128))) and not recorded(launch_good)


def test_what_fails_is_named_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def launch_all() -> None:
        launch_bad()
        launch_good()

    builds = KernelBuilds(launch_all, None)
    builds.wait()
    assert builds.count == 1 and recorded(launch_good) == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "_bad was not built ahead" in record.message
    assert "power of 2" in str(record.exc_info)
    with pytest.raises(triton.compiler.errors.CompilationError):
        launch_bad()


@pytest.mark.parametrize("failures", [module.ATTEMPTS - 1, module.ATTEMPTS])
def test_a_parser_that_other_threads_disturb_tries_again(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parse, left = JITFunction.parse, [failures]

    def disturbed(self: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise SystemError("AST constructor recursion depth mismatch (before=37, after=40)")
        return parse(self)

    monkeypatch.setattr(JITFunction, "parse", disturbed)
    builds = KernelBuilds(lambda: launch_good(256), None)
    builds.wait()
    built = failures < module.ATTEMPTS
    assert builds.count == built and left == [0] and bool(caplog.records) != built


def test_a_recording_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    run, hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook

    def launch_all() -> None:
        launch_good()
        raise RuntimeError("no more")

    builds = KernelBuilds(launch_all, None)
    builds.wait()
    assert builds.count == 1
    assert [r.message for r in caplog.records] == ["not all kernels were built ahead: no more"]
    assert (JITFunction.run, triton.knobs.runtime.jit_cache_hook) == (run, hook)


def test_other_threads_launch_as_ever() -> None:
    """And a hook of someone else's still sees them."""
    seen: list[str] = []
    errors: list[type[BaseException]] = []

    def elsewhere() -> None:
        try:
            launch_good()
        except Launched as error:
            errors.append(type(error))

    earlier = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda **kw: seen.append(kw["key"])
    try:
        thread = threading.Thread(target=elsewhere)

        def launch_all() -> None:
            thread.start()
            thread.join()

        assert recorded(launch_all) == {}
    finally:
        triton.knobs.runtime.jit_cache_hook = earlier
    assert len(seen) == 1 and errors == [Launched]


def test_a_tuner_times_nothing() -> None:
    tuned = triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=["SIZE"])(_good)
    x = torch.empty(64, device="meta")
    assert recorded(lambda: tuned[(1,)](x, x, SIZE=64)) == {}
    assert not tuned.cache


def test_an_op_that_looks_at_data_is_left_alone(
    compiled: CompiledModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launches are missing, those of all others are not."""

    def looks(k_cache: Tensor, *_: Any) -> None:
        k_cache.sum().item()

    sizes = all_sizes(compiled)
    complete = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, {}).launch(sizes))
    caplog.set_level(logging.INFO, module.__name__)
    choose = Op.choose

    def choose_other(self: Op, *args: Any) -> tuple[Implementation, str | None]:
        chosen, warning = choose(self, *args)
        if self.name == "paged_kv_write":
            chosen = Implementation("looks", looks, package="triton")
        return chosen, warning

    monkeypatch.setattr(Op, "choose", choose_other)
    found = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, {}).launch(sizes))
    gone = {name for name, _ in set(complete) - set(found)}
    assert gone == {"minivllm.ops.kernels.paged_kv_write._write_kernel"}
    (record,) = [r for r in caplog.records if "paged_kv_write=looks" in r.message]
    assert "built at its first use" in record.message


def test_a_wrong_option_is_an_error_at_once(compiled: CompiledModel) -> None:
    with pytest.raises(UserError, match="no op 'nope'"):
        MetaSteps(compiled, CUDA, DTYPE, {"nope": "torch"})
    with pytest.raises(UserError, match=r"decode_inputs='nope' is not known"):
        MetaSteps(compiled, CUDA, DTYPE, {"decode_inputs": "nope"})


def test_a_forced_implementation_is_not_built_for(compiled: CompiledModel) -> None:
    sizes = all_sizes(compiled)
    forced = {"paged_kv_write": "torch", "greedy_tokens": "torch"}
    found = recorded(lambda: MetaSteps(compiled, CUDA, DTYPE, forced).launch(sizes))
    names = {name.rpartition(".")[2] for name, _ in found}
    assert "_paged_decode_kernel" in names
    assert not names & {"_write_kernel", "_best_kernel", "_choose_kernel"}


@pytest.mark.parametrize("without", ["a GPU", "graphs", "triton", "a compiler"])
def test_where_nothing_is_built(
    without: str, compiled: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = None if without == "graphs" else compiled
    device = torch.device("cpu") if without == "a GPU" else CUDA
    if without == "triton":
        monkeypatch.setattr(module, "is_importable", lambda name: name != "triton")
    if without == "a compiler":
        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(module, "KernelBuilds", None)  # not callable
    with kernel_builds(given, device, DTYPE, all_sizes(compiled), {}) as builds:
        assert builds is None


def test_leaving_early_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends a start by an error sees it at once; queued builds do not begin."""
    begun, go_on = threading.Event(), threading.Event()

    def launch_all() -> None:
        begun.set()
        go_on.wait(60)
        launch_good()

    builds = KernelBuilds(launch_all, None)
    assert begun.wait(60)
    builds.close()
    assert not builds._recorded.done()
    go_on.set()
    assert builds._recorded.exception(60) is None
    assert builds.count == 0 and list(recorded(launch_good))


CODE = """
import logging
from minivllm import LLM
logging.basicConfig(level=logging.INFO)
LLM("miniqwen08b", load_format="dummy", skip_tokenizer_init=True, device="cuda").close()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cold_start_builds_nothing_later(tmp_path: Path) -> None:
    """With empty caches: all kernels in threads, none in the first runs or the captures."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cold")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ahead, first, warm_up = (int(n) for n in re.findall(r"(\d+) kernels built", done.stderr))
    assert ahead > 50 and first == warm_up == 0, done.stderr
