"""Reading the records of a folder of results."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import CheckpointError
from rankwise.lab.report import FORMATS
from rankwise.lab.report.comparison import cells

BENCHMARKS = "benchmarks"
"""The name under which the CSV of all benchmarks is found."""


def gate_cells(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(table, cell, histograms) of the models that show how gates decide, one for each table that has them."""
    for table, base, name in (
        ("enwik8-sru", "enwik8-sru", "flop-l0-80"),
        ("enwik8-transformer-xl", "enwik8-transformer-xl", "flop-l0-80"),
        ("words", "enwik8-words", "flop-l0-70"),
    ):
        for cell in cells(found.get(f"table-{table}"), base, name)[:1]:
            if "gates" in cell.row:
                yield table, name, cell.row["gates"]


def read_results(paths: Iterable[Path]) -> dict[str, Any]:
    """Records by name."""
    return {name_of(path, content): content for path, content in read_files(paths).items()}


def read_files(paths: Iterable[Path]) -> dict[Path, Any]:
    """What JSON and CSV files hold, given as such or by their folders; of a CSV file, its rows."""
    found: dict[Path, Any] = {}
    for path in _files(paths):
        try:
            found[path] = _read(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} must be a record of results, JSON or CSV, but is not: {error}.") from error
    return found


def name_of(path: Path, content: Any) -> str:
    """The name of a record: the stem of its file, or `BENCHMARKS`."""
    is_benchmarks = isinstance(content, list) and bool(content) and "benchmark" in content[0]
    return BENCHMARKS if is_benchmarks else path.stem


def is_run(content: Any) -> bool:
    """Whether it is a record that has a table of its own."""
    return isinstance(content, Mapping) and content.get("format") in FORMATS


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted((*path.glob("*.json"), *path.glob("*.csv"))) if path.is_dir() else (path,)


def _read(path: Path) -> Mapping[str, Any] | Sequence[Mapping[str, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("its outermost value is no object")
    return content
