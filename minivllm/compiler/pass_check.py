"""What a legal pass is, and what to do about the mistakes that are made in writing one.

Owns the checks that need no graph, and the loading of passes that stand outside the package. Does
not own what a pass leaves behind in a graph (contract.py).

    passes = load_passes(["hoist_logits_rows:HoistLogitsRows"])
    check_passes(passes)
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch._subclasses.fake_tensor import UnsupportedOperatorException

from minivllm.compiler.contract import ContractError
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import GraphPass
from minivllm.compiler.text import call_text
from minivllm.errors import UserError

SIGNATURE = "def run(self, graph: Graph, context: PassContext) -> list[str]"


def load_passes(names: Sequence[str]) -> list[GraphPass]:
    """A pass for each `module:Class` of `compiler.extra_passes`.

    Raises:
        UserError: no such module or class, or the class is no pass.
    """
    return [_load(name) for name in names]


def _load(name: str) -> GraphPass:
    key = f"compiler.extra_passes: {name!r}"
    module, colon, cls = name.partition(":")
    if not (colon and all(module.split(".")) and cls.isidentifier()):
        raise UserError(f"{key} is not MODULE:CLASS, such as my_pass:MyPass for my_pass.py")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the pass itself asks for
        raise UserError(
            f"{key}: no module {error.name!r} on the import path; start python -m in the folder "
            "that holds it, or name that folder in PYTHONPATH"
        ) from error
    found = getattr(loaded, cls, None)
    if not (isinstance(found, type) and issubclass(found, GraphPass)):
        classes = [
            n
            for n, value in vars(loaded).items()
            if isinstance(value, type) and issubclass(value, GraphPass) and value is not GraphPass
        ]
        what = "has no such name" if found is None else f"{cls} is no subclass of GraphPass"
        raise UserError(f"{key}: {module} {what}; its passes: {', '.join(classes) or 'none'}")
    try:
        return found()
    except TypeError as error:
        raise UserError(
            f"{key} cannot be made without arguments ({error}); give them defaults, or hand "
            "compile_model an instance: passes=[...]"
        ) from error


def check_passes(passes: Sequence[GraphPass]) -> None:
    """Check each pass by itself, and that no two have one name.

    Raises:
        UserError: naming the pass, what is wrong, and what to write instead.
    """
    for graph_pass in passes:
        _check(graph_pass)
    for name, count in Counter(p.name for p in passes).items():
        if count > 1:
            raise UserError(
                f"pass {name}: {count} passes of this pipeline have that name, which dumps, "
                "reports and compiler.disable tell them apart by; rename one"
            )


def _check(graph_pass: Any) -> None:
    if isinstance(graph_pass, type):
        cls = graph_pass.__name__
        raise UserError(f"pass {cls} is a class; a pipeline holds instances: write {cls}()")
    cls = type(graph_pass).__name__
    if not isinstance(graph_pass, GraphPass):
        raise UserError(f"{graph_pass!r} is no pass; derive {cls} from passes.base.GraphPass")
    name = getattr(graph_pass, "name", None)
    if not (isinstance(name, str) and re.fullmatch(r"\w+", name)):
        raise UserError(
            f"pass {cls}: its name is {name!r}; set name to letters, digits and underscores: it "
            "is part of the dumps' file names"
        )
    phases: Any = graph_pass.phases
    if not (isinstance(phases, (tuple, list)) and all(phase in PHASES for phase in phases)):
        raise UserError(
            f"pass {name}: phases={phases!r} is no tuple of phases; choose from {', '.join(PHASES)}"
        )
    if type(graph_pass).run is GraphPass.run:
        raise UserError(f"pass {name}: {cls} has no run; write {SIGNATURE}")
    try:
        inspect.signature(graph_pass.run).bind(None, None)
    except TypeError as error:
        signature = f"run{inspect.signature(type(graph_pass).run)}"
        raise UserError(
            f"pass {name}: {cls}.{signature} cannot be called with a graph and a context "
            f"({error}); write {SIGNATURE}"
        ) from error


def check_sites(graph_pass: GraphPass, sites: Any) -> str | None:
    """What is wrong with what a pass returned, and what to do; None if nothing is."""
    remedy = "return a list with the module path of each match, and [] where there was none"
    if isinstance(sites, list):
        other = next((site for site in sites if not isinstance(site, str)), None)
        if other is None:
            return None
        return f"{graph_pass.name}.run returned a list that holds {other!r}; {remedy}"
    text = "" if sites is None else f" {sites!r}"
    return f"{graph_pass.name}.run returned {type(sites).__name__}{text}; {remedy}"


def explain_error(graph: Graph, error: Exception) -> str:
    """An exception from a pass in one line: what it is, the call it came from, and what to do."""
    text = f"{type(error).__name__}: {error}"
    untyped = next((n for n in graph.nodes() if "val" not in n.meta), None)
    if untyped is not None and not isinstance(error, ContractError):
        module = untyped.meta.get("module", "?")
        text += f"; at node {untyped} ({module}) = {call_text(graph, untyped)}"
    if isinstance(error, UnsupportedOperatorException):
        text += (
            "; the op has no fake, so nobody knows the shape of its output: register one "
            "(torch.library.register_fake), or define the op with minivllm.ops.op.define_op"
        )
    elif "Tried to erase Node" in str(error):
        text += (
            "; hand its readers another value first: graph.replace(node, new) does both, and "
            "erases what only the node read"
        )
    return text
