"""Text dumps: one file a stage, written so that `diff` of two stages explains the pass between.

Owns the format. Does not own the graph or the directory's other contents.

    write = dump_to(Path("dump"))       # an observer for runner.run_passes

Names are FX's, sizes are the vocabulary's symbols, weights stand inline, calls are grouped by
module path; there are no addresses, so two dumps of one commit are identical.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from minivllm.compiler.graph import INPUTS, Graph
from minivllm.compiler.runner import Observer
from minivllm.errors import UserError


def dump_to(folder: Path) -> Observer:
    """An observer that writes `<folder>/<phase>/<index>_<stage>.txt`."""
    counters: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)

    def write(graph: Graph, stage: str) -> None:
        path = folder / graph.phase / f"{next(counters[graph.phase]):02d}_{stage}.txt"
        try:
            if stage == "source":
                for old in path.parent.glob("[0-9][0-9]_*.txt"):
                    old.unlink()  # of an earlier run, which may have had other stages
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(format_graph(graph, stage), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"compiler.dump_dir={str(folder)!r}: cannot write {path} ({error.strerror}); "
                "name a folder that can be written"
            ) from error

    return write


def format_graph(graph: Graph, stage: str) -> str:
    """A graph as text."""
    lines = [f"# {graph.phase} graph after {stage}: {len(graph.nodes())} calls", ""]
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            meaning = INPUTS[str(node.target)].meaning
            lines.append(f"input  {node.target}: {_type(graph, node)}    # {meaning}")
    for name, state in graph.states.items():
        dims = ", ".join(str(d) for d in (state.symbol, *state.shape))
        lines.append(f"state  {name}: {_dtype(state.dtype)}[{dims}]")
    module = None
    for node in graph.fx.nodes:
        if node.op == "call_function":
            if node.meta["module"] != module:
                module = node.meta["module"]
                lines += ["", f"{module or '(top)'}:"]
            source = f"    # {node.meta['source']}" if node.meta["source"] else ""
            lines.append(f"  %{node.name} = {_call(graph, node)}: {_type(graph, node)}{source}")
    lines += ["", f"return {_argument(graph, graph.output)}: {_type(graph, graph.output)}", ""]
    return "\n".join(lines)


def _call(graph: Graph, node: Node) -> str:
    arguments = [_argument(graph, a) for a in node.args]
    arguments += [f"{k}={_argument(graph, v)}" for k, v in node.kwargs.items()]
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target).removesuffix(".default")
    else:
        name = getattr(target, "__name__", str(target))
    return f"{name}({', '.join(arguments)})"


def _argument(graph: Graph, value: Any) -> str:
    if isinstance(value, Node):
        return str(value.target) if value.op != "call_function" else f"%{value.name}"
    if isinstance(value, (list, tuple, fx.immutable_collections.immutable_list)):
        return f"[{', '.join(_argument(graph, v) for v in value)}]"
    if isinstance(value, torch.dtype):
        return _dtype(value)
    return repr(value)


def _type(graph: Graph, node: Node) -> str:
    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_dtype(value.dtype)}[{', '.join(graph.named(s) for s in value.shape)}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(describe(v) for v in value)})"
        return type(value).__name__

    return describe(node.meta["val"])


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
