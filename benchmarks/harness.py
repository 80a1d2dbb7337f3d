"""What all benchmarks share: medians with spread, one CSV, hardware and versions in every row."""

from __future__ import annotations

import csv
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

import rankwise
from rankwise.files import write_json
from rankwise.surroundings import surroundings

RESULTS = Path(os.environ.get("RANKWISE_BENCHMARKS_CSV") or Path(__file__).parent / "results.csv")
COLUMNS = [
    "date",
    "benchmark",
    "case",
    "value",
    "unit",
    "p20",
    "p80",
    "repeats",
    "goal",
    "hardware",
    "threads",
    "torch",
    "rankwise",
    "commit",
]


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Wall-clock times of several functions, taken in turn so that a slow spell of the machine meets them all.

    The first round is a warm-up and is not kept.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            times[name].append(_once(function))
    return {name: taken[1:] for name, taken in times.items()}


def _once(function: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    function()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and between which values the middle three fifths are."""
    ordered = sorted(values)
    p20, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return {"median": statistics.median(ordered), "p20": p20, "p80": p80}


def record(benchmark: str, case: str, values: Sequence[float], unit: str, goal: str = "", *, keep: bool = True) -> None:
    """Print the median of `values` with its spread, and append it to results.csv."""
    found = {name: f"{value:.4g}" for name, value in spread(values).items()}
    print(
        f"{benchmark:<12} {case:<44} {found['median']:>8} {unit:<6} [{found['p20']}, {found['p80']}]  {goal}",
        flush=True,
    )
    if not keep:
        return
    row: dict[str, object] = dict(  # noqa: C408
        date=date.today().isoformat(),
        benchmark=benchmark,
        case=case,
        value=found["median"],
        unit=unit,
        p20=found["p20"],
        p80=found["p80"],
        repeats=len(values),
        goal=goal,
        hardware=hardware(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        rankwise=rankwise.__version__,
        commit=commit(),
    )
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


class Record:
    """A JSON file of measured rows, written again after each; the same command goes on with what is missing.

    Rows of other settings, another commit or other hardware are replaced. Without a file nothing is kept.
    """

    def __init__(self, file: Path | None, name: str, settings: Mapping[str, Any]) -> None:
        self.file = file
        self.about = {
            "name": name,
            "settings": {key: value for key, value in settings.items() if not isinstance(value, Path)},
            "seed": 0,
            "hardware": hardware(),
            "torch": torch.__version__,
            "transformers": _surroundings()["versions"].get("transformers"),
            "rankwise": rankwise.__version__,
            "commit": commit(),
        }
        self.rows: list[dict[str, Any]] = []
        if file is not None and file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if all(before.get(key) == value for key, value in self.about.items()):
                self.rows = before["rows"]

    def row(self, name: str) -> dict[str, Any] | None:
        """The row of a name, if it was measured before."""
        return next((row for row in self.rows if row["name"] == name), None)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in the place of an earlier one of its name."""
        names = [each["name"] for each in self.rows]
        if row["name"] in names:
            self.rows[names.index(row["name"])] = row
        else:
            self.rows.append(row)
        if self.file is not None:
            write_json(self.file, {**self.about, "date": date.today().isoformat(), "rows": self.rows})


@cache
def _surroundings() -> dict[str, Any]:
    return surroundings(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def hardware() -> str:
    """The GPU if there is one, and else the processor."""
    found: dict[str, str] = _surroundings()["hardware"]
    return found["processor"] if found["device"] == "cpu" else found["device"]


def commit() -> str:
    """The commit of what was measured, marked where the library differs from it."""
    return _surroundings()["commit"] or "unknown"
