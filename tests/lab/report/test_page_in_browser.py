"""The page in a real browser: every figure drawn, nothing loaded; by keyboard, in both themes, on a phone, on paper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.lab.report.page import make_page, write_page
from tests.lab.report.browser import DRAWN, Tab, chromium

MARKUP = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def file(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of all toys, and of a place that does not exist."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    names = ("sweep", "words", "attention", "compressed", "gone")
    write_page(make_page([runs / name for name in names]), file)
    return file


@pytest.fixture
def tab(browser: Any, file: Path) -> Iterator[Tab]:
    """The page, about which the browser must have nothing to say at the end."""
    tab = Tab(browser, file)
    yield tab
    assert tab.said == []
    assert set(tab.asked) == {file.as_uri()}
    tab.context.close()


def figures(tab: Tab) -> list[str]:
    found: list[str] = tab.page.evaluate("[...document.querySelectorAll('[data-figure]')].map(f => f.dataset.figure)")
    return found


def test_every_figure_is_drawn(tab: Tab) -> None:
    assert {"quality", "network", "parts", "gates", "sizes", "loss", "speed"} <= set(figures(tab))
    for name in figures(tab):
        counts = tab.marks(name)
        assert counts and all(counts), (name, counts)


def test_what_could_not_be_read_is_named(tab: Tab) -> None:
    assert "gone does not exist" in tab.text(".problems")


def test_gates_are_scrubbed_by_keyboard(tab: Tab) -> None:
    titles = '[data-figure="gates"] .chart:nth-child(-n+2) svg text'
    last = tab.text(titles)
    tab.page.locator('[data-figure="gates"] input[type=range]').focus()
    tab.page.keyboard.press("ArrowLeft")
    tab.page.wait_for_timeout(200)
    before = tab.text(titles)
    tab.page.keyboard.press("Home")
    tab.page.wait_for_timeout(200)
    first = tab.text(titles)
    assert len({last, before, first}) == 3
    assert "step 1" in first
    tab.page.keyboard.press("End")
    tab.page.wait_for_timeout(200)
    assert tab.text(titles) == last


def test_a_series_is_switched_off_and_on_by_keyboard(tab: Tab) -> None:
    box = tab.page.locator('.filters input[value="fac"]')
    names = ("quality", "parts", "loss")
    before = {name: sum(tab.marks(name)) for name in names}
    box.focus()
    tab.page.keyboard.press("Space")
    tab.page.wait_for_timeout(300)
    without = {name: sum(tab.marks(name)) for name in names}
    assert all(without[name] < before[name] for name in names)
    tab.page.keyboard.press("Space")
    tab.page.wait_for_timeout(300)
    assert {name: sum(tab.marks(name)) for name in names} == before


def test_another_model_is_chosen_by_keyboard(tab: Tab) -> None:
    cells = '[data-figure="network"] svg .role-mark text'
    before = tab.text(cells)
    tab.page.locator('[data-figure="network"] select').focus()
    tab.page.keyboard.press("End")
    tab.page.wait_for_timeout(200)
    assert tab.text(cells) not in ("", before)


def test_all_controls_are_reached_by_tab_and_have_a_name(tab: Tab) -> None:
    wanted = tab.page.locator("input, select, button").count()
    names = set()
    for _ in range(wanted + 40):
        tab.page.keyboard.press("Tab")
        script = (
            "e => { const a = document.activeElement; return [[...document.querySelectorAll('input, select, button')]"
        )
        place, name = tab.page.evaluate(f"{script}.indexOf(a), (a.labels?.[0] || a).textContent.trim()]; }}")
        if place >= 0:
            assert name
            names.add(place)
    assert names == set(range(wanted))


def colours(tab: Tab) -> tuple[str, str, str]:
    script = """() => [getComputedStyle(document.documentElement).backgroundColor,
        getComputedStyle(document.querySelector('h1')).color,
        getComputedStyle(document.querySelector('[data-figure="quality"] .mark-symbol path')).fill]"""
    page, text, mark = tab.page.evaluate(script)
    return page, text, mark


def brightness(colour: str) -> float:
    return sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3]) / 3


def test_dark_is_dark_and_paper_is_light(browser: Any, file: Path, tab: Tab) -> None:
    light = colours(tab)
    dark = Tab(browser, file, color_scheme="dark")
    page, text, mark = colours(dark)
    assert brightness(light[0]) > 200 > 100 > brightness(page)
    assert brightness(light[1]) < 100 < 200 < brightness(text)
    assert mark != light[2] and mark.startswith("rgb(")
    dark.page.emulate_media(media="print")
    assert brightness(colours(dark)[0]) > 200 and colours(dark)[2] == light[2]
    assert not dark.page.locator(".filters").is_visible() and not dark.page.locator(".controls").first.is_visible()
    assert dark.page.pdf().startswith(b"%PDF")
    assert dark.said == []
    dark.context.close()


def test_a_phone_shows_everything_without_scrolling_sideways(browser: Any, file: Path) -> None:
    phone = Tab(browser, file, viewport={"width": 400, "height": 800})
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 400
    widths = phone.page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(s => s.getBoundingClientRect().right)"
    )
    assert max(widths) <= 400
    for name in figures(phone):
        assert all(phone.marks(name)), name
    assert phone.said == []
    phone.context.close()


def test_names_with_markup_are_words(browser: Any, runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / "words" / "record.json").read_text())
    record["rows"][1] |= {"name": MARKUP, "method": MARKUP, "ranks": {MARKUP: [4, 4, 2, 4]}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    write_page(make_page([tmp_path / "record.json"]), tmp_path / "page.html")
    tab = Tab(browser, tmp_path / "page.html")
    assert tab.page.locator("img").count() == 0
    tab.page.locator('[data-figure="network"] svg .mark-text text').first.hover()
    tab.page.wait_for_selector("#vg-tooltip-element.visible")
    assert MARKUP in tab.text("#vg-tooltip-element")
    assert MARKUP in tab.text("tbody th")
    assert tab.said == []
    tab.context.close()


def test_a_page_that_is_kept_fresh_stands_as_the_reader_left_it(browser: Any, runs: Path, tmp_path: Path) -> None:
    file, page = tmp_path / "live.html", make_page([runs / "words"])
    write_page(page, file, reload_seconds=2)
    tab = Tab(browser, file)
    tab.page.locator('.filters input[value="dense"]').uncheck()
    tab.page.locator('[data-figure="gates"] input[type=range]').focus()
    tab.page.keyboard.press("Home")
    # the run is finished: the last page does not load itself any more
    write_page(page, file)
    tab.page.wait_for_selector(f"{DRAWN}:not([data-live])", timeout=30_000)
    assert not tab.page.locator('.filters input[value="dense"]').is_checked()
    assert tab.page.locator('[data-figure="gates"] input[type=range]').input_value() == "0"
    assert "step 1" in tab.text('[data-figure="gates"] .chart:nth-child(-n+2) svg text')
    assert tab.said == []
    tab.context.close()
