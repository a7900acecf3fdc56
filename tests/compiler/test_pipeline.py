"""Which passes run, in which order, and what the user is told about names."""

from __future__ import annotations

import pytest

from minivllm.compiler import pipeline
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import PIPELINE, select_passes
from minivllm.errors import UserError


def names(*args: object, **kwargs: object) -> list[str]:
    return [p.name for p in select_passes(*args, **kwargs)]  # type: ignore[arg-type]


class Optional(GraphPass):
    name = "fuse_something"
    phases = ("decode",)

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return []


@pytest.fixture
def with_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline with an optional pass for decode behind canonicalize."""
    monkeypatch.setattr(pipeline, "PIPELINE", (PIPELINE[0], Optional(), *PIPELINE[1:]))


LOWERING = ["select_logits", "lower_mixers", "lower_attention"]
FUSIONS = [
    "fuse_norms",
    "fuse_residual_add",
    "merge_linears",
    "fuse_silu_mul",
    "fold_gate",
    "fuse_qk_norm_rope",
    "fuse_output_gate",
]
FEW_ROWS = ["fuse_linear_epilogues", "fuse_linear_prologues", "decode_linears"]
STATES = ["inplace_state", "fuse_conv_qk_norm", "prefetch_states", "keep_snapshots"]
OPTIONAL = [*FUSIONS, *FEW_ROWS, *STATES]
ORDER = ["canonicalize", *FUSIONS, "select_logits", *FEW_ROWS, *LOWERING[1:], *STATES]
ONLY_IN = {
    "prefill": ["select_logits", "fuse_conv_qk_norm", "keep_snapshots"],
    "decode": [*FEW_ROWS, "prefetch_states"],
}


@pytest.mark.parametrize(
    ("mode", "order"), [("eager", ["canonicalize", *LOWERING]), ("compiled", ORDER)]
)
def test_the_order(mode: str, order: list[str]) -> None:
    assert names(mode, "prefill") == [n for n in order if n not in ONLY_IN["decode"]]
    assert names(mode, "decode") == [n for n in order if n not in ONLY_IN["prefill"]]


def test_a_pass_stands_behind_those_it_builds_on() -> None:
    """And it must match fewer sites without them, or it would not say so."""
    for index, graph_pass in enumerate(PIPELINE):
        assert set(graph_pass.after) <= {p.name for p in PIPELINE[:index]}
        assert not set(graph_pass.after) & {p.name for p in PIPELINE if p.mandatory}
    assert {p.name: p.after for p in PIPELINE if p.after} == {
        "fuse_residual_add": ("fuse_norms",),
        "fuse_qk_norm_rope": ("fuse_norms",),
        "fuse_linear_epilogues": (
            "fuse_norms",
            "fuse_residual_add",
            "merge_linears",
            "fuse_silu_mul",
        ),
        "fuse_linear_prologues": (
            "fuse_norms",
            "fuse_residual_add",
            "fuse_output_gate",
            "fuse_linear_epilogues",
        ),
        "decode_linears": (
            "fuse_norms",
            "fuse_residual_add",
            "merge_linears",
            "fuse_silu_mul",
            "fuse_linear_epilogues",
        ),
        "inplace_state": ("fold_gate",),
        "fuse_conv_qk_norm": ("fold_gate", "inplace_state"),
        "prefetch_states": ("fold_gate", "inplace_state"),
        "keep_snapshots": ("fold_gate", "inplace_state"),
    }


def test_names_are_unique_and_mutation_comes_last() -> None:
    passes = [p.name for p in PIPELINE]
    assert len(set(passes)) == len(passes)
    mutates = [p.mutates for p in PIPELINE]
    assert mutates == sorted(mutates)
    assert passes[0] == "canonicalize"


@pytest.mark.usefixtures("with_optional")
def test_eager_is_the_mandatory_passes() -> None:
    assert "fuse_something" not in names("eager", "decode")
    assert names("compiled", "decode")[:3] == ["canonicalize", "fuse_something", "fuse_norms"]
    assert "fuse_something" not in names("compiled", "prefill")
    assert names("eager", "decode") == names(
        "compiled", "decode", disable=["fuse_something", *OPTIONAL]
    )


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_optional_pass_is_left_out_alone(name: str, phase: str) -> None:
    everything = names("compiled", phase)
    assert names("compiled", phase, disable=[name]) == [n for n in everything if n != name]


@pytest.mark.usefixtures("with_optional")
def test_disable_in_a_phase_that_never_runs_it() -> None:
    assert names("compiled", "prefill", ["fuse_something"]) == names("compiled", "prefill")


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_stop_after_every_pass(mode: str, phase: str) -> None:
    everything = names(mode, phase)
    for index, name in enumerate(everything):
        assert names(mode, phase, stop_after=name) == everything[: index + 1]
    assert names(mode, phase, stop_after=None) == everything


def test_stop_after_a_pass_of_the_other_phase() -> None:
    assert names("eager", "decode", stop_after="select_logits") == ["canonicalize"]


def test_unknown_names() -> None:
    listed = ", ".join(ORDER)
    with pytest.raises(UserError) as error:
        select_passes("eager", "decode", disable=["fuse_norm"])
    assert str(error.value) == f"compiler.disable: no pass 'fuse_norm'; choose from {listed}"
    with pytest.raises(UserError) as error:
        select_passes("eager", "decode", stop_after="Canonicalize")
    assert str(error.value) == f"compiler.stop_after: no pass 'Canonicalize'; choose from {listed}"


@pytest.mark.parametrize("name", ["canonicalize", "select_logits", "lower_mixers"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_mandatory_pass_cannot_be_left_out(name: str, phase: str) -> None:
    with pytest.raises(UserError) as error:
        select_passes("compiled", phase, disable=[name])
    assert str(error.value) == (
        f"compiler.disable: '{name}' is mandatory, no graph runs without it; "
        f"optional passes: {', '.join(OPTIONAL)}"
    )


@pytest.mark.usefixtures("with_optional")
def test_the_optional_passes_are_listed() -> None:
    with pytest.raises(UserError, match=r"optional passes: fuse_something, fuse_norms, fuse_resi"):
        select_passes("compiled", "decode", disable=["fuse_something", "lower_mixers"])
