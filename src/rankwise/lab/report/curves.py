"""The metrics of one training, thinned out: what a curve on a page can show, with its extremes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

METRICS = "metrics.jsonl"
GATES = "gates"
"""The key of histograms in a line of metrics."""
SIZES = ("expected_size", "target_size")
LOSSES = ("loss", "valid_loss")
SPEEDS = ("tokens_per_second", "examples_per_second")

WINDOWS, MOST_MEDIAN = 10, 101
"""A median is over a tenth of a curve, but never over more points."""

Curve = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps and values."""


@dataclass(frozen=True)
class Metrics:
    """Curves by name, and histograms of gates: at which steps, and the counts of each matrix."""

    curves: Mapping[str, Curve]
    gate_steps: tuple[int, ...] = ()
    gates: Mapping[str, list[list[int]]] | None = None
    broken: int = 0
    """Lines that could not be read."""
    seconds: float = 0.0
    """Training time at the last line."""

    @property
    def last_step(self) -> int:
        return max((int(steps[-1]) for steps, _ in self.curves.values()), default=0)


def read_metrics(path: Path, limit: int) -> Metrics:
    """The metrics in a file, at most about `limit` points of each curve."""
    lines, broken = _lines(path.read_bytes())
    steps = np.asarray([line["step"] for line in lines], np.int64)
    curves = {}
    for name in (*LOSSES, *SIZES, *SPEEDS):
        values = _numbers([line.get(name) for line in lines])
        known = np.isfinite(values)
        if known.any():
            reduce = medians if name in SPEEDS else thinned
            curves[name] = reduce(steps[known], values[known], limit)
    steps_of_gates, gates = _histograms(line for line in lines if GATES in line)
    seconds = next((line["seconds"] for line in reversed(lines) if _is_number(line.get("seconds"))), 0.0)
    return Metrics(curves, steps_of_gates, gates or None, broken, float(seconds))


def _numbers(values: list[Any]) -> NDArray[np.float64]:
    """Values as numbers; NaN where there is none."""
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError):
        return np.asarray([value if _is_number(value) else np.nan for value in values], np.float64)


def medians(steps: NDArray[np.int64], values: NDArray[np.float64], limit: int) -> Curve:
    """The median of the surroundings of `limit` points, each a tenth of the whole, or 101 points."""
    width = min(len(values) // WINDOWS, MOST_MEDIAN) | 1
    padded = np.pad(values, width // 2, mode="symmetric")
    places = np.unique(np.linspace(0, len(steps) - 1, min(limit, len(steps))).round().astype(int))
    found: NDArray[np.float64] = np.median(np.lib.stride_tricks.sliding_window_view(padded, width)[places], axis=1)
    return steps[places], found


def thinned(steps: NDArray[np.int64], values: NDArray[np.float64], limit: int) -> Curve:
    """The first and the last point of a curve, and of each of `limit` / 2 parts the lowest and the highest."""
    if len(steps) <= limit:
        return steps, values
    edges = np.linspace(0, len(steps), max(limit // 2, 1) + 1).astype(int)
    kept = {0, len(steps) - 1}
    for first, last in pairwise(edges):
        if last > first:
            part = values[first:last]
            kept |= {int(first + part.argmin()), int(first + part.argmax())}
    places = np.asarray(sorted(kept))
    return steps[places], values[places]


def _lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines that hold metrics, and how many others there are. Only a line that ends is complete."""
    texts = content.split(b"\n")[:-1]
    try:
        # all at once is several times as fast as line by line
        found = json.loads(b"[" + b",".join(texts) + b"]")
    except ValueError:
        found = [_parsed(text) for text in texts]
    lines = [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]
    return lines, len(texts) - len(lines)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _histograms(lines: Iterable[Mapping[str, Any]]) -> tuple[tuple[int, ...], dict[str, list[list[int]]]]:
    """Steps, and the histograms of every matrix that has one at each of them."""
    steps, found = [], []
    for line in lines:
        counts = line[GATES]
        if isinstance(counts, dict) and all(_is_histogram(each) for each in counts.values()):
            steps.append(line["step"])
            found.append(counts)
    names = [name for name in (found[0] if found else ()) if all(name in counts for counts in found)]
    return tuple(steps), {name: [counts[name] for counts in found] for name in names}


def _is_histogram(counts: Any) -> bool:
    return isinstance(counts, list) and bool(counts) and all(isinstance(n, int) and n >= 0 for n in counts)
