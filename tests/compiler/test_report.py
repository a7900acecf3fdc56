"""The report: one page that needs nothing else, whose links lead somewhere and whose numbers agree.

How it looks and whether a browser likes it is for `scripts/report_screenshots.py`.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_graphs import tiny_config

import minivllm.model.miniqwen as model_source
from minivllm.compiler.compile import compile_model
from minivllm.compiler.graph import PHASES, Graph
from minivllm.compiler.passes.base import GraphPass, PassContext
from minivllm.compiler.pipeline import select_passes
from minivllm.compiler.report_layers import alike
from minivllm.config import CompilerOptions
from minivllm.inspect import inspect
from minivllm.run import main

VOID = {"meta", "link"}  # elements of the page that have no end


class Page(HTMLParser):
    """Reads a page: its elements, ids, links and text; fails where elements are not nested."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.styles: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert len(values) == len(attrs), (tag, attrs)
        self.tags.append((tag, values))
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values["href"]))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.styles.append(data)
        else:
            self.text.append(data)
        if self.open[-1:] in (["td"], ["th"]) or self.open[-2:] == ["th", "a"]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The dump of the shipped model, and what `inspect` printed."""
    return inspect_to(tmp_path_factory.mktemp("dump"), "tiny")


def inspect_to(folder: Path, model: str) -> tuple[Path, str]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main([f"+model={model}", f"compiler.dump_dir={folder}"], inspect) == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def page(inspected: tuple[Path, str]) -> Page:
    return read(inspected[0])


def read(folder: Path) -> Page:
    return Page((folder / "index.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(page: Page) -> None:
    for tag, values in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in values and "srcset" not in values, (tag, values)
        assert not any(name.startswith("on") for name in values), (tag, values)
        if tag == "link":
            assert values == {"rel": "icon", "href": "data:,"}
    for text in page.styles:
        assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttp", text)
    assert not any(re.match(r"[a-z]+:|//", link) for link in page.links)


def test_every_link_leads_somewhere(inspected: tuple[Path, str], page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    for link in set(page.links):
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        else:
            assert (inspected[0] / link).is_file(), link


def test_every_pass_is_named_and_explained(page: Page) -> None:
    text = "".join(page.text)
    for phase in PHASES:
        for graph_pass in select_passes("compiled", phase):
            assert f"{phase}-{graph_pass.name}" in page.ids
            assert f"{graph_pass.name}: " in text, "the module's docstring"


def test_every_call_is_linked_to_its_line(inspected: tuple[Path, str], page: Page) -> None:
    source = Path(model_source.__file__).read_text(encoding="utf-8").splitlines()
    assert {f"L{number}" for number in range(1, len(source) + 1)} <= set(page.ids)
    text = "".join(page.text)
    assert not re.search(r"modules/\w+\.py:\d+", text), "a line of torch's own"
    assert all(line in text for line in source)
    html = (inspected[0] / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'<a href="#L(\d+)">miniqwen.py:(\d+)</a>', html)
    assert all(line == shown for line, shown in links)
    cited = [int(line) for line, _ in links]
    used = {source[number - 1].strip() for number in cited}
    assert "return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))" in used
    assert not any(line.startswith(("#", '"""', "def ", "class ")) for line in used)


def test_keyboard_and_eyes(page: Page) -> None:
    """Parts that open are the browser's own, and whatever scrolls by itself takes the focus."""
    names = [tag for tag, _ in page.tags]
    assert names.count("details") == names.count("summary") > 30
    for tag, values in page.tags:
        if values.get("class") in ("scroll", "code listing"):
            assert values["tabindex"] == "0" and values["aria-label"], tag
        if tag == "button":
            assert values["type"] == "button"
            (area,) = [v for k, v in values.items() if k in ("data-open", "data-close")]
            assert area in page.ids
    style = page.styles[0]
    assert ":focus-visible" in style and "prefers-color-scheme: dark" in style
    assert "@media (max-width" in style


def test_near_misses_are_told_once_a_kind(inspected: tuple[Path, str]) -> None:
    """As many as `compiler.explain` counts; those that differ in their layer only are one."""
    html = (inspected[0] / "index.html").read_text(encoding="utf-8")
    counts, groups = {}, {}
    for phase in PHASES:
        for graph_pass in select_passes("compiled", phase):
            start = html.index(f'id="{phase}-{graph_pass.name}"')
            part = html[start : html.index('<div class="r head">', start)]
            summary = re.search(
                r"<summary>(\d+) near misse?s?(?: of (\d+) kinds?)?</summary>", part
            )
            if summary is None:
                assert "No near miss: nothing else in the graph came close." in part
                continue
            key = phase, graph_pass.name
            counts[key] = int(summary[1])
            groups[key] = part.count("<section><h4>")
            assert groups[key] == min(int(summary[2]), 8)
            for name in ("expected", "found", "from", "reason"):
                assert part.count(f"<dt>{name}</dt><dd>") == groups[key]
    both = {"fuse_residual_add": 5, "merge_linears": 17, "fuse_silu_mul": 29}
    expected = {(phase, name): n for phase in PHASES for name, n in both.items()}
    assert counts == expected | {("decode", "fuse_linear_prologues"): 8}
    assert groups["prefill", "merge_linears"] == 4  # head, linear attention's output, full's, MLP's
    silu = html[html.index('id="prefill-fuse_silu_mul"') :]
    first = silu[silu.index("<section>") : silu.index("</section>")]
    assert "<h4>layers.*.mixer: 2, in layers 3, 7</h4>" in first
    assert "1 of 2 nodes of swiglu fit, stopped at %sigmoid" in first
    assert "<dt>expected</dt><dd>aten.silu(gate) as argument 0 of %mul_" in first
    assert re.search(
        r"<dd>layers.7.mixer, <a href=\"#L\d+\">miniqwen.py:\d+</a>; made by tr", first
    )
    assert "another op: aten.sigmoid in place of aten.silu" in first


def test_a_users_pass_is_explained_by_its_own_words(tmp_path: Path) -> None:
    class Mine(GraphPass):
        name = "mine"

        def run(self, graph: Graph, context: PassContext) -> list[str]:
            return []

    options = CompilerOptions(dump_dir=str(tmp_path), dump_layers=(0,))
    compile_model(tiny_config(), torch.float32, options, passes=[Mine()])
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    part = html[html.index('id="decode-mine"') :]
    assert '<pre class="about">The report: one page that needs nothing else' in part
    assert "Nothing changed in the layers shown." in part[: part.index("</details>")]


def test_the_numbers_are_the_tables(inspected: tuple[Path, str]) -> None:
    check_numbers(*inspected)


def check_numbers(folder: Path, printed: str) -> None:
    """`summary.json`, the page's tables and what `inspect` prints are the same numbers."""
    summary = json.loads((folder / "summary.json").read_text())
    times = json.loads((folder / "timings.json").read_text())
    headings = [m.start() for m in re.finditer(r"^\| pass \|", printed, re.MULTILINE)]
    assert len(headings) == len(PHASES)
    tables = [row for row in read(folder).rows if re.match(r"\d\d ", row[0])]
    for phase, start in zip(PHASES, headings, strict=True):
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in printed[start:].split("\n\n")[0].splitlines()[2:]
        ]
        stages = summary["phases"][phase]["stages"]
        assert [row[0] for row in rows] == [stage["name"] for stage in stages]
        for index, (row, stage) in enumerate(zip(rows, stages, strict=True)):
            name, sites, ms, calls, launches, megabytes, gigaflop = row
            assert sites == ("" if stage["sites"] is None else str(stage["sites"]))
            assert (int(calls), int(launches)) == (stage["calls"], stage["launches"])
            assert megabytes == f"{stage['bytes'] / 1e6:,.1f}"
            assert gigaflop == f"{stage['flops'] / 1e9:,.2f}"
            if index:
                assert ms == f"{times['pass_ms'][phase][name]:.0f}"
            shown = tables.pop(0)
            assert shown[0] == f"{index:02d} {name}" and shown[1] == sites
            assert shown[2].split()[0] == f"{stage['calls']:,}"
            assert shown[4].split()[0] == f"{stage['launches']:,}"
    assert tables == []


def test_the_shipped_model_is_small(inspected: tuple[Path, str]) -> None:
    assert (inspected[0] / "index.html").stat().st_size < 1_000_000


def test_the_08b(tmp_path: Path) -> None:
    folder, printed = inspect_to(tmp_path, "miniqwen08b")
    assert (folder / "index.html").stat().st_size < 1_500_000
    check_numbers(folder, printed)
    summary = json.loads((folder / "summary.json").read_text())
    # the first has no addition before its norm; of the last, the model's norm takes the sum
    linear = [layer for layer in range(1, 24) if layer % 4 != 3]
    assert summary["layers_alike"] == [[0], linear, [3, 7, 11, 15, 19], [23]]
    found = read(folder)
    for phase in PHASES:
        shown = {i for i in found.ids if re.match(rf"{phase}-layer-\d+$", i)}
        assert shown == {f"{phase}-layer-{layer}" for layer in (0, 1, 3, 23)}


def test_layers_that_are_asked_for(tmp_path: Path) -> None:
    config = tiny_config(
        num_hidden_layers=4, layer_types=("linear_attention",) * 3 + ("full_attention",)
    )
    options = CompilerOptions(dump_dir=str(tmp_path), dump_layers=(2,))
    compile_model(config, torch.float32, options)
    page = read(tmp_path)
    for phase in PHASES:
        assert [i for i in page.ids if i.startswith(f"{phase}-layer-")] == [f"{phase}-layer-2"]
    text = "".join(page.text)
    assert "layers.2.mixer" in text and "layers.3.mixer.o_proj" not in text
    assert "layer 2, and like it 1" in text and "not shown: 3" in text
    for link in page.links:
        assert not link.startswith("#") or link[1:] in page.ids, link


def test_layers_that_differ_are_told_apart() -> None:
    def text(*bodies: str) -> str:
        return "\n".join(
            f"\nlayers.{i}.mlp:\n  %a_{i} = aten.silu(%b_{i}): {body}"
            for i, body in enumerate(bodies)
        )

    same, other = "float32[tokens, 8]", "float32[tokens, 9]"
    assert alike({"prefill": [text(same, same, other)]}, 3) == [[0, 1], [2]]
    late = {"prefill": [text(same, same)], "decode": [text(same, same), text(same, other)]}
    assert alike(late, 2) == [[0], [1]]


def test_a_failed_compilation_leaves_no_old_report(tmp_path: Path) -> None:
    for name in ("index.html", "summary.json", "timings.json"):
        (tmp_path / name).write_text("old")

    def fail(graph: Any, stage: str) -> None:
        raise RuntimeError(stage)

    options = CompilerOptions(dump_dir=str(tmp_path))
    with pytest.raises(RuntimeError):
        compile_model(
            tiny_config(),
            torch.float32,
            options,
            observers=[lambda g, s: s != "fuse_norms" or fail(g, s)],
        )
    assert not (tmp_path / "index.html").exists()
    assert (tmp_path / "prefill" / "00_source.txt").exists()
