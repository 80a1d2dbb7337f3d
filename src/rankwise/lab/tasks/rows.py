"""Rows of one's own: CSV, TSV or JSONL with text and label columns; a bad row is named by its line."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.errors import DataError, nearest
from rankwise.lab.data.glue import Dataset, Rows
from rankwise.lab.data.glue.tasks import Task
from rankwise.lab.data.text import reason

DELIMITERS = {".csv": ",", ".tsv": "\t"}
LINES = (".jsonl", ".ndjson", ".json")
MOST_CLASSES = 1_000
"""More different labels than that are taken for a mistake."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of the texts and of the label."""

    texts: tuple[str, ...]
    label: str
    regression: bool


def read_table(path: Path, columns: Columns, further: Sequence[str | None]) -> tuple[Dataset, list[Rows | None]]:
    """The training rows of a file, and the rows of further files, with the labels that the training rows have.

    Classes are numbered in the order of their names, numbers by their value.
    """
    table = list(_rows(path, columns))
    if not table:
        raise DataError(f"{path} must hold at least one row, but has none.")
    names = [] if columns.regression else _classes(path, table)
    files = [path, *(Path(name) for name in further if name is not None)]
    tables = {file: table if file == path else list(_rows(file, columns)) for file in files}
    for file, found in tables.items():
        if not found:
            raise DataError(f"{file} must hold at least one row, but has none.")
    rows = {file: _numbered(file, found, names) for file, found in tables.items()}
    task = Task(
        name=path.stem,
        title=path.name,
        texts=columns.texts,
        label=columns.label,
        labels=tuple(names),
        metrics=("spearman", "pearson") if columns.regression else ("accuracy",),
        train_rows=len(table),
    )
    digest = hashlib.sha256()
    for part in rows.values():
        for texts, label in zip(part.texts, part.labels, strict=True):
            digest.update(json.dumps([*texts, label]).encode())
    train = rows[path]
    dataset = Dataset(task=task, title=path.name, train=train, dev=train, fingerprint=digest.hexdigest())
    return dataset, [None if name is None else rows[Path(name)] for name in further]


Row = tuple[int, tuple[str, ...], str]
"""The line, the texts and the label of a row."""


def _rows(path: Path, columns: Columns) -> Iterator[Row]:
    wanted = (*columns.texts, columns.label)
    for number, row in _records(path):
        for name in wanted:
            if name not in row or row[name] is None:
                known = ", ".join(map(str, row))
                raise DataError(
                    f"{path}, line {number}: a row must have the column {name!r}, but has {known or 'none'}."
                    f"{nearest(name, map(str, row))} Name it by --text_column and --label_column."
                )
        *texts, label = (row[name] for name in wanted)
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"{path}, line {number}: a text must be a string, but is {text!r} instead.")
        yield number, tuple(texts), str(label).strip()


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file by column, with the numbers of their lines."""
    suffix = path.suffix.lower()
    if suffix not in (*DELIMITERS, *LINES):
        raise DataError(f"A file of rows must end in {', '.join((*DELIMITERS, *LINES))}, but is {path.name!r}.")
    try:
        # a byte-order mark at the start is no part of the text
        with path.open(encoding="utf-8-sig", newline="") as file:
            if suffix in DELIMITERS:
                reader = csv.DictReader(file, delimiter=DELIMITERS[suffix], strict=True)
                for row in reader:
                    yield reader.line_num, {name: value for name, value in row.items() if name is not None}
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except OSError as error:
        raise DataError(f"{path} must be a readable file, but: {reason(error)}. Check its name and rights.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8, but is not: {error}.") from None
    except csv.Error as error:
        raise DataError(f"{path} must be a table with a header, but is not: {error}.") from None


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: must be JSON, but is not: {error}.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}, line {number}: must be an object with columns, but is a {type(found).__name__}.")
    return found


def _classes(path: Path, table: Sequence[Row]) -> list[str]:
    names = sorted({label for _, _, label in table}, key=lambda name: (_number(name), name))
    if not 2 <= len(names) <= MOST_CLASSES:
        remedy = "Set --regression true if they are numbers to be estimated." if len(names) > 2 else "Add rows."
        raise DataError(f"{path} must have labels of 2 to {MOST_CLASSES:,} classes, but has {len(names):,}. {remedy}")
    return names


def _numbered(path: Path, table: Sequence[Row], names: Sequence[str]) -> Rows:
    """Rows with numbers for labels: that of the class, or the number itself where there are no classes."""
    places, labels = {name: place for place, name in enumerate(names)}, []
    for number, _, label in table:
        if names and label not in places:
            raise DataError(
                f"{path}, line {number}: the label must be one of the training rows' ({', '.join(names[:10])}), but is "
                f"{label!r} instead."
            )
        value = places[label] if names else _number(label)
        if not math.isfinite(value):
            raise DataError(f"{path}, line {number}: the label must be a finite number, but is {label!r} instead.")
        labels.append(value)
    return Rows(texts=tuple(texts for _, texts, _ in table), labels=tuple(labels))


def _number(text: str) -> float:
    """The value of a text that is a number, infinity for others."""
    try:
        value = float(text)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(value) else value
