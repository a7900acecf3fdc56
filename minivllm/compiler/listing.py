"""A graph as text, written so that the difference of two stages explains the pass between.

Owns the format and which layers are shown. Does not own how a node is spelled (text.py) nor files
(dump.py).

    text = format_graph(graph, "fuse_norms", layers=(0, 3))

Calls are grouped by module path; each output has a line; two listings of one commit are identical.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch.fx import Node

from minivllm.compiler.graph import Graph
from minivllm.compiler.text import argument_text, call_text, dtype_text, type_text


def format_graph(graph: Graph, stage: str, layers: Collection[int] = ()) -> str:
    """A graph as text.

    Args:
        layers: show these layers alone, and what stands outside of layers; empty: all.
    """
    calls = graph.nodes()
    shown = [n for n in calls if is_shown(n.meta["module"], layers)]
    title = f"# {graph.phase} graph after {stage}: {len(calls)} calls"
    if layers:
        numbers = ", ".join(str(layer) for layer in sorted(layers))
        title += f", of which {len(shown)} are shown: layers {numbers}, and outside of layers"
    lines = [title, ""]
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            meaning = graph.inputs[str(node.target)].meaning
            lines.append(f"input  {node.target}: {type_text(graph, node)}    # {meaning}")
    for name, state in graph.states.items():
        if is_shown(name.removeprefix("state."), layers):
            dims = ", ".join(str(d) for d in (state.symbol, *state.shape))
            lines.append(f"state  {name}: {dtype_text(state.dtype)}[{dims}]")
    module = None
    for node in shown:
        if node.meta["module"] != module:
            module = node.meta["module"]
            lines += ["", f"{module or '(top)'}:"]
        source = f"    # {node.meta['source']}" if node.meta["source"] else ""
        call = f"%{node.name} = {call_text(graph, node)}: {type_text(graph, node)}"
        lines.append(f"  {call}{source}")
    (outputs,) = graph.fx.output_node().args
    lines.append("")
    for value in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        kind = f": {type_text(graph, value)}" if isinstance(value, Node) else ""
        lines.append(f"return {argument_text(graph, value)}{kind}")
    return "\n".join([*lines, ""])


def layer_of(module: str) -> int | None:
    """The layer of a module path, or None outside of layers."""
    found = re.match(r"layers\.(\d+)", module)
    return int(found[1]) if found else None


def is_shown(module: str, layers: Collection[int]) -> bool:
    """Whether a listing of `layers` shows what belongs to a module."""
    layer = layer_of(module)
    return not layers or layer is None or layer in layers


def sections(text: str) -> list[tuple[str, list[str]]]:
    """The modules of a listing that `format_graph` wrote, in order, each with its lines.

    Inputs, states and the end are left out.
    """
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("  "):
            found[-1][1].append(line)
        elif line.endswith(":") and " " not in line:
            found.append((line[:-1].replace("(top)", ""), []))
    return found
