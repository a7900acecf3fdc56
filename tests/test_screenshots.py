"""The report in a real browser: console, requests, keyboard, widths, pictures, size.

Skipped where there is no Chromium. `scripts/report_screenshots.py` takes the pictures of `docs`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.report_screenshots import (
    MODELS,
    VIEWS,
    WIDTHS,
    Browser,
    check_keys,
    check_page,
    chromium,
    dump,
    find_chromium,
    show,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_chromium() is None, reason="no Chromium: apt-get install chromium, or set CHROMIUM"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module", params=MODELS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a model, on the file system."""
    return dump(MODELS[request.param], tmp_path_factory.mktemp(request.param))


def test_it_is_small(page: Path) -> None:
    assert 100_000 < page.stat().st_size < 5_000_000


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_fault(browser: Browser, page: Path, width: str, scheme: str) -> None:
    assert page.as_uri().startswith("file://")
    browser.open(page.as_uri(), *WIDTHS[width], scheme)
    assert check_page(browser, page) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_reach_passes_and_differences(browser: Browser, page: Path, width: str) -> None:
    browser.open(page.as_uri(), *WIDTHS[width], "light")
    assert check_keys(browser) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures(browser: Browser, page: Path, width: str) -> None:
    """Each view is another one, as large as the window."""
    browser.open(page.as_uri(), *WIDTHS[width], "light")
    pictures = {}
    for view, element in VIEWS.items():
        show(browser, element)
        pictures[view] = browser.screenshot()
        assert pictures[view].startswith(b"\x89PNG")
        assert struct.unpack(">II", pictures[view][16:24]) == WIDTHS[width]
        assert len(pictures[view]) > 20_000  # an empty one has a few thousand bytes
    assert len(set(pictures.values())) == len(VIEWS)


def test_near_misses_are_shown(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri(), *WIDTHS["desktop"], "light")
    browser.evaluate("location.hash = '#prefill-fuse_silu_mul'")
    browser.evaluate("new Promise(done => setTimeout(done, 100))")
    near = "document.querySelector('#prefill-fuse_silu_mul .near')"
    assert not browser.evaluate(f"{near}.open")
    browser.evaluate(f"{near}.querySelector('summary').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.evaluate(f"{near}.open")
    text = browser.evaluate(f"{near}.innerText")
    assert "another op: aten.sigmoid in place of aten.silu" in text
    assert "layers.*.mixer" in text


BROKEN = {
    "a script that fails": ("<script>throw new Error('no')</script>", "exception: Uncaught"),
    "a message": ("<script>console.error('no')</script>", "console: "),
    "a request": ("<img src='https://example.invalid/x.png' alt=''>", "asked for https://example"),
    "a wide line": ("<div style='width: 9000px'>x</div>", "pixels wider than its window"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_noticed(browser: Browser, tmp_path: Path, page: Path, name: str) -> None:
    extra, message = BROKEN[name]
    broken = tmp_path / "index.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(text.replace("<main>", f"<main>{extra}", 1), encoding="utf-8")
    browser.open(broken.as_uri(), *WIDTHS["desktop"], "light")
    assert any(message in fault for fault in check_page(browser, broken))


def test_a_page_that_keys_do_not_work_on_is_noticed(
    browser: Browser, tmp_path: Path, page: Path
) -> None:
    broken = tmp_path / "index.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(text.replace("<script>\n", "<script>\nthrow 0;\n"), encoding="utf-8")
    browser.open(broken.as_uri(), *WIDTHS["desktop"], "light")
    assert any("does not open what it changed" in fault for fault in check_keys(browser))
