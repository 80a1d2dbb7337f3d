"""What all benchmarks share: medians with spread, one CSV, hardware and versions in every row."""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import rankwise

RESULTS = Path(__file__).parent / "results.csv"
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


def record(benchmark: str, case: str, values: list[float], unit: str, goal: str = "") -> None:
    """Append the median of `values`, with its spread, to results.csv, and print it."""
    ordered = sorted(values)
    p20, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    row: dict[str, object] = dict(  # noqa: C408
        date=date.today().isoformat(),
        benchmark=benchmark,
        case=case,
        value=f"{statistics.median(values):.4g}",
        unit=unit,
        p20=f"{p20:.4g}",
        p80=f"{p80:.4g}",
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
    print(f"{benchmark:<12} {case:<44} {row['value']:>8} {unit:<6} [{row['p20']}, {row['p80']}]  {goal}", flush=True)


def write_record(file: Path | None, name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write measured rows as JSON, with what they were measured on; nothing without a file."""
    if file is None:
        return
    record = {
        "name": name,
        "settings": {key: value for key, value in settings.items() if not isinstance(value, Path)},
        "rows": rows,
        "seed": 0,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "rankwise": rankwise.__version__,
        "commit": commit(),
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def hardware() -> str:
    """The processor, and the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit that was measured, marked where the tree differs from it in more than these results."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=RESULTS.parent.parent)

    head = git("rev-parse", "--short", "HEAD").stdout.strip() if shutil.which("git") else ""
    if not head:
        return os.environ.get("RANKWISE_COMMIT", "unknown")
    same = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results.csv").returncode == 0
    return head if same else f"{head}-dirty"
