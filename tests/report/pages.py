"""What the report's tests share: a hostile trace, and a browser if this machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.synthetic import SyntheticJob

HOSTILE = "<script>alert(1)</script>"
HOSTILE_JOB = SyntheticJob(
    slow={(2, "backward"): 9.0},
    modules=("stem", HOSTILE, "layer2", "</script><img src=http://example.invalid/x onerror=alert(2)>"),
    bucket_bytes=(500_000, 1_000_000, 12_000_000),
    steps=9,
)

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def browser_page() -> Iterator[Any]:
    """A page of a headless browser; skips, with the reason, where there is none."""
    executable = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no browser on the PATH ({', '.join(_BROWSERS)})")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 900})
        finally:
            browser.close()


def open_offline(page: Any, path: Path) -> list[str]:
    """Open a page from disk; returns a list that fills with every complaint and every request to elsewhere."""
    complaints: list[str] = []

    def look(route: Any) -> None:
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            complaints.append(f"request to {url}")
            route.abort()

    def refuse(dialog: Any) -> None:
        complaints.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page.route("**/*", look)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", refuse)
    page.goto(path.as_uri())
    page.wait_for_selector("#timeline canvas, #timeline .bk-Figure, #timeline > div", state="attached")
    page.wait_for_function(
        "Bokeh.documents.length > 0 && Bokeh.documents[0].get_model_by_name('timeline') !== null"
    )
    page.wait_for_timeout(300)
    return complaints
