"""Draw the diagrams of how-it-works.md: python docs/diagrams.py docs/figures

Curves are computed with the library's own functions; a test compares the files with what is drawn here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from rankwise.core.gates import HardConcrete
from rankwise.core.optim import SCHEDULES

STYLE = """<style>
  svg { font-family: sans-serif; font-size: 13px; }
  .background { fill: #ffffff; } .ink { fill: #24292f; } .muted { fill: #57606a; } .grid { stroke: #d0d7de; }
  .kept { fill: #0969da; } .closed { fill: #d8dee4; } .box { fill: #f6f8fa; stroke: #57606a; }
  .one { color: #0969da; } .two { color: #8250df; } .three { color: #bc4c00; } .rule { stroke: #57606a; }
  @media (prefers-color-scheme: dark) {
    .background { fill: #0d1117; } .ink { fill: #e6edf3; } .muted { fill: #9198a1; } .grid { stroke: #3d444d; }
    .kept { fill: #58a6ff; } .closed { fill: #30363d; } .box { fill: #161b22; stroke: #9198a1; }
    .one { color: #58a6ff; } .two { color: #bc8cff; } .three { color: #f0883e; } .rule { stroke: #9198a1; }
  }
  .line { stroke: currentColor; stroke-width: 2.5; fill: none; } .bar, .label { fill: currentColor; }
</style>"""
KEPT = (0, 2, 3, 6)
"""Components of the picture of a matrix that are kept, of `RANK`."""
RANK = 8
ALPHAS = (("one", 3.0), ("two", 0.0), ("three", -4.0))
"""CSS class and alpha of the gates whose densities are drawn."""
REMOVED = 0.8
RAMP = 0.25
"""Share of the steps in which the target falls."""


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, STYLE, '<rect class="background" width="100%" height="100%"/>', *parts, "</svg>", ""])


def text(x: float, y: float, words: str, css: str = "ink", anchor: str = "start", weight: str = "normal") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, css: str) -> str:
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def rule(x1: float, y1: float, x2: float, y2: float, css: str = "grid") -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def curve(points: Sequence[tuple[float, float]], css: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<g class="{css}"><polyline class="line" points="{joined}"/></g>'


def factors() -> str:
    """W = P diag(z) Q: a column of P and a row of Q are one component, which its gate keeps or drops."""
    outputs, inputs, step, top = 160, 200, 16, 70
    parts = [text(20, 28, "W = P diag(z) Q: each gate keeps or drops a column of P and a row of Q", weight="bold")]
    parts += [rect(20, top, inputs, outputs, "kept"), text(120, top + outputs + 22, "W, out x in", "muted", "middle")]
    parts += [text(250, top + 85, "=", anchor="middle"), text(440, top + 85, "×", anchor="middle")]
    left, middle, right = 280, 460, 640
    for k in range(RANK):
        css = "kept" if k in KEPT else "closed"
        parts.append(rect(left + k * step, top, step - 3, outputs, css))
        parts.append(rect(middle + k * step, top + 16 + k * step, step - 3, step - 3, css))
        parts.append(rect(right, top + 16 + k * step, inputs, step - 3, css))
    parts.append(text(left + RANK * step / 2, top + outputs + 22, "P, out x r", "muted", "middle"))
    parts.append(text(middle + RANK * step / 2, top + outputs + 22, "diag(z)", "muted", "middle"))
    parts.append(text(615, top + 85, "×", anchor="middle"))
    parts.append(text(right + inputs / 2, top + outputs + 22, "Q, r x in", "muted", "middle"))
    kept = f"grey: z = 0. After pruning {len(KEPT)} of {RANK} components are left: two smaller matrices, no z."
    return svg(860, 290, [*parts, text(20, top + outputs + 48, kept, "muted")])


def hard_concrete() -> str:
    """The density of z inside (0, 1), and the probabilities of exactly 0 and exactly 1."""
    gate, left, bottom, width, height = HardConcrete(), 90, 300, 480, 220
    x, y = (lambda z: left + width * z), (lambda value: bottom - height * value)
    parts = [text(20, 28, "A gate z while the model trains: often exactly 0 or exactly 1", weight="bold")]
    parts.append(text(20, 48, "bars: probability of exactly 0 and of exactly 1; lines: density in between", "muted"))
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += [rule(left - 40, y(value), left + width + 60, y(value)), text(14, y(value) + 4, f"{value:g}", "muted")]
    for value in (0.0, 0.5, 1.0):
        parts.append(text(x(value), bottom + 22, f"z = {value:g}", "muted", "middle"))
    for place, (css, alpha) in enumerate(ALPHAS):
        shut = 1 - gate.open_probability(torch.tensor(alpha)).item()
        full = 1 - below(gate, alpha, 1.0)
        shift = 11 * place
        parts.append(f'<g class="{css}">{rect(x(0) - 38 + shift, y(shut), 9, bottom - y(shut), "bar")}')
        parts.append(f"{rect(x(1) + 10 + shift, y(full), 9, bottom - y(full), 'bar')}")
        parts.append(
            text(left + width + 75, 110 + 24 * place, f"alpha = {alpha:g}: P(z = 0) = {shut:.2f}", "label") + "</g>"
        )
        points = [i / 200 for i in range(1, 200)]
        # a line ends where it leaves the frame
        inside = [(z, value) for z in points if (value := density(gate, alpha, z)) <= 1.05]
        parts.append(curve([(x(z), y(value)) for z, value in inside], css))
    return svg(860, 340, parts)


def below(gate: HardConcrete, alpha: float, z: float) -> float:
    """P(stretched sample < z): z = (r - l) s + l with s = sigmoid((logit u + alpha) / beta), u uniform."""
    s = (z + gate.stretch) / (1 + 2 * gate.stretch)
    return 1 / (1 + math.exp(alpha - gate.temperature * math.log(s / (1 - s))))


def density(gate: HardConcrete, alpha: float, z: float) -> float:
    """The derivative of `below`."""
    s = (z + gate.stretch) / (1 + 2 * gate.stretch)
    p = below(gate, alpha, z)
    return p * (1 - p) * gate.temperature / (s * (1 - s)) / (1 + 2 * gate.stretch)


def ramp() -> str:
    """The target size over the steps of a run, for both schedules."""
    left, bottom, width, height = 90, 290, 560, 210
    x, y = (lambda share: left + width * share), (lambda size: bottom - height * size)
    parts = [text(20, 28, f"The target size of a run that removes {REMOVED:.0%}", weight="bold")]
    parts.append(
        text(20, 48, "the multipliers push the expected size to it while the loss trains the weights", "muted")
    )
    for size in (0.0, 0.2, 0.6, 1.0):
        parts += [rule(left, y(size), left + width, y(size)), text(30, y(size) + 4, f"{size:.0%}", "muted")]
    for css, name, row in (("one", "cubic", 0), ("two", "linear", 1)):
        steps = [i / 200 for i in range(201)]
        sizes = [1 - REMOVED * SCHEDULES[name](round(1000 * step), round(1000 * RAMP)) for step in steps]
        parts.append(curve([(x(step), y(size)) for step, size in zip(steps, sizes, strict=True)], css))
        label = f"{name}{', the default' if row == 0 else ''}"
        parts.append(f'<g class="{css}">{text(left + width + 20, 100 + 24 * row, label, "label")}</g>')
    parts.append(rule(x(RAMP), y(1.0), x(RAMP), bottom, "rule"))
    parts.append(text(x(RAMP / 2), bottom + 22, "ramp (anneal_steps)", "muted", "middle"))
    parts.append(text(x((1 + RAMP) / 2), bottom + 22, "the choice is fixed; the rest trains on", "muted", "middle"))
    return svg(860, 330, parts)


BOXES = (
    ("dense", "any nn.Module", "Pruner(model, budget)"),
    ("gated", "W = P diag(z) Q", "loss.backward(); optimizer.step(); pruner.step()"),
    ("compact", "plain layers, exact size", "pruner.compact()"),
    ("deployed", "PyTorch, vLLM, ONNX, ...", "save, save_pretrained, export"),
)


def life() -> str:
    """What a model goes through."""
    parts, width, gap, top = [text(20, 28, "The life of a model", weight="bold")], 182, 28, 50
    for place, (name, what, call) in enumerate(BOXES):
        x = 20 + place * (width + gap)
        parts += [rect(x, top, width, 62, "box"), text(x + width / 2, top + 26, name, anchor="middle", weight="bold")]
        parts.append(text(x + width / 2, top + 47, what, "muted", "middle"))
        for line, words in enumerate(call.split("; ")):
            parts.append(text(x + width / 2, top + 86 + 18 * line, words, "ink", "middle"))
        if place:
            parts += [rule(x - gap + 4, top + 31, x - 6, top + 31, "rule")]
            tip = f"{x - 12:.1f},{top + 26} {x - 3:.1f},{top + 31} {x - 12:.1f},{top + 36}"
            parts.append(f'<polygon class="muted" points="{tip}"/>')
    return svg(860, 200, parts)


DIAGRAMS = {"factors": factors, "hard-concrete": hard_concrete, "ramp": ramp, "life": life}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (Path(sys.argv[1]) / f"{name}.svg").write_text(draw())
