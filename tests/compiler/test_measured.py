"""Joining measured kernels to calls, on made-up traces: what fits, is missing, or overlaps."""

from __future__ import annotations

import pytest

from minivllm.compiler.cost import Cost
from minivllm.compiler.measured import (
    BEFORE,
    BEHIND,
    UNJOINED,
    Call,
    Kernel,
    Machine,
    MeasuredStep,
    Timed,
    align,
    gaps_and_times,
    join,
    middle_means,
    part_of,
    split,
)
from minivllm.compiler.measured_text import measured_json, measured_tables

LAYERS = 24
LAYER = ("norm", "gemm", "conv", "delta", "norm", "gemm", "gemm", "silu", "gemm")


def run(names: list[str], start: float = 0.0, us: float = 2.0, gap: float = 0.5) -> list[Kernel]:
    """Kernels one after the other."""
    return [Kernel(name, start + i * (us + gap), us) for i, name in enumerate(names)]


def model(layers: int = LAYERS) -> list[tuple[str, str]]:
    """The launches of a model whose layers are all alike, each of a call of its own."""
    return [(f"{name}_{i}_{k}", name) for i in range(layers) for k, name in enumerate(LAYER)]


def test_markers_split_a_trace() -> None:
    kernels = run(["a", "spin_kernel(long)", "b", "c", "spin_kernel(long)", "spin_kernel(long)"])
    parts = split(kernels, lambda name: "spin" in name)
    assert [[k.name for k in part] for part in parts] == [["a"], ["b", "c"], [], []]
    assert split([], lambda name: True) == [[]]


def test_gaps_and_times_add_up_where_kernels_overlap() -> None:
    kernels = [
        Kernel("first", 10, 5),  # to 15
        Kernel("early", 13, 4),  # starts before the first has ended: 2 are its own
        Kernel("inside", 14, 1),  # ends before the one before it
        Kernel("late", 20, 3),  # 3 idle before it
        Kernel("next", 23, 0),
    ]
    found = gaps_and_times(kernels)
    assert found == [(0, 5), (0, 2), (0, 0), (3, 3), (0, 0)]
    assert sum(gap + own for gap, own in found) == 23 - 10
    assert gaps_and_times([]) == []


def test_the_middle_half_of_the_runs_counts() -> None:
    runs = [[1.0, 1.0], [2.0, 3.0], [3.0, 3.0], [90.0, 9.0]]
    assert middle_means(runs) == [2.5, 3.0]
    assert middle_means([[1.0, 4.0]]) == [1.0, 4.0]
    assert middle_means([[1.0], [2.0]]) == [1.5]


def test_equal_sequences_are_joined_in_order() -> None:
    expected = model()
    timed, notes = join(expected, [run([name for _, name in expected])] * 3)
    assert [(t.owner, t.name) for t in timed] == expected
    assert timed[0].us == 2.0 and all(t.us == 2.5 for t in timed[1:])
    assert notes == ()


def test_a_missing_kernel_moves_no_other() -> None:
    """Layers are alike, so that a careless comparison would shift everything by a layer."""
    expected = model()
    gone = 12 * len(LAYER) + 3  # the delta rule of layer 12
    left = [launch for i, launch in enumerate(expected) if i != gone]
    timed, notes = join(expected, [run([name for _, name in left])])
    assert [t.owner for t in timed] == [owner for owner, _ in left]
    assert notes == (
        "delta, launched by delta_12_3 when run call by call, has no sure place in the step",
    )


def test_a_copy_that_nobody_expects_is_told() -> None:
    expected = model(3)
    names = [name for _, name in expected]
    names.insert(10, "Memcpy DtoD (Device -> Device)")
    timed, notes = join(expected, [run(names)])
    assert timed[10] == Timed(UNJOINED, "Memcpy DtoD (Device -> Device)", 2.5)
    assert [t.owner for i, t in enumerate(timed) if i != 10] == [owner for owner, _ in expected]
    assert notes == (
        "kernel 10 of the step, Memcpy DtoD (Device -> Device) (2.5 µs), belongs to no call with "
        "certainty",
    )


def test_what_could_be_either_is_neither() -> None:
    """Of two equal kernels in a row one is gone: nothing says which."""
    assert align(["a", "gemm", "gemm", "b"], ["a", "gemm", "b"]) == [0, None, 3]
    assert align(["a", "gemm", "b"], ["a", "gemm", "gemm", "b"]) == [0, None, None, 2]
    assert align(["a", "b"], ["b", "a"]) == [None, None]
    assert align(["a", "b"], []) == [] and align([], ["a"]) == [None]
    timed, notes = join([("x", "gemm"), ("y", "gemm")], [run(["gemm"])])
    assert [t.owner for t in timed] == [UNJOINED] and len(notes) == 3


def test_another_kernel_in_its_place_is_not_taken_for_it() -> None:
    assert align(["a", "gemm_64", "b"], ["a", "gemm_128", "b"]) == [0, None, 2]


def test_replays_that_ran_something_else_do_not_count() -> None:
    good, bad = run(["a", "b"]), run(["a", "memset", "b"], us=100.0)
    timed, notes = join([("x", "a"), ("y", "b")], [good, bad, good])
    assert [t.us for t in timed] == [2.0, 2.5]
    assert notes == ("1 of 3 replays ran other kernels than the rest, and are left out",)


def test_overlapping_kernels_add_up_to_the_replay() -> None:
    replays = [
        [Kernel("a", start, 10), Kernel("b", start + 8, 6 + extra), Kernel("c", start + 16, 4)]
        for start, extra in ((0.0, 0.0), (100.0, 1.0))
    ]
    timed, _ = join([("x", "a"), ("x", "b"), ("y", "c")], replays)
    assert [t.us for t in timed] == [10.0, 4.5, 5.5]
    assert sum(t.us for t in timed) == 20.0


@pytest.fixture
def step() -> MeasuredStep:
    calls = (
        Call("embedding", "embed_tokens", "aten.embedding", Cost(1, 4_000)),
        Call("linear", "layers.0.mlp.up", "minivllm.linear", Cost(2, 8_000, 1_000)),
        Call("split", "layers.0.mlp", "aten.split", Cost()),
        Call("linear_1", "layers.1.mlp.up", "minivllm.linear", Cost(1, 2_000, 50_000)),
        Call("head", "", "aten.linear", Cost(1, 6_000)),
    )
    timed = (
        Timed(BEFORE, "index", 1.0),
        Timed("embedding", "gather", 5.0),
        Timed("linear", "gemm", 9.0),
        Timed("linear", "norm", 1.0),
        Timed("linear_1", "gemm", 7.0),
        Timed(UNJOINED, "copy", 0.5),
        Timed("head", "gemv", 12.0),
        Timed(BEHIND, "max", 2.0),
    )
    # 1,000 bytes or 10,000 FLOPs a microsecond
    return MeasuredStep(Machine("a device", 1e9, 1e10), True, calls, timed, 36.0, ("a note",))


def test_rows_add_up_to_the_step(step: MeasuredStep) -> None:
    rows = step.rows(lambda call: part_of(call.module))
    assert [(r.name, r.calls, r.kernels, r.floor_us, r.us) for r in rows] == [
        ("embed_tokens", 1, 1, 4.0, 5.0),
        ("layers.0", 2, 2, 8.0, 10.0),
        ("layers.1", 1, 1, 5.0, 7.0),  # bound by its FLOPs
        ("", 1, 1, 6.0, 12.0),
        (BEFORE, 0, 1, 0.0, 1.0),
        (BEHIND, 0, 1, 0.0, 2.0),
        (UNJOINED, 0, 1, 0.0, 0.5),
    ]
    assert rows[1].cost == Cost(2, 8_000, 1_000)
    for key in (lambda call: part_of(call.module), lambda call: call.op):
        assert sum(row.us for row in step.rows(key)) == step.total_us == 37.5
        assert sum(row.floor_us for row in step.rows(key)) == step.floor_us == 23.0


def test_kernels_of_no_call_are_a_fault(step: MeasuredStep) -> None:
    with pytest.raises(AssertionError, match="gone"):
        MeasuredStep(step.machine, True, step.calls, (Timed("gone", "gemm", 1.0),), 1.0)


def test_the_tables(step: MeasuredStep) -> None:
    assert measured_tables("decode", step).splitlines() == [
        "decode, measured: 0.036 ms a step on a device, captured in a CUDA Graph; floor 0.023 ms, "
        "64 % of it (1 GB/s and 0.01 TFLOP/s, measured). While its parts are timed it takes "
        "0.037 ms, to which the µs add up.",
        "",
        "not joined: a note",
        "",
        "| part | calls | kernels | MB | GFLOP | floor µs | µs | floor/µs | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| embed_tokens | 1 | 1 | 0.00 | 0.000 | 4.0 | 5.0 | 80 % | 13.3 % |",
        "| layers.0 | 2 | 2 | 0.01 | 0.000 | 8.0 | 10.0 | 80 % | 26.7 % |",
        "| layers.1 | 1 | 1 | 0.00 | 0.000 | 5.0 | 7.0 | 71 % | 18.7 % |",
        "| (top) | 1 | 1 | 0.01 | 0.000 | 6.0 | 12.0 | 50 % | 32.0 % |",
        "| before the graph |  | 1 | 0.00 | 0.000 | 0.0 | 1.0 |  | 2.7 % |",
        "| behind the graph |  | 1 | 0.00 | 0.000 | 0.0 | 2.0 |  | 5.3 % |",
        "| not joined |  | 1 | 0.00 | 0.000 | 0.0 | 0.5 |  | 1.3 % |",
        "| all | 5 | 8 | 0.02 | 0.000 | 23.0 | 37.5 | 61 % | 100.0 % |",
        "",
        "| op | calls | kernels | MB | GFLOP | floor µs | µs | floor/µs | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| minivllm.linear | 2 | 3 | 0.01 | 0.000 | 13.0 | 17.0 | 76 % | 45.3 % |",
        "| aten.linear | 1 | 1 | 0.01 | 0.000 | 6.0 | 12.0 | 50 % | 32.0 % |",
        "| aten.embedding | 1 | 1 | 0.00 | 0.000 | 4.0 | 5.0 | 80 % | 13.3 % |",
        "| behind the graph |  | 1 | 0.00 | 0.000 | 0.0 | 2.0 |  | 5.3 % |",
        "| before the graph |  | 1 | 0.00 | 0.000 | 0.0 | 1.0 |  | 2.7 % |",
        "| not joined |  | 1 | 0.00 | 0.000 | 0.0 | 0.5 |  | 1.3 % |",
        "| all | 4 | 8 | 0.02 | 0.000 | 23.0 | 37.5 | 61 % | 100.0 % |",
    ]


def test_the_json_has_every_kernel(step: MeasuredStep) -> None:
    data = measured_json(step)
    assert data["kernels"][3] == {
        "call": "linear",
        "module": "layers.0.mlp.up",
        "op": "minivllm.linear",
        "kernel": "norm",
        "us": 1.0,
    }
    assert data["kernels"][0] == {"call": BEFORE, "kernel": "index", "us": 1.0}
    assert (data["step_us"], data["profiled_us"], data["floor_us"]) == (36.0, 37.5, 23.0)
