"""What all charts of a page share: colours by method, the look, and how one becomes a picture.

Colours are names of CSS (`var(--method-fac)`), so that a page changes them with the reader's light or dark theme and
prints light; a picture gets the light ones. `page.css` is where they are defined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

METHODS = ("flop-l0", "flop-agp", "fac", "np-l0", "agp", "svd", "width-l0", "width", "dense")
"""Methods with a colour of their own."""
OTHERS = 4
"""Colours for methods that a user added."""
SHAPES = ("circle", "square", "triangle-up", "diamond")
"""Marks of a method's variants, such as those that were distilled."""
WIDTH = 680
"""Pixels of a picture; on a page a chart is as wide as its place."""
SHOWN = "shown"
"""The parameter of every chart that holds the series to show."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
CONFIG: Mapping[str, Any] = {
    "background": "transparent",
    "font": FONT,
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--grid)", "gridWidth": 1,
        "domainColor": "var(--line)", "tickColor": "var(--line)", "tickSize": 4, "labelFontSize": 11,
        "titleFontSize": 11, "titleFontWeight": "normal", "titlePadding": 8, "labelPadding": 4,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False, "titleAnchor": "start", "titleAngle": 0, "titleAlign": "left",
              "titleX": 0, "titleY": -10, "titleBaseline": "bottom"},
    "legend": {"labelColor": "var(--text)", "titleColor": "var(--muted)", "labelFontSize": 11, "titleFontSize": 11,
               "titleFontWeight": "normal", "orient": "top", "symbolStrokeWidth": 0},
    "title": {"color": "var(--text)", "fontSize": 12, "fontWeight": 600, "anchor": "start", "offset": 10},
    "text": {"fontSize": 11},
}  # fmt: skip

Columns = dict[str, list[Any]]
"""A table of data, column by column: a third of the size of rows."""


@dataclass(frozen=True)
class Control:
    """A slider, or a choice, that sets a parameter of all charts of its figure."""

    signal: str
    label: str
    options: Sequence[str] = ()
    """What can be chosen; empty for a slider."""
    last: int = 0
    """The last place of a slider, which begins at 0 and stands there at first."""
    value: Any = None


@dataclass(frozen=True)
class Chart:
    """A specification of Vega-Lite, and how wide it may be on a page."""

    spec: Mapping[str, Any]
    width: int | None = None
    """At most so many pixels; None: as wide as its place."""
    about: str = ""
    """What it shows, for those who do not see it."""


@dataclass(frozen=True)
class Figure:
    """One or more charts under a title."""

    name: str
    """What files with its pictures are called."""
    title: str
    about: str
    charts: Sequence[Chart]
    controls: Sequence[Control] = ()
    columns: int = 1
    notes: Sequence[str] = field(default=())


def method_colour(method: str, known: Sequence[str]) -> str:
    """The colour of a method; `known` are all of a page: those without a colour of their own get one in turn."""
    if method in METHODS:
        return f"var(--method-{method})"
    others = [name for name in known if name not in METHODS]
    return f"var(--other-{others.index(method) % OTHERS})" if method in others else "var(--muted)"


def colour_scale(methods: Iterable[str]) -> dict[str, Any]:
    """A scale from methods to their colours."""
    known = list(dict.fromkeys(methods))
    return {"domain": known, "range": [method_colour(method, known) for method in known]}


def compact(columns: Columns) -> dict[str, Any]:
    """Columns as a page holds them: numbers with as many digits as a chart can show, words as places in a list."""
    found: dict[str, Any] = {}
    for name, values in columns.items():
        if values and isinstance(values[0], str):
            words = {word: place for place, word in enumerate(dict.fromkeys(values))}
            found[name] = {"words": list(words), "places": [words[word] for word in values]}
        else:
            found[name] = [_rounded(value) for value in values]
    return found


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    short = float(f"{value:.5g}")
    # a point and a zero less for each whole number
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def light_colours() -> dict[str, str]:
    """What the names of colours stand for in the light theme."""
    css = files("rankwise.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    root = css[css.index(":root") : css.index("}", css.index(":root"))]
    return dict(re.findall(r"(--[\w-]+):\s*(#[0-9a-fA-F]{3,8})", root))


def picture(chart: Chart, datasets: Mapping[str, Columns], form: str) -> bytes:
    """A chart as an SVG or PNG file, in the light theme."""
    import vl_convert

    colours = light_colours()
    names = re.findall(r'"data":\s*\{"name":\s*"([^"]+)"', json.dumps(chart.spec))
    rows = {name: [dict(zip(datasets[name], row, strict=True)) for row in zip(*datasets[name].values(), strict=True)]
            for name in names}  # fmt: skip
    whole = {**chart.spec, "config": {**CONFIG, "font": "sans-serif", "background": colours["--paper"]}}
    if whole.get("width") == "container":
        whole["width"] = min(chart.width or WIDTH, WIDTH)
    text = re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], json.dumps(whole))
    spec = {**json.loads(text), "datasets": rows}
    if form == "svg":
        svg: str = vl_convert.vegalite_to_svg(spec)
        return svg.encode()
    png: bytes = vl_convert.vegalite_to_png(spec, scale=2)
    return png
