"""Imports point one way: run → runtime → compiler → ops, model → ops; Hydra is an edge's affair."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minivllm"
LEAVES = {"errors", "config", "presets"}  # import none of the layers
ALLOWED = {  # layer -> what it may import beside itself and the leaves
    "ops": set(),
    "model": {"ops"},
    "compiler": {"ops", "model"},  # patterns are the model's own code
    "runtime": {"ops", "model", "compiler"},
}
ENTRY = {"chat", "console", "conversation", "inspect", "overrides", "prompts", "run"}
MAY_IMPORT_HYDRA = {"run"}
TORCH_FREE = [  # of runtime: what decides, apart from what computes
    "block_manager",
    "digests",
    "group_memory",
    "prefix_cache",
    "request",
    "sampling_params",
    "scheduler",
    "snapshot_planner",
    "snapshot_pool",
    "state_slots",
    "step",
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(dotted: str) -> str:
    """The layer or top-level module of `minivllm.x.y`; the package itself is `__init__`."""
    return dotted.split(".")[1] if "." in dotted else "__init__"


def imported(file: Path) -> set[str]:
    """Every dotted name that a file imports, anywhere in it, relative imports resolved."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "minivllm":  # the names may be modules or exports of __init__
                found.update(
                    f"minivllm.{alias.name}" if is_module(alias.name) else "minivllm"
                    for alias in node.names
                )
            else:
                found.add(module)
    return found


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


def own_part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file):
    own = own_part(file)
    targets = {part(name) for name in imported(file) if name.split(".")[0] == "minivllm"}
    if own in ENTRY | {"__init__"}:
        return
    allowed = LEAVES if own in LEAVES else ALLOWED[own] | LEAVES | {own}
    assert targets <= allowed, f"{own} imports {sorted(targets - allowed)}"


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_only_the_entry_point_imports_hydra(file):
    uses = {name for name in imported(file) if name.split(".")[0] in ("hydra", "omegaconf")}
    assert bool(uses) == (own_part(file) in MAY_IMPORT_HYDRA), sorted(uses)


def test_every_part_has_a_place_in_the_order():
    parts = {own_part(file) for file in modules()}
    assert parts == LEAVES | set(ALLOWED) | ENTRY | {"__init__"}


def test_the_reader_of_imports_sees_what_it_should():
    assert "minivllm.errors" in imported(PACKAGE / "config.py")
    assert {"minivllm.console", "minivllm.overrides", "hydra"} <= imported(PACKAGE / "run.py")
    assert part("minivllm.runtime.llm") == "runtime"
    assert part("minivllm") == "__init__"


def test_the_command_line_is_read_without_torch():
    code = "import sys, minivllm.run; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr


@pytest.mark.parametrize("name", TORCH_FREE)
def test_scheduling_imports_nothing_that_computes(name):
    """Not even inside a function, which the test below would not see."""
    names = imported(PACKAGE / "runtime" / f"{name}.py")
    own = {f"minivllm.runtime.{module}" for module in TORCH_FREE}
    outside = {name.split(".")[0] for name in names if not name.startswith("minivllm")}
    assert outside <= set(sys.stdlib_module_names)
    assert {name for name in names if name.startswith("minivllm.runtime")} <= own


def test_scheduling_is_imported_without_torch():
    names = ", ".join(f"minivllm.runtime.{name}" for name in TORCH_FREE)
    code = f"import sys, {names}; print({{'torch', 'numpy', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
