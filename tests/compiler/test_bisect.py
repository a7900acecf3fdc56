"""Bisection and explanations through the whole compiler, and from the command line."""

from __future__ import annotations

import re

import pytest
import torch
from toy_graphs import aten, tiny_config

from minivllm.compiler import pipeline
from minivllm.compiler.compile import compile_model
from minivllm.compiler.explain import count, explanation
from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Misses
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import PIPELINE, executable_prefixes
from minivllm.compiler.runner import CompileError
from minivllm.config import CompilerOptions
from minivllm.errors import UserError
from minivllm.inspect import inspect
from minivllm.run import main

CPU = torch.device("cpu")


def said(**options: object) -> list[str]:
    """What a compilation of the tiny config says."""
    texts: list[str] = []
    compile_model(
        tiny_config(),
        torch.float32,
        CompilerOptions(**options),  # type: ignore[arg-type]
        block_size=16,
        say=texts.append,
        device=CPU,
    )
    return texts


class Adds(GraphPass):
    """Adds 1e-2 to the last norm's output."""

    name = "adds"

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        head = graph.output
        moved = graph.call(aten.add.Tensor, head.args[0], 1e-2, like=head)
        head.args = (moved, *head.args[1:])
        return ["norm"]


class Slow(GraphPass):
    """Multiplies large zeros for every step, and adds one of them to the last norm's output."""

    name = "slow"

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        head = graph.output
        zeros = graph.call(aten.zeros.default, [512, 512], like=head)
        product = graph.call(aten.mm.default, zeros, zeros, like=head)
        total = graph.call(aten.sum.default, product, like=head)
        moved = graph.call(aten.add.Tensor, head.args[0], total, like=head)
        head.args = (moved, *head.args[1:])
        return ["norm"]


def behind(name: str, extra: GraphPass, patch: pytest.MonkeyPatch) -> None:
    """Put a pass behind another one."""
    index = [p.name for p in PIPELINE].index(name) + 1
    patch.setattr(pipeline, "PIPELINE", (*PIPELINE[:index], extra, *PIPELINE[index:]))


def test_numerics_names_the_first_pass_out_of_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    behind("fuse_silu_mul", Adds(), monkeypatch)
    (text,) = said(bisect="numerics")
    prefill, decode = text.split("\ndecode, difference")
    for part, last in ((prefill, "keep_snapshots"), (decode, "prefetch_states")):
        verdicts = re.findall(r"^\| (\w+) \| (\S+) \| (\S+) \| (yes|no) \|$", part, re.MULTILINE)
        bad = [name for name, _, _, verdict in verdicts if verdict == "no"]
        good = [name for name, _, _, verdict in verdicts if verdict == "yes"]
        assert good[0] == "source" and good[-1] == "fuse_silu_mul"
        assert bad[0] == "adds" and bad[-1] == last, "it goes on behind the first"
        assert "adds is the first pass that leaves the tolerance" in part
        assert all(float(error) > float(allowed) for _, error, allowed, v in verdicts if v == "no")


def test_numerics_of_a_right_pipeline() -> None:
    (text,) = said(bisect="numerics")
    assert text.count("no pass leaves the tolerance") == 2
    assert "| no |" not in text


def test_numerics_up_to_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Adds):
        name = "fails"

        def run(self, graph: Graph, context: PassContext) -> list[str]:
            raise ValueError("no")

    behind("fuse_norms", Fails(), monkeypatch)
    texts: list[str] = []
    with pytest.raises(CompileError, match="pass fails"):
        options = CompilerOptions(bisect="numerics")
        compile_model(tiny_config(), torch.float32, options, say=texts.append)
    assert "| fuse_norms |" in texts[0] and "| fails |" not in texts[0]


def test_speed_names_the_first_slower_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    behind("fuse_residual_add", Slow(), monkeypatch)
    (text,) = said(bisect="speed", stop_after="merge_linears")
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| (?:([+-][\d.]+) %)? \|$", text, re.MULTILINE)
    names = [name for name, _, _ in rows]
    assert names == ["mandatory", "fuse_norms", "fuse_residual_add", "slow", "merge_linears"]
    changes = {name: float(change) for name, _, change in rows if change}
    assert changes["slow"] > 20
    assert "slow is the first pass that makes the step slower by more than 2 %" in text
    assert "decode, 1 token, 256 of context, torch.float32 on cpu" in text


def test_every_executable_prefix() -> None:
    prefixes = executable_prefixes("compiled", "decode")
    optional = [p.name for p in PIPELINE if "decode" in p.phases and not p.mandatory]
    assert [name for name, _ in prefixes] == ["mandatory", *optional]
    mandatory = {p.name for p in PIPELINE if p.mandatory and "decode" in p.phases}
    for count_, (_, passes) in enumerate(prefixes):
        assert {p.name for p in passes} == mandatory | set(optional[:count_])
        assert passes == sorted(passes, key=PIPELINE.index)
    assert len(executable_prefixes("eager", "decode")) == 1
    left = executable_prefixes("compiled", "decode", ["fuse_norms"], "fold_gate")
    assert [n for n, _ in left] == ["mandatory", *optional[1:5]]


def test_an_explanation_of_each_pass_of_the_pipeline() -> None:
    for graph_pass in PIPELINE:
        texts = said(explain=graph_pass.name)
        assert len(texts) == 2
        for phase, text in zip(("prefill", "decode"), texts, strict=True):
            if phase in graph_pass.phases:
                assert text.startswith(f"{graph_pass.name} on the {phase} graph: ")
                assert text.count("expected:") <= 10
                assert "near miss" in text
            else:
                assert (
                    text == f"{graph_pass.name} does not run on the {phase} graph of this pipeline"
                )


def test_the_explanation_of_a_residual_stream() -> None:
    prefill, _ = said(explain="fuse_residual_add")
    assert prefill.splitlines()[:5] == [
        "fuse_residual_add on the prefill graph: 4 sites matched",
        "  layers.*.post_attention_layernorm: 2, in layers 0-1",
        "  layers.*.input_layernorm: 1, in layers 1",
        "  norm: 1",
        "3 near misses, the most advanced first:",
    ]
    assert "  layers.0.input_layernorm: 1 of 2 nodes fit, stopped at %embedding\n" in prefill
    assert "    reason:   the norm reads no sum of two tensors of one shape and dtype" in prefill


def test_explanations_are_given_before_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Adds):
        name = "breaks"

        def run(self, graph: Graph, context: PassContext) -> list[str]:
            for node in graph.nodes(aten.silu.default):
                graph.replace(node, graph.call(aten.gelu.default, *node.args, like=node))
            return []

    behind("merge_linears", Breaks(), monkeypatch)
    texts: list[str] = []
    with pytest.raises(CompileError) as error:
        options = CompilerOptions(explain="fuse_silu_mul")
        compile_model(tiny_config(), torch.float32, options, say=texts.append)
    for text in (texts[0], str(error.value)):
        assert "1 of 2 nodes of swiglu fit, stopped at %gelu_default" in text
        assert "layers.0.mlp, model/miniqwen.py:" in text and "made by breaks" in text
        assert "another op: aten.gelu in place of aten.silu" in text
    assert "    the same in layers.1.mlp" in str(error.value)


def test_an_op_that_is_not_there(canonical: Graph) -> None:
    misses = Misses()
    misses.looked_for(aten.relu.default)
    text = explanation(canonical.clone("decode"), "any", [], misses)
    assert text == (
        "any on the decode graph: no sites matched\n"
        "  no near miss; the graph has no further call of aten.relu"
    )
    assert [count(n, "near miss") for n in (0, 1, 2)] == [
        "no near misses",
        "1 near miss",
        "2 near misses",
    ]


def test_options() -> None:
    with pytest.raises(UserError, match=r"compiler.explain: no pass 'fuse'; choose from canonica"):
        said(explain="fuse")
    with pytest.raises(UserError, match=r"'size' is not one of: numerics, speed or null"):
        CompilerOptions(bisect="size")
    with pytest.raises(UserError, match=r"choose one of the two"):
        CompilerOptions(bisect="numerics", verify=True)
    with pytest.raises(UserError, match=r"so compiler.explain, compiler.bisect cannot be honoured"):
        CompilerOptions(mode="reference", explain="fuse_norms", bisect="speed")


def test_inspect_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compiler.explain=select_logits", "compiler.bisect=numerics", "model.dtype=float32"]
    assert main(["+model=tiny", "compiler.mode=eager", *asked], inspect) == 0
    out = capsys.readouterr().out
    assert "select_logits on the prefill graph: 1 site matched\n  head: 1\n" in out
    assert "select_logits does not run on the decode graph" in out
    assert out.count("no pass leaves the tolerance") == 2
    assert main(["+model=tiny", "compiler.explain=nope"], inspect) == 2
    error = capsys.readouterr().err
    assert "compiler.explain: no pass 'nope'; choose from canonicalize, fuse_norms" in error


def test_run_says_it_beside_the_text(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["+model=tiny", "compiler.explain=fuse_norms", "sampling.max_tokens=1"]
    assert main([*arguments, "runtime.max_model_len=64", "runtime.device=cpu"]) == 0
    out, error = capfd.readouterr()
    assert "fuse_norms on the decode graph: 27 sites matched" in error
    assert "sites matched" not in out
