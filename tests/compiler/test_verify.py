"""Verification: every right stage passes, and a wrong rewrite is caught and named.

A wrong pass here is one line away from the right one, and a contract cannot see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from toy_graphs import aten, tiny_config

from minivllm.compiler.compile import compile_model
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.compiler.trace import trace
from minivllm.compiler.verify import (
    SLOTS,
    VerificationError,
    Verifier,
    pool_entries,
    scenario,
)
from minivllm.config import CompilerOptions
from minivllm.model.config import MiniQwenConfig
from minivllm.ops import OPS

Rewrite = Callable[[Graph], None]


@pytest.fixture(scope="module")
def verifier(config: MiniQwenConfig, source: Graph) -> Verifier:
    return Verifier(config, source)


@pytest.fixture(scope="module")
def half_verifier(config: MiniQwenConfig, half_source: Graph) -> Verifier:
    return Verifier(config, half_source)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_passes(
    verifier: Verifier,
    half_verifier: Verifier,
    context: PassContext,
    phase: str,
    dtype: str,
) -> None:
    used = verifier if dtype == "float32" else half_verifier
    seen = []

    def observe(graph: Graph, stage: str) -> None:
        used.check_stage(graph, stage)
        seen.append(stage)

    passes = select_passes("compiled", phase)
    run_passes(used.source.clone(phase), passes, context, [observe])
    assert seen == ["source", *(p.name for p in passes)]


class Wrong(GraphPass):
    """A pass that runs one rewrite of the finished graph."""

    name = "wrong"
    mutates = True

    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite = rewrite

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        self.rewrite(graph)
        return []


def plain_norm_weight(graph: Graph) -> None:
    """w in place of 1 + w, in the last norm."""
    adds = graph.nodes(aten.add.Tensor)
    (one_plus,) = (n for n in adds if n.meta["module"] == "norm" and n.args[1] == 1.0)
    graph.replace(one_plus, one_plus.args[0])


def epsilon_outside(graph: Graph) -> None:
    """rsqrt(mean) + eps in place of rsqrt(mean + eps), with an eps that matters."""
    root = graph.nodes(aten.rsqrt.default)[0]
    mean, _ = root.args[0].args
    inner = graph.call(aten.rsqrt.default, mean, like=root)
    graph.replace(root, graph.call(aten.add.Tensor, inner, 1e-3, like=root))


def swapped_gate(graph: Graph) -> None:
    """SwiGLU with the activation on the wrong half."""
    silu = next(n for n in graph.nodes(aten.silu.default) if n.meta["module"] == "layers.1.mlp")
    (product,) = silu.users
    gate, up = silu.args[0], product.args[1]
    silu.args, product.args = (up,), (silu, gate)
    up.append(silu)


def positions_from_zero(graph: Graph) -> None:
    """Positions counted within the step, which is right for a first chunk only."""
    cast = next(n for n in graph.nodes(aten.to.dtype) if n.args[0].target == "positions")
    ones = graph.call(aten.ones_like.default, cast.args[0], like=cast)
    count = graph.call(aten.cumsum.default, ones, 0, like=cast)
    cast.args = (graph.call(aten.sub.Tensor, count, ones, like=cast), torch.float32)


def no_mask(graph: Graph) -> None:
    """A new sequence starts from whatever its slot held."""
    for where in graph.nodes(aten.where.ScalarOther):
        graph.replace(where, where.args[1])


def mask_by_product(graph: Graph) -> None:
    """0 · NaN is NaN."""
    for where in graph.nodes(aten.where.ScalarOther):
        condition, state, _ = where.args
        cast = graph.call(aten.to.dtype, condition, torch.float32, like=where)
        graph.replace(where, graph.call(aten.mul.Tensor, state, cast, like=where))


def always_masked(graph: Graph) -> None:
    """Every chunk starts anew."""
    for test in graph.nodes(aten.gt.Scalar):
        graph.replace(test, graph.call(aten.lt.Scalar, test.args[0], 0, like=test))


def scatter_to(kind: str) -> Rewrite:
    def rewrite(graph: Graph) -> None:
        """The new state goes to the slot of the sequence before."""
        for write in graph.nodes(aten.index_copy_.default):
            if str(write.args[0].target).endswith(kind):
                slots = write.args[2]
                rolled = graph.call(aten.roll.default, slots, [1], [0], like=write)
                write.args = (*write.args[:2], rolled, write.args[3])

    return rewrite


def gather_from_row(graph: Graph) -> None:
    """The state of sequence n is read from slot n."""
    for read in graph.nodes(aten.index_select.default):
        if str(read.args[0].target).startswith("state."):
            slots = read.args[2]
            ones = graph.call(aten.ones_like.default, slots, like=read)
            rows = graph.call(aten.cumsum.default, ones, 0, like=read)
            read.args = (*read.args[:2], rows)


def old_state_written_back(graph: Graph) -> None:
    for write in graph.nodes(aten.index_copy_.default):
        read = next(u for u in write.args[0].users if u.target is aten.index_select.default)
        write.args = (*write.args[:3], read)


def keys_written_behind_the_read(graph: Graph) -> None:
    (write,) = graph.nodes(OPS["paged_kv_write"].overload)
    read = next(u for u in write.args[0].users if u is not write)
    read.append(write)


def keys_and_values_swapped(graph: Graph) -> None:
    (write,) = graph.nodes(OPS["paged_kv_write"].overload)
    k_cache, v_cache, k, v, places = write.args
    write.args = (k_cache, v_cache, v, k, places)


def lengths_without_this_step(graph: Graph) -> None:
    read = next(n for n in graph.nodes() if "paged_attention" in str(n.target))
    lengths = next(a for a in read.args if getattr(a, "target", None) == "seq_lens")
    shorter = graph.call(aten.sub.Scalar, lengths, 1, like=read)
    read.args = tuple(shorter if a is lengths else a for a in read.args)


def first_rows(graph: Graph) -> None:
    """The head on the first rows of the batch in place of the last ones of each sequence."""
    head = graph.output.args[0]
    rows = head.args[2]
    ones = graph.call(aten.ones_like.default, rows, like=head)
    head.args = (*head.args[:2], graph.call(aten.cumsum.default, ones, 0, like=head))


EVERYWHERE = (
    plain_norm_weight,
    epsilon_outside,
    swapped_gate,
    positions_from_zero,
    old_state_written_back,
    keys_written_behind_the_read,
    keys_and_values_swapped,
    lengths_without_this_step,
    gather_from_row,
)
EAGER = [
    *(("decode", r) for r in EVERYWHERE),
    ("decode", scatter_to("conv")),
    ("decode", scatter_to("recurrent")),
    ("prefill", scatter_to("conv")),
    ("prefill", scatter_to("recurrent")),
    ("prefill", no_mask),
    ("prefill", mask_by_product),
    ("prefill", always_masked),
    ("prefill", first_rows),
    ("prefill", positions_from_zero),
    ("prefill", old_state_written_back),
    ("prefill", keys_written_behind_the_read),
]


def one(graph: Graph, op: str) -> Node:
    """The first call of one of our ops."""
    return graph.nodes(OPS[op].overload)[0]


def swap(op: str, i: int, j: int) -> Rewrite:
    """Two arguments of an op in the wrong order."""

    def rewrite(graph: Graph) -> None:
        node = one(graph, op)
        args = list(node.args)
        args[i], args[j] = args[j], args[i]
        node.args = tuple(args)

    rewrite.__name__ = f"{op}_{i}_{j}"
    return rewrite


def literal(op: str, i: int, value: float | bool) -> Rewrite:
    """Another constant in an op's arguments."""

    def rewrite(graph: Graph) -> None:
        node = one(graph, op)
        node.args = (*node.args[:i], value, *node.args[i + 1 :])

    rewrite.__name__ = f"{op}_{i}_is_{value}"
    return rewrite


def sum_and_norm_swapped(graph: Graph) -> None:
    op = (
        "linear_add_rms_norm"
        if graph.nodes(OPS["linear_add_rms_norm"].overload)
        else "add_rms_norm"
    )
    for part in list(one(graph, op).users):
        part.args = (part.args[0], 1 - part.args[1])


def slices_swapped(graph: Graph) -> None:
    """The parts of a merged linear go to each other's readers."""
    split = next(
        n
        for n in graph.nodes(aten.split_with_sizes.default)
        if "gate_proj+up_proj" in str(n.args[0].args[1].target)
    )
    for part in list(split.users):
        part.args = (split, 1 - part.args[1])


def recipe(first: str, second: str) -> Rewrite:
    """Two tensors of one size in each other's rows of a merged weight."""
    other = {first: second, second: first}

    def rewrite(graph: Graph) -> None:
        for weight, spec in list(graph.weights.items()):
            parts = []
            for part in spec.parts:
                module, name, leaf = part.name.rsplit(".", 2)
                renamed = f"{module}.{other.get(name, name)}.{leaf}"
                parts.append(dataclasses.replace(part, name=renamed))
            graph.weights[weight] = dataclasses.replace(spec, parts=tuple(parts))

    rewrite.__name__ = f"recipe_{first}_{second}"
    return rewrite


def rows_off_by_one(graph: Graph) -> None:
    """A recipe in which the keys start a row too early."""
    name = next(n for n in graph.weights if "q_proj+k_proj" in n)
    spec = graph.weights[name]
    q, k, v = spec.parts
    early = dataclasses.replace(k, start=k.start - 1)
    graph.weights[name] = dataclasses.replace(spec, parts=(q, early, v))


def slots_rolled(op: str) -> Rewrite:
    """The op reads and writes the slots of the sequence before."""

    def rewrite(graph: Graph) -> None:
        node = one(graph, f"{op}_{graph.phase}_slots")
        slots = graph.input("state_slots")
        # another sequence's slot in the second step only: in the first all start from nothing
        kept = graph.call(aten.roll.default, slots, [1], [0], like=node)
        computed = graph.input("num_computed_tokens")
        mixed = graph.call(
            aten.where.self, graph.call(aten.gt.Scalar, computed, 0, like=node), kept, slots,
            like=node,
        )  # fmt: skip
        node.args = tuple(mixed if a is slots else a for a in node.args)

    rewrite.__name__ = f"slots_rolled_{op}"
    return rewrite


def never_started(op: str) -> Rewrite:
    """All sequences are taken for ones that continue: they read what their slot held."""

    def rewrite(graph: Graph) -> None:
        node = one(graph, f"{op}_prefill_slots")
        computed = graph.input("num_computed_tokens")
        more = graph.call(aten.ones_like.default, computed, like=node)
        node.args = tuple(more if a is computed else a for a in node.args)

    rewrite.__name__ = f"never_started_{op}"
    return rewrite


def always_started(op: str) -> Rewrite:
    def rewrite(graph: Graph) -> None:
        node = one(graph, f"{op}_prefill_slots")
        computed = graph.input("num_computed_tokens")
        none = graph.call(aten.zeros_like.default, computed, like=node)
        node.args = tuple(none if a is computed else a for a in node.args)

    rewrite.__name__ = f"always_started_{op}"
    return rewrite


MIXERS = ("causal_conv1d_qkv", "fused_gated_delta_rule")
COMPILED = [
    ("decode", literal("rms_norm", 3, 0.0)),
    ("decode", literal("rms_norm", 2, 0.1)),
    ("decode", literal("linear_add_rms_norm", 5, 0.0)),
    ("decode", sum_and_norm_swapped),
    ("decode", swap("gated_rms_norm_linear_add_rms_norm", 0, 1)),
    ("decode", swap("sigmoid_mul_linear_add_rms_norm", 0, 1)),
    ("decode", swap("qk_norm_rope", 2, 3)),
    ("decode", swap("fused_gated_delta_rule_decode_slots", 0, 1)),
    ("decode", swap("fused_gated_delta_rule_decode_slots", 3, 4)),
    ("decode", swap("fused_gated_delta_rule_decode_slots", 5, 6)),
    ("decode", recipe("gate_proj", "up_proj")),
    ("prefill", slices_swapped),
    ("prefill", literal("add_rms_norm", 4, 0.0)),
    ("prefill", swap("gated_rms_norm", 0, 1)),
    ("prefill", swap("sigmoid_mul", 0, 1)),
    ("decode", recipe("k_proj", "v_proj")),
    ("decode", recipe("in_proj_a", "in_proj_b")),
    ("decode", rows_off_by_one),
    ("decode", keys_and_values_swapped),
    ("decode", keys_written_behind_the_read),
    ("prefill", swap("silu_mul", 0, 1)),
    ("prefill", first_rows),
    *(("prefill", wrong(op)) for op in MIXERS
      for wrong in (slots_rolled, never_started, always_started)),
]  # fmt: skip
CASES = [("eager", *case) for case in EAGER] + [("compiled", *case) for case in COMPILED]


@pytest.mark.parametrize(
    ("mode", "phase", "rewrite"),
    CASES,
    ids=[f"{m}-{p}-{r.__name__}-{i}" for i, (m, p, r) in enumerate(CASES)],
)
def test_a_wrong_pass_is_caught_and_named(
    verifier: Verifier, context: PassContext, mode: str, phase: str, rewrite: Rewrite
) -> None:
    graph = verifier.source.clone(phase)
    run_passes(graph, select_passes(mode, phase), context)

    def observe(graph: Graph, stage: str) -> None:
        if stage != "source":
            verifier.check_stage(graph, stage)

    with pytest.raises(CompileError, match=rf"pass wrong on the {phase} graph: ") as error:
        run_passes(graph, [Wrong(rewrite)], context, [observe])
    assert isinstance(error.value.__cause__, VerificationError)
    assert "after wrong the logits differ by" in str(error.value)


@pytest.mark.parametrize(
    ("mode", "rewrite"),
    [
        ("eager", plain_norm_weight),
        ("eager", swapped_gate),
        ("eager", keys_written_behind_the_read),
        ("eager", scatter_to("conv")),
        ("compiled", literal("rms_norm", 3, 0.0)),
        ("compiled", recipe("gate_proj", "up_proj")),
        ("compiled", recipe("k_proj", "v_proj")),
        ("compiled", sum_and_norm_swapped),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_pass_is_caught_in_bfloat16(
    half_verifier: Verifier, context: PassContext, mode: str, rewrite: Rewrite
) -> None:
    graph = half_verifier.source.clone("decode")
    run_passes(graph, select_passes(mode, "decode"), context)
    rewrite(graph)
    with pytest.raises(VerificationError, match=r"the logits differ .*torch\.bfloat16"):
        half_verifier.check_stage(graph, "wrong")


def test_the_first_wrong_pass_is_named_with_those_before(
    verifier: Verifier, context: PassContext
) -> None:
    for place, rewrite in ((1, plain_norm_weight), (3, sum_and_norm_swapped)):
        passes = select_passes("compiled", "decode")
        before = ", ".join(p.name for p in passes[:place])
        passes.insert(place, Wrong(rewrite))
        passes[place].mutates = False
        with pytest.raises(CompileError) as error:
            run_passes(verifier.source.clone("decode"), passes, context, [verifier.check_stage])
        message = str(error.value)
        assert message.startswith("pass wrong on the decode graph: ")
        assert message.endswith(f"(passes before it: {before})")


def test_the_option(config: MiniQwenConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compiler.verify` checks every stage of both graphs; without it none is."""
    seen = []
    monkeypatch.setattr(
        Verifier, "check_stage", lambda self, graph, stage: seen.append((graph.phase, stage))
    )
    compile_model(config, torch.float32, CompilerOptions())
    assert seen == []
    compile_model(config, torch.float32, CompilerOptions(verify=True))
    assert seen == [
        (phase, stage)
        for phase in PHASES
        for stage in ("source", *(p.name for p in select_passes("compiled", phase)))
    ]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_scenario_is_hard(phase: str, block_size: int) -> None:
    """Ragged, scattered, with a history, and with a chunk of one token."""
    batches = scenario(phase, 61, block_size)
    lengths = [b.lengths for b in batches]
    if phase == "prefill":
        assert len(batches) == 2 and {1} < {n for step in lengths for n in step}
        assert max(max(step) for step in lengths) > 64, "no sequence needs two chunks"
    else:
        assert set(lengths) == {(1, 1, 1)}
    computed = [0, 0, 0]
    owner: dict[int, int] = {}
    for batch in batches:
        inputs = batch.inputs
        assert inputs["num_computed_tokens"].tolist() == computed
        ends = [c + n for c, n in zip(computed, batch.lengths, strict=True)]
        assert inputs["seq_lens"].tolist() == ends
        assert inputs["positions"].tolist() == [
            p for c, e in zip(computed, ends, strict=True) for p in range(c, e)
        ]
        bounds = inputs["cu_seqlens"].tolist()
        assert inputs["logits_rows"].tolist() == [b - 1 for b in bounds[1:]]
        starts = inputs["kv_indptr"].tolist()
        for n in range(3):
            own = inputs["kv_indices"][starts[n] : starts[n + 1]].tolist()
            assert own == inputs["block_table"][n, : -(-ends[n] // block_size)].tolist()
            for place in inputs["slot_mapping"][bounds[n] : bounds[n + 1]].tolist():
                assert place >= block_size, "block 0 belongs to nobody"
                assert place not in owner, "a place is written twice"
                owner[place] = n
                assert place // block_size in inputs["block_table"][n].tolist()
        assert inputs["input_ids"].max() < 61
        assert inputs["chunk_slots"].shape == inputs["chunk_indices"].shape[:1]
        kept = inputs["chunk_slots"].unique().tolist()
        assert kept[0] == 0 and not set(kept) & set(SLOTS), "snapshots lie in nobody's slot"
        assert len(kept) == 1 + inputs["chunk_slots"].count_nonzero() > 1
        assert kept[-1] < pool_entries(block_size)
        computed = ends
    assert 0 not in SLOTS and len(set(SLOTS)) == 3 and list(SLOTS) != sorted(SLOTS)


@pytest.mark.parametrize("changes", [
    {"linear_num_key_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    {"linear_num_key_heads": 1, "num_key_value_heads": 1, "linear_conv_kernel_dim": 3,
     "layer_types": ("full_attention", "linear_attention"), "attention_bias": True},
])  # fmt: skip
def test_other_architectures(changes: dict) -> None:
    config = tiny_config(**changes)
    verifier = Verifier(config, trace(config, torch.float32))
    context = PassContext(config, torch.float32, 16)
    for phase in PHASES:
        graph = verifier.source.clone(phase)
        run_passes(graph, select_passes("compiled", phase), context)
        verifier.check_stage(graph, "inplace_state")
