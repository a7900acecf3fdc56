"""`docs/writing_a_pass.md`, as somebody follows it: its files written, its commands run.

What the document shows of a dump is what comes out, byte for byte.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "writing_a_pass.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:`([\w./]+)`[^`\n]*:\n\n)?```(\w+)\n(.*?)```", TEXT, re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """The file that a block belongs to, by the line before it, and its text."""
    return [(name, text) for name, kind, text in BLOCKS if kind == language]


def test_the_document_has_what_it_promises() -> None:
    assert [kind for _, kind, _ in BLOCKS] == ["python", "python", "bash", "bash", "diff"]
    (name, code), (test, _) = blocks("python")
    assert (name, test) == ("hoist_logits_rows.py", "test_hoist_logits_rows.py")
    body = code[code.index("    def run") :]
    assert len(body.splitlines()) <= 30


@pytest.mark.slow
def test_the_document_step_by_step(tmp_path: Path) -> None:
    for name, code in blocks("python"):
        (tmp_path / name).write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    printed = []
    for _, command in blocks("bash"):
        program, *arguments = shlex.split(command)
        assert program == "python"
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        printed.append(run.stdout)
    assert "1 passed" in printed[0]
    assert re.search(r"^\| hoist_logits_rows \| 14 \|", printed[1], re.MULTILINE)
    ((path, shown),) = blocks("diff")
    assert (tmp_path / path).read_text(encoding="utf-8") == shown
    page = (tmp_path / "dump" / "index.html").read_text(encoding="utf-8")
    assert 'id="prefill-hoist_logits_rows"' in page and 'id="decode-hoist_logits_rows"' not in page
    assert "what only the wanted logits need is computed for their rows alone" in page


def test_the_table_of_mistakes_lists_each_once() -> None:
    rows = re.findall(r"^\| (.+?) \| `.+?` <!-- (\w+) --> \|$", TEXT, re.MULTILINE)
    assert len({name for _, name in rows}) == len(rows) >= 8
