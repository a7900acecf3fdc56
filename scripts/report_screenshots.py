"""Looks at the compilation report in a real browser: console, keyboard, widths, screenshots.

    python scripts/report_screenshots.py [FOLDER]         # default: docs/images

Needs Chromium (`apt-get install chromium`), which is found on the PATH or named by CHROMIUM. It
compiles `tiny` and the 0.8B, opens each `index.html` from the file system at 1280 and 420 pixels,
and fails for an error on the console, a request for anything but the file itself, a page that is
wider than its window, or a part that the keyboard does not open. The browser is driven through its
own debugging pipe, so that nothing else need be installed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"tiny": "tiny", "08b": "miniqwen08b"}
WIDTHS = {"desktop": (1280, 860), "narrow": (420, 860)}
VIEWS = {  # what a picture shows -> the element it starts at
    "overview": "top",
    "passes": "decode",
    "layers": "decode-layer-1",
    "changes": "decode-fuse_norms",
    "misses": "prefill-fuse_silu_mul-near",
}
KEPT = {  # pictures: model, width, view, scheme
    ("08b", "desktop", "overview", "light"),
    ("08b", "desktop", "layers", "light"),
    ("08b", "desktop", "changes", "dark"),
    ("08b", "narrow", "changes", "light"),
    ("tiny", "desktop", "passes", "light"),
    ("tiny", "desktop", "misses", "light"),
    ("tiny", "narrow", "overview", "light"),
}
MAX_BYTES = 300_000
MAX_TABS = 60  # presses of the tab key from the top of the page to the table of passes


class Browser:
    """A headless Chromium and one page of it."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int):
        self.process = process
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the debugging protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("the browser has gone")
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    def wait_for(self, event: str) -> None:
        while not any(e["method"] == event for e in self.events):
            self._read()

    def evaluate(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, url: str, width: int, height: int, scheme: str) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def press(self, key: str, code: int, text: str = "") -> None:
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def find_chromium() -> str | None:
    """The program, from CHROMIUM or the PATH."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own; ended when the block is left.

    Raises:
        SystemExit: there is none.
    """
    found = find_chromium()
    if found is None:
        raise SystemExit("no Chromium found: apt-get install chromium, or set CHROMIUM")
    browser_reads, we_write = os.pipe()
    we_read, browser_writes = os.pipe()

    def wire() -> None:  # the protocol wants descriptors 3 and 4
        source = os.dup(browser_reads), os.dup(browser_writes)
        os.dup2(source[0], 3)
        os.dup2(source[1], 4)

    with tempfile.TemporaryDirectory(prefix="report-browser-", ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [
                found,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                f"--user-data-dir={home}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=wire,
            close_fds=False,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield Browser(process, we_write, we_read)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(we_write)
            os.close(we_read)


def check_page(browser: Browser, page: Path) -> list[str]:
    """What is wrong with a page that has been opened; it is scrolled and its parts are opened."""
    faults = []
    for event in browser.events:
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            faults.append(f"exception: {params['exceptionDetails']['text']}")
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
        ):
            faults.append(f"console: {params['args']}")
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] != "verbose":
            faults.append(f"log: {params['entry']['text']}")
        elif event["method"] == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url != page.as_uri() and not url.startswith("data:"):
                faults.append(f"asked for {url}")
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    if browser.evaluate(wide) > 0:
        faults.append(f"the page is {browser.evaluate(wide)} pixels wider than its window")
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    for key, code, text in (("Enter", 13, "\r"), (" ", 32, " ")):
        browser.evaluate("document.querySelector('.change > summary').focus()")
        browser.press(key, code, text)
        if not browser.evaluate("document.querySelector('.change').open"):
            faults.append(f"key {key!r} does not open a part")
        browser.evaluate("document.querySelector('.change').open = false")
    # a link to a source line from within a closed part, and a link into a closed part
    browser.evaluate("location.hash = '#decode-fuse_norms'")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    if not browser.evaluate("document.getElementById('decode-fuse_norms').open"):
        faults.append("a link into a closed part does not open it")
    # the tab key leads on from there, to where it can be seen
    browser.evaluate("document.querySelector('.change > summary').focus()")
    start = browser.evaluate("document.activeElement.textContent")
    browser.press("Tab", 9)
    if browser.evaluate("document.activeElement.textContent") == start:
        faults.append("the tab key does not lead on")
    if browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "none":
        faults.append("what has the focus cannot be seen")
    return faults


def check_keys(browser: Browser) -> list[str]:
    """What the keyboard alone does not reach: a pass, its difference, a model line, a wide table.

    The browser has the page open, as it was loaded.
    """
    focus = "document.activeElement"
    link = "'.scroll th a'"

    def tab_to(wanted: str) -> bool:
        for _ in range(MAX_TABS):
            browser.press("Tab", 9)
            if browser.evaluate(wanted):
                return True
        return False

    if not tab_to(f"{focus}.matches({link})"):
        return [f"{MAX_TABS} tabs do not lead to a pass"]
    faults = []
    part = browser.evaluate(f"{focus}.hash.slice(1)")
    browser.press("Enter", 13, "\r")
    browser.evaluate("new Promise(done => setTimeout(done, 100))")
    target = f"document.getElementById('{part}')"
    if not browser.evaluate(f"{target}.open"):
        faults.append(f"enter on the pass {part} does not open what it changed")
    top = browser.evaluate(f"{target}.getBoundingClientRect().top")
    if not 0 <= top < browser.evaluate("innerHeight"):
        faults.append(f"enter on the pass {part} does not show what it changed")
    if not tab_to(f"{target}.contains({focus})"):
        faults.append("the tab key does not go on inside of what a pass changed")
    # a call's line of the model
    if tab_to(f"{focus}.matches('.change a[href^=\"#L\"]')"):
        line = browser.evaluate(f"{focus}.hash.slice(1)")
        browser.press("Enter", 13, "\r")
        browser.evaluate("new Promise(done => setTimeout(done, 100))")
        if browser.evaluate("document.querySelector(':target')?.id") != line:
            faults.append(f"enter on a call's line does not lead to {line}")
    else:
        faults.append("the tab key does not reach a call's line")
    # what scrolls by itself does so by the arrow keys
    browser.evaluate("document.querySelector('.scroll').focus()")
    wider = "document.querySelector('.scroll').scrollWidth > document.querySelector('.scroll')"
    if browser.evaluate(f"{wider}.clientWidth"):
        browser.press("ArrowRight", 39)
        browser.evaluate("new Promise(done => setTimeout(done, 400))")
        if browser.evaluate("document.querySelector('.scroll').scrollLeft") <= 0:
            faults.append("arrow keys do not move a table that is wider than the window")
    return faults


def show(browser: Browser, element: str) -> None:
    browser.evaluate(
        "document.querySelectorAll('details').forEach(d => d.open = d.closest('.tree') !== null "
        "&& d.parentElement.closest('details') !== null);"
        f"location.hash = '#nowhere'; location.hash = '#{element}'"
    )
    browser.evaluate("new Promise(done => setTimeout(done, 150))")


def dump(model: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "minivllm.inspect", f"+model={model}"]
    subprocess.run(
        [*command, f"compiler.dump_dir={folder}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return folder / "index.html"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--dumps", type=Path, help="a folder for the dumps, which are kept")
    parser.add_argument("--all", action="store_true", help="keep every picture")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    faults = []
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        for short, model in MODELS.items():
            page = dump(model, (arguments.dumps or Path(scratch)) / short)
            for width_name, size in WIDTHS.items():
                for scheme in ("light", "dark"):
                    browser.open(page.as_uri(), *size, scheme)
                    where = f"{short}, {width_name}, {scheme}"
                    faults += [f"{where}: {fault}" for fault in check_page(browser, page)]
                    browser.open(page.as_uri(), *size, scheme)
                    faults += [f"{where}: {fault}" for fault in check_keys(browser)]
                    for view, element in VIEWS.items():
                        if not arguments.all and (short, width_name, view, scheme) not in KEPT:
                            continue
                        show(browser, element)
                        name = f"report_{short}_{width_name}_{view}_{scheme}"
                        picture = browser.screenshot()
                        if len(picture) > MAX_BYTES:
                            faults.append(f"{name}.png has {len(picture):,} bytes")
                        (arguments.folder / f"{name}.png").write_bytes(picture)
            print(f"{short}: {page.stat().st_size:,} bytes of HTML")
    print("\n".join(faults) or "no faults: console, requests, widths, keys and links")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
