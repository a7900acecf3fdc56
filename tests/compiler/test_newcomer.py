"""The mistakes of somebody's first pass: the error names pass and node, and says what to do.

`docs/writing_a_pass.md` lists them; what it quotes is what is said here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node
from toy_graphs import aten, tiny_config, toy

from minivllm.compiler.compile import compile_model
from minivllm.compiler.contract import ContractError, check_changes, snapshot
from minivllm.compiler.graph import Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import PIPELINE, select_passes, with_extra
from minivllm.compiler.runner import CompileError, run_passes
from minivllm.config import CompilerOptions
from minivllm.errors import UserError
from minivllm.inspect import inspect
from minivllm.run import main

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "writing_a_pass.md"
LIBRARY = torch.library.Library("newcomer", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")  # neither a fake nor an implementation


def first_silu(graph: Graph) -> Node:
    """The first MLP's."""
    return next(n for n in graph.nodes(aten.silu.default) if n.meta["module"] == "layers.0.mlp")


def returns_nothing(graph: Graph) -> None:
    silu = first_silu(graph)
    graph.replace(silu, graph.call(aten.silu.default, silu.args[0], like=silu))


def returns_a_count(graph: Graph) -> int:
    return len(graph.nodes(aten.silu.default))


def returns_nodes(graph: Graph) -> list[Node]:
    return [first_silu(graph)]


def another_shape(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.replace(silu, graph.call(aten.sum.dim_IntList, silu, [-1], True, like=silu))
    return []


def another_dtype(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.replace(silu, graph.call(aten.to.dtype, silu.args[0], torch.float64, like=silu))
    return []


def another_dtype_behind_our_back(graph: Graph) -> list[str]:
    """By means of FX alone, which compares nothing."""
    silu = first_silu(graph)
    new = graph.call(aten.to.dtype, silu.args[0], torch.float64, like=silu)
    silu.replace_all_uses_with(new)
    return []


def another_shape_behind_our_back(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    new = graph.call(aten.slice.Tensor, silu.args[0], 1, 0, 7, like=silu)
    silu.replace_all_uses_with(new)
    return []


def another_literal(graph: Graph) -> list[str]:
    """The mean of another dim, in place."""
    mean = graph.nodes(aten.mean.dim)[0]
    mean.args = (mean.args[0], [0], True)
    return []


def another_output(graph: Graph) -> list[str]:
    logits = graph.output
    end = graph.fx.output_node()
    end.meta = {"module": "", "source": ""}
    end.args = (graph.call(aten.to.dtype, logits, torch.float64, like=end),)
    return []


def copies_a_meta(graph: Graph) -> list[str]:
    """A node made by hand that says of itself what its neighbour is."""
    silu = first_silu(graph)
    with graph.fx.inserting_after(silu):
        new = graph.fx.call_function(aten.to.dtype, (silu, torch.float64))
    new.meta = dict(silu.meta)
    silu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return []


def forgets_meta(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    with graph.fx.inserting_before(silu):
        new = graph.fx.call_function(aten.silu.default, silu.args)
    silu.replace_all_uses_with(new)
    return []


def dangles(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.call(aten.silu.default, silu.args[0], like=silu)
    return [silu.meta["module"]]


def erases_early(graph: Graph) -> list[str]:
    graph.fx.erase_node(first_silu(graph))
    return []


def out_of_order(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    later = graph.output
    graph.replace(silu, graph.call(aten.silu.default, silu.args[0], like=later))
    return []


def mutates_early(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.replace(silu, graph.call(aten.silu_.default, silu.args[0], like=silu))
    return []


def foreign_op(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.replace(silu, graph.call(torch.ops.prims.sin.default, silu.args[0], like=silu))
    return []


def no_fake(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.replace(silu, graph.call(torch.ops.newcomer.twice.default, silu.args[0], like=silu))
    return []


def wrong_arguments(graph: Graph) -> list[str]:
    silu = first_silu(graph)
    graph.call(aten.linear.default, silu, graph.output, like=silu)
    return []


NODE = r"node %?\w+ \(layers\.0\.mlp\)"
USE = r"what takes a value's place must have its shape and dtype, which graph\.replace\(node, new\)"
MISTAKES: list[tuple[Callable[[Graph], Any], str]] = [
    (returns_nothing, r"novice\.run returned NoneType; return a list with the module path of each"),
    (returns_a_count, r"novice\.run returned int 3; return a list with the module path of each"),
    (
        returns_nodes,
        r"novice\.run returned a list that holds silu_\w+; return a list with the module",
    ),
    (
        another_shape,
        r"silu_1 \(layers\.0\.mlp\) is .*'40'.*, its replacement \w+ is .*'1'.*; reshape it",
    ),
    (
        another_dtype,
        r"silu_1 \(layers\.0\.mlp\) is .*float32.*, its replacement to_dtype is .*float64.*; "
        r"reshape it, or cast it \(aten\.to\.dtype\), so that the two are alike",
    ),
    (
        another_dtype_behind_our_back,
        rf"{NODE} is float32\[tokens, 40\] by its meta and float64\[tokens, 40\] by its op; now "
        rf"that it reads %to_dtype: float64\[tokens, 40\], %linear_\w+: .*; {USE} checks",
    ),
    (
        another_shape_behind_our_back,
        rf"{NODE} cannot be called so \(RuntimeError: .*\); now that it reads %slice_tensor: "
        rf"float32\[tokens, 7\], .*; {USE} checks",
    ),
    (
        another_literal,
        r"node mean \(layers\.0\.input_layernorm\) is float32\[tokens, 1\] by its meta and "
        r"float32\[1, 24\] by its op; now that it reads %pow_1: float32\[tokens, 24\]",
    ),
    (
        another_output,
        r"node to_dtype \(\) is the graph's output and float64\[tokens, 61\], where "
        r"float32\[tokens, 61\] stood; what takes a value's place must have its shape and dtype",
    ),
    (
        copies_a_meta,
        rf"{NODE} is float32\[tokens, 40\] by its meta and float64\[tokens, 40\] by its op; make "
        r"it with graph\.call\(op, \.\.\., like=node\)",
    ),
    (
        forgets_meta,
        r"node silu_default \(\?\) carries no val in its meta; make it "
        r"with graph\.call\(op, \.\.\., like=node\), which types it and says where it comes from",
    ),
    (
        dangles,
        rf"{NODE} is new and nobody reads it; let it take a node's place: graph\.replace\(node",
    ),
    (
        erases_early,
        r"RuntimeError: Tried to erase Node silu_1 but it still had 1 users .*; hand its readers "
        r"another value first: graph\.replace\(node, new\) does both",
    ),
    (
        out_of_order,
        r"node mul_\w+ \(layers\.0\.mlp\) reads %silu_default, which stands behind it; put that in "
        r"front with graph\.call\(op, \.\.\., like=mul_\w+\)",
    ),
    (
        mutates_early,
        rf"{NODE} changes its argument before lowering; call the op that returns a new value "
        r"\(without the underscore at its end\), or set mutates = True",
    ),
    (
        foreign_op,
        rf"{NODE} calls prims\.sin\.default, which is no op of aten or minivllm; call those, or "
        r"define an op of your own with minivllm\.ops\.op\.define_op",
    ),
    (
        no_fake,
        r"newcomer\.twice\.default; at node twice_default \(layers\.0\.mlp\) = newcomer\.twice\("
        r"%linear_\w+\); the op has no fake, .*: register one \(torch\.library\.register_fake",
    ),
    (
        wrong_arguments,
        r"RuntimeError: .*; at node linear_default \(layers\.0\.mlp\) = aten\.linear\(%silu_1, %",
    ),
]


class Novice(GraphPass):
    """A pass with one of the mistakes."""

    name = "novice"

    def __init__(self, mistake: Callable[[Graph], Any]) -> None:
        self.mistake = mistake

    def run(self, graph: Graph, context: PassContext) -> Any:
        return self.mistake(graph)


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda m: getattr(m, "__name__", ""))
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_mistake(
    canonical: Graph, context: PassContext, mistake: Any, message: str, phase: str
) -> None:
    with pytest.raises(CompileError) as error:
        run_passes(canonical.clone(phase), [Novice(mistake)], context)
    head = rf"pass novice on the {phase} graph: .*"
    assert re.match(head + message, str(error.value), re.DOTALL), str(error.value)
    assert str(error.value).endswith("(passes before it: none)")


def test_a_pass_without_mistakes(canonical: Graph, context: PassContext) -> None:
    """What the checks must let through: dead nodes of before, and rewrites by FX of equal types."""

    def rewrite(graph: Graph) -> list[str]:
        silu = first_silu(graph)
        silu.replace_all_uses_with(graph.call(aten.relu.default, silu.args[0], like=silu))
        return ["layers.0.mlp"]

    graph = canonical.clone("decode")
    (report,) = run_passes(graph, [Novice(rewrite)], context)
    assert (report.matches, report.calls_after) == (1, report.calls_before)
    assert len(graph.nodes(aten.silu.default)) == len(canonical.nodes(aten.silu.default)) - 1


def test_only_what_changed_is_typed_again(
    canonical: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, inferred = canonical.clone("decode"), []
    graph.stage = "novice"
    before = snapshot(graph)
    mean = graph.nodes(aten.mean.dim)[0]
    mean.args = (*mean.args[:1], [-1], True)  # as it was, but another tuple
    silu = first_silu(graph)
    graph.replace(silu, graph.call(aten.relu.default, silu.args[0], like=silu))
    infer = Graph.infer
    monkeypatch.setattr(Graph, "infer", lambda g, n: (inferred.append(n), infer(g, n))[1])
    check_changes(graph, before)
    assert inferred == []
    mean.args = (mean.args[0], [1], True)
    check_changes(graph, before)
    assert inferred == [mean]


def test_a_mutation_of_what_is_no_state(source: Graph, context: PassContext) -> None:
    class Late(Novice):
        mutates = True

    graph = toy(source, lambda b: b.call(aten.silu.default, b.hidden(), module="layers.0.mlp"))
    with pytest.raises(
        CompileError, match=r"changes embedding_default, which is not state; call the op"
    ):
        run_passes(graph, [Late(mutates_early)], context)


def test_a_call_that_changes_nothing_but_a_pool_may_have_no_reader(source: Graph) -> None:
    graph = toy(source, lambda b: b.call(aten.relu.default, b.hidden()), "decode")
    before = snapshot(graph)
    relu = graph.output
    graph.call(aten.zero_.default, relu.args[0], like=relu)
    check_changes(graph, before)
    graph.call(aten.relu.default, relu.args[0], like=relu)
    with pytest.raises(ContractError, match="is new and nobody reads it"):
        check_changes(graph, before)


class Fine(GraphPass):
    name = "fine"

    def run(self, graph: Graph, context: PassContext) -> list[str]:
        return []


def made(**attributes: Any) -> GraphPass:
    return type("Made", (Fine,), attributes)()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Fine, "pass Fine is a class; a pipeline holds instances: write Fine()"),
        (made(name=""), "pass Made: its name is ''; set name to letters, digits and underscores"),
        (made(name="a-b"), "pass Made: its name is 'a-b'; set name to letters"),
        (made(name=None), "pass Made: its name is None; set name to letters"),
        (type("Bare", (GraphPass,), {})(), "pass Bare: its name is None; set name to letters"),
        (
            made(phases="decode"),
            "pass fine: phases='decode' is no tuple of phases; choose from prefill",
        ),
        (
            made(phases=("decoding",)),
            "pass fine: phases=('decoding',) is no tuple of phases; choose",
        ),
        (made(phases=None), "pass fine: phases=None is no tuple of phases; choose from prefill"),
        (
            made(run=lambda self, graph: []),
            "pass fine: Made.run(self, graph) cannot be called with a graph and a context (too "
            "many positional arguments); write def run(self, graph: Graph, context: PassContext)",
        ),
        (
            made(run=lambda self, graph, context, extra: []),
            "Made.run(self, graph, context, extra) cannot be called with a graph and a context "
            "(missing a required argument: 'extra'); write def run(self, graph",
        ),
        (made(run=GraphPass.run), "pass fine: Made has no run; write def run(self, graph: Graph"),
        (made(name="fuse_norms"), "pass fuse_norms: 2 passes of this pipeline have that name"),
        (
            made(before="fuse_norm"),
            "pass fine: before='fuse_norm' is no pass of the pipeline; choose from canonicalize, ",
        ),
        (object(), "is no pass; derive object from passes.base.GraphPass"),
    ],
)
def test_what_is_no_legal_pass(wrong: Any, message: str) -> None:
    """Said before anything is traced."""
    with pytest.raises(UserError, match=re.escape(message)):
        compile_model(tiny_config(), torch.float32, CompilerOptions(), passes=[wrong])


def test_two_passes_of_one_name(canonical: Graph, context: PassContext) -> None:
    with pytest.raises(UserError, match=r"^pass fine: 3 passes of this pipeline have that name, "):
        run_passes(canonical.clone("decode"), [Fine(), Fine(), Fine()], context)


def test_where_extra_passes_stand() -> None:
    first, second = made(name="first"), made(name="second")
    early = made(name="early", before="fuse_norms")
    names = [p.name for p in with_extra([first, early, second])]
    assert names.index("early") == names.index("fuse_norms") - 1
    here = names.index("lower_mixers")
    assert names[here - 2 : here] == ["first", "second"]
    assert [n for n in names if n not in ("first", "second", "early")] == [p.name for p in PIPELINE]
    selected = select_passes("compiled", "decode", ["first"], "second", [first, second])
    assert [p.name for p in selected][-2:] == ["decode_linears", "second"]


@pytest.mark.parametrize("key", ["disable", "stop_after", "explain"])
def test_an_unknown_name(key: str) -> None:
    value: Any = ("hoist",) if key == "disable" else "hoist"
    listed = ", ".join(p.name for p in with_extra([Fine()]))
    with pytest.raises(UserError) as error:
        compile_model(
            tiny_config(), torch.float32, CompilerOptions(**{key: value}), passes=[Fine()]
        )
    assert str(error.value) == f"compiler.{key}: no pass 'hoist'; choose from {listed}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "eager", "disable": ("fuse_norms",)},
            "compiler.disable: 'fuse_norms' does not run in compiler.mode='eager', which has "
            "canonicalize, select_logits, lower_mixers, lower_attention alone; choose compiler.",
        ),
        (
            {"mode": "eager", "stop_after": "fold_gate"},
            "compiler.stop_after: 'fold_gate' does not run in compiler.mode='eager'",
        ),
        (
            {"mode": "eager", "extra_passes": ("test_newcomer:Fine",)},
            "compiler.extra_passes: 'fine' does not run in compiler.mode='eager'",
        ),
        (
            {"disable": ("fold_gate",), "stop_after": "fuse_norms"},
            "compiler.disable: 'fold_gate' stands behind compiler.stop_after='fuse_norms' and does "
            "not run; drop one of the two",
        ),
        ({"mode": "reference"}, "compiler.mode='reference' runs the plain model: there are no gra"),
    ],
)
def test_an_option_without_effect_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        compile_model(tiny_config(), torch.float32, CompilerOptions(**options))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_pass", "'my_pass' is not MODULE:CLASS, such as my_pass:MyPass for my_pass.py"),
        ("my_pass:", "'my_pass:' is not MODULE:CLASS"),
        ("my_pass.py:a b", "is not MODULE:CLASS"),
        (".my_pass:MyPass", "is not MODULE:CLASS"),
        (
            "no_such_module:MyPass",
            "no module 'no_such_module' on the import path; start python -m in the folder",
        ),
        ("test_newcomer:Nobody", "test_newcomer has no such name; its passes: Novice, Fine"),
        ("test_newcomer:Path", "test_newcomer Path is no subclass of GraphPass; its passes: Novi"),
        ("test_newcomer:Novice", "cannot be made without arguments (Novice.__init__() missing 1 "),
    ],
)
def test_a_name_of_a_pass_that_leads_nowhere(name: str, message: str) -> None:
    options = CompilerOptions(extra_passes=(name,))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        compile_model(tiny_config(), torch.float32, options)
    assert str(error.value).startswith(f"compiler.extra_passes: {name!r}")


def test_what_a_users_module_lacks_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        compile_model(tiny_config(), torch.float32, CompilerOptions(extra_passes=("lacking:Pass",)))
    assert "lacking" not in sys.modules


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    extra = "compiler.extra_passes=[test_newcomer:Fine]"
    assert main(["+model=tiny", extra, "compiler.explain=fine"], inspect) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\| fine \| 0 \|", printed, re.MULTILINE)) == 2  # a row of each phase
    assert "fine on the decode graph: no sites matched" in printed
    assert main(["+model=tiny", "compiler.mode=reference"], inspect) == 2
    assert "reference" in capsys.readouterr().err
    assert main(["+model=tiny", "compiler.disable=[fine]"], inspect) == 2
    assert "compiler.disable: no pass 'fine'" in capsys.readouterr().err


def test_the_document_quotes_what_is_said() -> None:
    """Each row of the table of mistakes: its first cell is a mistake of here, its second a part."""
    by_name = {mistake.__name__: message for mistake, message in MISTAKES}
    row = r"^\| (.+?) \| `(.+?)` <!-- (\w+) --> \|$"
    rows = re.findall(row, DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 8
    for _, quoted, name in rows:
        assert name in by_name and quoted in re.sub(r"\\(.)", r"\1", by_name[name]), name
