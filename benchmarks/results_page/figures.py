"""Figures as SVG, written by hand: two kinds of them, and no drawing library to install."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from rankwise.lab.report.comparison import cells
from results_page.records import gate_cells
from results_page.sections import cluster_parameters

CELL, MARGIN, NAME = 12, 60, 220
"""Pixels of a bin, around a panel, and of the name of a matrix."""


@dataclass(frozen=True)
class Figure:
    """A picture of the results page."""

    name: str
    """The name of its file, without the suffix."""
    title: str
    of: str
    """The section it belongs to."""
    svg: str


def figures_of(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Every figure that the records have data for."""
    for table, name, gates in gate_cells(found):
        title = f"{table}, {name}: how far gates are open, over steps"
        yield Figure(f"gates-{table}", title, "How gates decide", gate_figure(title, gates))
    levels = {level: cells(found.get("table-words"), "enwik8-words", f"flop-l0-{level}") for level in (50, 70, 80)}
    by_level = {level: cluster_parameters(own[0].row["matrices"]) for level, own in levels.items() if own}
    if by_level:
        title = "parameters of each part of a word-level model"
        yield Figure("word-clusters", title, "Word clusters", cluster_figure(title, by_level))


def gate_figure(title: str, gates: Mapping[str, Any]) -> str:
    """A panel per matrix: time to the right, gates from closed (below) to open (above), darker where there are more."""
    steps, parts, left = gates["steps"], [], MARGIN
    for name, histograms in gates["histograms"].items():
        bins = len(histograms[0])
        parts.append(_text(left, MARGIN - 8, name))
        for i, counts in enumerate(histograms):
            for j, count in enumerate(counts):
                if count:
                    # a root, so that a few gates in between are seen
                    shade = (count / sum(counts)) ** 0.5
                    parts.append(_box(left + i * CELL, MARGIN + (bins - 1 - j) * CELL, CELL, CELL, opacity=shade))
        bottom = MARGIN + bins * CELL
        parts += [_frame(left, MARGIN, len(steps) * CELL, bins * CELL)]
        parts += [_text(left, bottom + 16, f"step {steps[0]:,}"), _text(left, bottom + 32, f"to {steps[-1]:,}")]
        parts += [_text(left - 34, MARGIN + 10, "open"), _text(left - 44, bottom, "closed")]
        left += max(len(steps) * CELL, NAME) + 2 * MARGIN
    return _svg(left - MARGIN, bottom + MARGIN, [_text(MARGIN, 24, title), *parts])


def cluster_figure(title: str, by_level: Mapping[int, Mapping[str, Sequence[int]]]) -> str:
    """A group of bars per part of the model: dense in outline, then what is kept at each size."""
    height, bar = 200, 22
    largest = max(dense for of_level in by_level.values() for dense, _ in of_level.values())
    parts, left, bottom = [_text(MARGIN, 24, title)], float(MARGIN), MARGIN + height
    for name in next(iter(by_level.values())):
        first = left
        for place, (level, of_level) in enumerate(by_level.items()):
            dense, kept = of_level[name]
            tall = height * kept / largest
            outline = height * dense / largest
            parts += [_frame(left, bottom - outline, bar - 2, outline), _box(left, bottom - tall, bar - 2, tall)]
            parts.append(_text(left, bottom + 14 + 12 * (place % 2), f"{level}%"))
            left += bar
        parts.append(_text(first, bottom - outline - 6, f"{dense / 1e6:.2f}M"))
        parts.append(_text(first, bottom + 44, name))
        left += 70
    return _svg(left, bottom + MARGIN, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" font-family="sans-serif" '
    return "\n".join(
        [head + 'font-size="12">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""]
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, *, opacity: float = 1.0) -> str:
    size = f'width="{width:g}" height="{height:.1f}"'
    return f'<rect x="{x:g}" y="{y:.1f}" {size} fill="#1f4e79" fill-opacity="{opacity:.3f}"/>'


def _frame(x: float, y: float, width: float, height: float) -> str:
    return f'<rect x="{x:g}" y="{y:.1f}" width="{width:g}" height="{height:.1f}" fill="none" stroke="#888"/>'
