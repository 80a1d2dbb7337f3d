"""Draw the picture of the README: what is lost on enwik8 at each size, in the paper and here.

python benchmarks/picture.py results docs/figures/enwik8-sru.svg
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_page.records import read_results

from rankwise.lab.report.comparison import cells
from rankwise.lab.report.paper import ENWIK8_SRU

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 560, 70, 340
"""The frame of the plot, in pixels."""
LINE = 18
"""Least distance of two labels, in pixels."""
LEVELS = (70, 80, 90)
HIGHEST = 12
"""Top of the vertical axis, in percent."""
METHODS = (
    ("np-l0", "NP-L0", "np-l0", "np-l0-{}"),
    ("agp", "AGP (unstructured)", "agp", "agp-{}"),
    ("flop", "FLOP-L0", "flop-l0", "flop-l0-{}"),
    ("distilled", "FLOP-L0, distilled", None, "flop-l0-{}-distilled"),
)
"""CSS class, label, the paper's method and our cells."""
STYLE = """<style>
  svg { font-family: sans-serif; font-size: 13px; }
  .background { fill: #ffffff; } .ink { fill: #24292f; } .muted { fill: #57606a; } .grid { stroke: #d0d7de; }
  .np-l0 { color: #bc4c00; } .agp { color: #1a7f37; } .flop { color: #0969da; } .distilled { color: #8250df; }
  @media (prefers-color-scheme: dark) {
    .background { fill: #0d1117; } .ink { fill: #e6edf3; } .muted { fill: #9198a1; } .grid { stroke: #3d444d; }
    .np-l0 { color: #f0883e; } .agp { color: #3fb950; } .flop { color: #58a6ff; } .distilled { color: #bc8cff; }
  }
  .line { stroke: currentColor; stroke-width: 2.5; fill: none; } .dot { fill: currentColor; }
  .label { fill: currentColor; }
  .paper .line { stroke-width: 1.5; stroke-dasharray: 5 4; }
  .paper .dot { fill: none; stroke: currentColor; stroke-width: 1.5; }
</style>"""


@dataclass(frozen=True)
class Series:
    """What one method loses, in percent of its own dense model's bits per character, by percent removed."""

    css: str
    label: str
    paper: bool
    lost: Mapping[int, float]


def series(record: Mapping[str, Any], plain: Mapping[str, Any]) -> Iterator[Series]:
    """The paper's figures and the means of ours; `plain` holds the models without factorization, which NP-L0 prunes."""
    for css, label, method, name in METHODS:
        if method is not None:
            printed = {level: ENWIK8_SRU.lost(level, method) for level in LEVELS}
            yield Series(css, label, True, {level: 100 * lost for level, lost in printed.items() if lost is not None})
        source = (plain, "enwik8-sru-plain-1536") if method == "np-l0" else (record, "enwik8-sru")
        found = {
            level: [cell.lost("bits_per_character") for cell in cells(*source, name.format(level))] for level in LEVELS
        }
        measured = {level: [lost for lost in losses if lost is not None] for level, losses in found.items()}
        yield Series(css, label, False, {level: 100 * statistics.mean(own) for level, own in measured.items() if own})


def draw(lines: Sequence[Series]) -> str:
    """One line per series; solid and filled is ours, dashed and hollow the paper's. Labels stand at the right end."""
    parts = [STYLE, '<rect class="background" width="100%" height="100%"/>']
    parts.append(_text(LEFT - 40, 26, "35M SRU on enwik8: increase in bits per character after pruning", "ink", "bold"))
    parts.append(
        _text(LEFT - 40, 46, "each against its own dense model; solid: measured here, dashed: the paper", "muted")
    )
    for percent in range(0, HIGHEST + 1, 2):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{_y(percent):g}" y2="{_y(percent):g}"/>')
        parts.append(_text(LEFT - 40, _y(percent) + 4, f"+{percent}%" if percent else "0%", "muted"))
    for level in LEVELS:
        parts.append(_text(_x(level) - 42, BOTTOM + 24, f"{level}% removed", "ink"))
    label_y = 0.0
    for one in lines:
        points = [(_x(level), _y(lost)) for level, lost in sorted(one.lost.items())]
        path = " ".join(f"{x:g},{y:.1f}" for x, y in points)
        parts.append(f'<g class="{one.css}{" paper" if one.paper else ""}"><polyline class="line" points="{path}"/>')
        parts += [f'<circle class="dot" cx="{x:g}" cy="{y:.1f}" r="4"/>' for x, y in points]
        if not one.paper:
            # from the top down, so that a label can only push those below it
            label_y = max(label_y + LINE, points[-1][1] + 4)
            parts.append(_text(points[-1][0] + 12, label_y, one.label, "label"))
        parts.append("</g>")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    return "\n".join([head, *parts, "</svg>", ""])


def picture(found: Mapping[str, Any]) -> str:
    """The SVG, from the records of `results/`."""
    return draw(list(series(found["table-enwik8-sru"], found["table-np-l0"])))


def _x(level: int) -> float:
    return LEFT + 50 + (RIGHT - LEFT - 100) * (level - LEVELS[0]) / (LEVELS[-1] - LEVELS[0])


def _y(percent: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * percent / HIGHEST


def _text(x: float, y: float, words: str, css: str, weight: str = "normal") -> str:
    return f'<text class="{css}" x="{x:g}" y="{y:.1f}" font-weight="{weight}">{words}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, help="the folder of results")
    parser.add_argument("out", type=Path, help="the SVG file")
    options = parser.parse_args()
    options.out.write_text(picture(read_results([options.records])), encoding="utf-8")


if __name__ == "__main__":
    main()
