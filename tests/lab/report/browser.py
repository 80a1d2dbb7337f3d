"""Debian's Chromium for the tests of pages; they skip where it is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DRAWN = "html[data-drawn=yes]"
"""What a page is when all of its figures are drawn."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window, with an empty profile."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A page in a browser, and all that it says and asks for."""

    def __init__(self, browser: Any, place: Path | str, ready: str = DRAWN, **settings: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **settings})
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(place.as_uri() if isinstance(place, Path) else place)
        self.page.wait_for_selector(ready, timeout=60_000)

    def marks(self, figure: str) -> list[int]:
        """How many marks each chart of a figure has that take up room on the screen."""
        script = """figure => [...document.querySelectorAll(`[data-figure="${figure}"] .chart`)].map(chart =>
            [...chart.querySelectorAll('.role-mark path, .role-mark text, .role-mark line')].filter(mark => {
                const box = mark.getBoundingClientRect();
                return box.width + box.height > 0 && getComputedStyle(mark).visibility !== 'hidden';
            }).length)"""
        found: list[int] = self.page.evaluate(script, figure)
        return found

    def text(self, selector: str) -> str:
        """The words of all elements of that kind."""
        return "\n".join(self.page.locator(selector).all_text_contents())
