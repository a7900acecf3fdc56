"""Explanations: what a pass matched and what it nearly matched, as text for people.

Owns the wording and what is left out. Does not own how misses are found (near_miss.py).

    print(explanation(graph, "fuse_norms", sites, context.misses))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minivllm.compiler.graph import Graph
from minivllm.compiler.misses import Miss, Misses
from minivllm.compiler.near_miss import near_misses
from minivllm.compiler.text import target_text

NEAR_MISSES = 10  # that an explanation tells in full
SHORTFALLS = 4  # different ones that an error tells in full
LAYER = re.compile(r"(.*?[a-zA-Z_]\w*)\.(\d+)(?=\.|$)")  # up to the first number of a path


@dataclass(frozen=True)
class Explain:
    """A wish to see what one pass did: its name, and where the text goes."""

    name: str
    say: Callable[[str], None]


def explanation(graph: Graph, name: str, sites: Sequence[str], misses: Misses) -> str:
    """The sites of a pass on a graph and its near misses, the most advanced first.

    Args:
        graph: behind the pass.
        sites: what it returned.
        misses: what it noted and looked for.
    """
    near = near_misses(graph, misses)
    lines = [f"{name} on the {graph.phase} graph: {count(len(sites), 'site')} matched"]
    lines += [f"  {site}" for site in _grouped(sites)]
    if not near:
        lines.append(f"  no near miss{_nothing_called(graph, misses)}")
        return "\n".join(lines)
    lines.append(f"{count(len(near), 'near miss')}, the most advanced first:")
    for miss in near[:NEAR_MISSES]:
        lines += ["", f"  {miss.site or '(top)'}: {progress(miss)}", *_details(miss)]
    if len(near) > NEAR_MISSES:
        left = Counter(_place(miss.site) for miss in near[NEAR_MISSES:])
        places = ", ".join(f"{n} in {place}" for place, n in left.items())
        lines += ["", f"  and {len(near) - NEAR_MISSES} less advanced: {places}"]
    return "\n".join(lines)


@dataclass(frozen=True)
class MissGroup:
    """Near misses of one pass that differ in their layer and in names only.

    Attributes:
        miss: the most advanced of them.
        sites: of all, in its order of them.
    """

    miss: Miss
    sites: tuple[str, ...]

    @property
    def places(self) -> list[str]:
        """Where they are: `layers.*.mlp: 24, in layers 0-23`."""
        return _grouped(self.sites)


def grouped_misses(graph: Graph) -> list[MissGroup]:
    """The near misses of the pass that a graph comes from, in groups, the most advanced first."""
    if graph.misses is None:
        return []
    groups: dict[tuple[str, ...], list[Miss]] = {}
    for miss in near_misses(graph, graph.misses):
        texts = (re.sub(r"%\w+|layers\.\d+", "", t) for t in (miss.expected, miss.reason))
        key = (_place(miss.site), miss.pattern, miss.source, *texts)
        groups.setdefault(key, []).append(miss)
    return [MissGroup(group[0], tuple(m.site for m in group)) for group in groups.values()]


def shortfall(graph: Graph, missing: Iterable[str], misses: Misses) -> str:
    """For each site that was not found, the nearest miss in its layer; empty if nothing is known.

    Sites whose misses differ in their layer only are told together.
    """
    if not (misses.noted or misses.patterns or misses.targets):
        return ""
    near = near_misses(graph, misses)
    groups: dict[tuple[str, ...], list[tuple[str, Miss | None]]] = {}
    for site in missing:
        miss = _nearest(site, near)
        groups.setdefault(_kind(site, miss), []).append((site, miss))
    lines = []
    for members in list(groups.values())[:SHORTFALLS]:
        site, miss = members[0]
        if miss is None:
            why = "; the graph has no such layer"
            if _in_graph(graph, site):
                why = _nothing_called(graph, misses)
            lines.append(f"  {site}: no candidate{why}")
        else:
            lines += [f"  {site}: nearest miss in {miss.site or '(top)'}: {progress(miss)}"]
            lines += _details(miss)
        if len(members) > 1:
            lines.append(f"    the same in {', '.join(s for s, _ in members[1:])}")
    rest = [site for members in list(groups.values())[SHORTFALLS:] for site, _ in members]
    if rest:
        lines.append(f"  not told here, but by compiler.explain: {', '.join(rest)}")
    return "\n".join(lines)


def _kind(site: str, miss: Miss | None) -> tuple[str, ...]:
    """Equal for sites whose misses differ in their layer only."""
    if miss is None:
        return ()
    expected = re.sub(r"%\w+", "", miss.expected)
    return _place(site), miss.source, miss.reason.split(":")[0], expected, miss.pattern


def _in_graph(graph: Graph, site: str) -> bool:
    """Whether any call belongs to the site's layer."""
    layer = re.match(r"layers\.\d+", site)
    modules = (n.meta["module"] for n in graph.nodes())
    return layer is None or any(f"{m}.".startswith(f"{layer.group()}.") for m in modules)


def _nearest(site: str, near: Sequence[Miss]) -> Miss | None:
    """The most advanced miss of the site itself, else of its module, else of its layer."""
    layer = re.match(r"layers\.\d+", site)
    places = [lambda s: s == site, lambda s: s.startswith(f"{site}.")]
    if layer:
        places.append(lambda s: f"{s}.".startswith(f"{layer.group()}."))
    for inside in places:
        for miss in near:
            if inside(miss.site):
                return miss
    return None


def progress(miss: Miss) -> str:
    """How far a miss got: `1 of 2 nodes of swiglu fit, stopped at %sigmoid`."""
    what = f" of {miss.pattern}" if miss.pattern else ""
    return f"{miss.matched} of {miss.total} nodes{what} fit, stopped at {miss.at}"


def _details(miss: Miss) -> list[str]:
    origin = [miss.module or "(top)", *([miss.source] if miss.source else [])]
    more = f" ({count(miss.more, 'more difference')} behind it)" if miss.more else ""
    return [
        f"    expected: {miss.expected}",
        f"    here:     {miss.here}",
        f"    from:     {', '.join(origin)}; made by {miss.made_by}",
        f"    reason:   {miss.reason}{more}",
    ]


def _nothing_called(graph: Graph, misses: Misses) -> str:
    """Which of the ops that the pass looks for the graph has no more of."""
    absent = [target_text(t) for t in misses.targets if not graph.nodes(t)]
    return f"; the graph has no further call of {' or '.join(absent)}" if absent else ""


def _grouped(sites: Sequence[str]) -> list[str]:
    """Sites by their place in a layer: `layers.*.mlp: 24, in layers 0-23`."""
    layers: dict[str, list[int]] = {}
    for site in sites:
        found = LAYER.match(site)
        layers.setdefault(_place(site), []).append(int(found[2]) if found else -1)
    lines = []
    for place, numbers in layers.items():
        inside = sorted({n for n in numbers if n >= 0})
        where = f", in layers {_ranges(inside)}" if inside else ""
        lines.append(f"{place}: {len(numbers)}{where}")
    return lines


def _place(site: str) -> str:
    return LAYER.sub(r"\1.*", site, count=1) or "(top)"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2, 4` for 0, 1, 2 and 4."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def count(number: int, noun: str) -> str:
    """`1 site`, `2 sites`, `no near misses`."""
    plural = noun if number == 1 else f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number or 'no'} {plural}"
