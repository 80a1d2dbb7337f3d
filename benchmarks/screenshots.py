"""Take the pictures of a report that the documentation shows.

python benchmarks/screenshots.py runs/demo-sweep --out docs/figures

needs Chromium and playwright. The run in the documentation is that of
rankwise sweep demo --methods flop-l0,fac --removed 0.6,0.8,0.9 --both.log_every 10
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from rankwise.lab.report.page import make_page, write_page

MARGIN = 16
SCRUBBED = 7
"""The moment of training at which the slider of the gates stands."""


def box(page: Page, *selectors: str) -> dict[str, float]:
    """The place of some elements together, with a margin."""
    script = (
        "selector => { const b = document.querySelector(selector).getBoundingClientRect(); return [b.top, b.bottom] }"
    )
    edges = [edge + page.evaluate("scrollY") for name in selectors for edge in page.evaluate(script, name)]
    top = max(0, min(edges) - MARGIN)
    return {"x": 0, "y": top, "width": page.viewport_size["width"], "height": max(edges) + MARGIN - top}  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "report.html"
        write_page(make_page(options.runs), file)
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for name, scheme, parts in (
            ("report-quality", "light", ("header", "#quality")),
            ("report-gates", "dark", ("#gates",)),
        ):
            page = browser.new_context(viewport={"width": 1000, "height": 900}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-drawn=yes]")
            slider = page.locator("#gates input[type=range]")
            slider.fill(str(min(SCRUBBED, int(slider.get_attribute("max") or 0))))
            slider.blur()
            # it would stay at the top of the window
            page.add_style_tag(content=".filters { position: static !important }")
            page.wait_for_timeout(300)
            options.out.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=options.out / f"{name}.png", full_page=True, clip=box(page, *parts))  # type: ignore[arg-type]
        browser.close()


if __name__ == "__main__":
    main()
