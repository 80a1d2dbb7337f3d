"""Rows of texts with labels: what a task asks of them, its metrics, and files of one's own (CSV, TSV or JSONL).

A bad row is named by its line. Shapes: N = rows, C = classes.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankwise.errors import DataError, nearest
from rankwise.files import parse_json
from rankwise.lab.data.vocabulary import unreadable

DELIMITERS = {".csv": ",", ".tsv": "\t"}
LINES = (".jsonl", ".ndjson", ".json")
MOST_CLASSES = 1_000
"""More different labels than that are taken for a mistake."""

Numbers = npt.NDArray[Any]
Row = tuple[int, tuple[str, ...], str]
"""The line, the texts and the label of a row."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. Data, no code."""

    name: str
    """The name on the command line."""
    title: str
    """The published name, which is also that of its folder."""
    texts: tuple[str, ...]
    """The columns of the one or two texts."""
    label: str
    """The column of the label."""
    labels: tuple[str, ...] = ()
    """How the classes 0, 1, ... are written in the file; none: the label is a number in `limits`."""
    limits: tuple[float, float] = (0.0, 5.0)
    metrics: tuple[str, ...]
    """The official ones; the first is shown where one must do."""
    columns: tuple[str, ...] = ()
    """The columns of a file without a header."""
    dev: str = "dev.tsv"
    """The file of the development set. Labels of the test sets are not published."""
    train_rows: int
    """The number of rows in the whole training set."""

    @property
    def num_labels(self) -> int:
        """Outputs of a head for this task."""
        return len(self.labels) or 1

    @property
    def is_regression(self) -> bool:
        return not self.labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Texts and labels of a file, in its order."""

    texts: tuple[tuple[str, ...], ...]
    """One or two for each row."""
    labels: tuple[float, ...]
    """The number of the class, or the score itself."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: Sequence[int]) -> Rows:
        """Some of the rows."""
        return Rows(texts=tuple(self.texts[i] for i in places), labels=tuple(self.labels[i] for i in places))


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A task with its rows."""

    task: Task
    title: str
    """The title of the task, with the number of training rows where some are left out."""
    train: Rows
    dev: Rows
    fingerprint: str
    """The same for the same rows."""

    def record(self) -> dict[str, Any]:
        """What a run record keeps of it."""
        return {
            "name": self.title,
            "task": self.task.name,
            "rows": {"train": len(self.train), "dev": len(self.dev)},
            "fingerprint": self.fingerprint,
        }


def accuracy(answers_N: Numbers, labels_N: Numbers) -> float:
    """The share of right answers."""
    return float(np.mean(answers_N == labels_N))


def f1(answers_N: Numbers, labels_N: Numbers) -> float:
    """2 TP / (2 TP + FP + FN) of class 1; 0 where that is undefined."""
    tp = int(np.sum((answers_N == 1) & (labels_N == 1)))
    wrong = int(np.sum((answers_N == 1) != (labels_N == 1)))
    return 2 * tp / (2 * tp + wrong) if tp else 0.0


def matthews(answers_N: Numbers, labels_N: Numbers) -> float:
    """(TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)); 0 where that is undefined."""
    a, b = answers_N == 1, labels_N == 1
    tp, tn, fp, fn = (int(np.sum(x & y)) for x, y in ((a, b), (~a, ~b), (a, ~b), (~a, b)))
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(product) if product else 0.0


def pearson(answers_N: Numbers, labels_N: Numbers) -> float:
    """The correlation of the two; 0 where one of them never changes."""
    x, y = (values.astype(np.float64) - values.mean(dtype=np.float64) for values in (answers_N, labels_N))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else 0.0


def spearman(answers_N: Numbers, labels_N: Numbers) -> float:
    """The correlation of their ranks, equal values sharing the mean of theirs."""
    return pearson(ranks(answers_N), ranks(labels_N))


def ranks(values_N: Numbers) -> Numbers:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place], dtype=np.float64)


METRICS: dict[str, Callable[[Numbers, Numbers], float]] = {
    metric.__name__: metric for metric in (accuracy, f1, matthews, pearson, spearman)
}


def score(task: Task, logits_NC: Numbers, labels_N: Numbers) -> dict[str, float]:
    """The official metrics of a model's outputs, by name."""
    answers_N = logits_NC[:, 0] if task.is_regression else logits_NC.argmax(1)
    return {name: METRICS[name](answers_N, labels_N) for name in task.metrics}


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
    files = [path, *(Path(name) for name in further if name is not None)]
    tables = {file: list(_rows(file, columns)) for file in files}
    table = tables[path]
    names = [] if columns.regression or not table else _classes(path, table)
    rows = {file: numbered(file, found, names) for file, found in tables.items()}
    metrics = ("spearman", "pearson") if columns.regression else ("accuracy",)
    task = Task(
        name=path.stem, title=path.name, texts=columns.texts, label=columns.label, labels=tuple(names),
        metrics=metrics, train_rows=len(table),
    )  # fmt: skip
    digest = hashlib.sha256()
    for part in rows.values():
        for texts, label in zip(part.texts, part.labels, strict=True):
            digest.update(json.dumps([*texts, label]).encode())
    train = rows[path]
    dataset = Dataset(task=task, title=path.name, train=train, dev=train, fingerprint=digest.hexdigest())
    return dataset, [None if name is None else rows[Path(name)] for name in further]


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
        if not str(label).strip():
            raise DataError(f"{path}, line {number}: a row must have a label, but that is empty. Remove the row.")
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
                reader = csv.reader(file, delimiter=DELIMITERS[suffix], strict=True)
                header = next(reader, [])
                yield from by_column(path, header, ((reader.line_num, fields) for fields in reader if fields))
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be UTF-8, but is not: {error}.") from None
    except csv.Error as error:
        raise DataError(f"{path} must be a table with a header, but is not: {error}.") from None


def by_column(
    path: Path, header: Sequence[str], lines: Iterable[tuple[int, Sequence[str]]]
) -> Iterator[tuple[int, dict[str, str]]]:
    """The fields of each line by their columns; refuses lines with more or fewer of them."""
    for number, fields in lines:
        if len(fields) != len(header):
            raise DataError(
                f"{path}, line {number}: a row must have {len(header)} fields, but has {len(fields)}. "
                "Mend or remove the line; in a CSV, a text with a comma needs quotes."
            )
        yield number, dict(zip(header, fields, strict=True))


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: must be JSON, but {error}.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}, line {number}: must be an object with columns, but is a {type(found).__name__}.")
    return found


def _classes(path: Path, table: Sequence[Row]) -> list[str]:
    names = sorted({label for _, _, label in table}, key=lambda name: (_number(name), name))
    if not 2 <= len(names) <= MOST_CLASSES:
        remedy = "Set --regression true if they are numbers to be estimated." if len(names) > 2 else "Add rows."
        raise DataError(f"{path} must have labels of 2 to {MOST_CLASSES:,} classes, but has {len(names):,}. {remedy}")
    return names


def numbered(path: Path, table: Sequence[Row], names: Sequence[str], limits: tuple[float, float] | None = None) -> Rows:
    """Rows with numbers for labels: that of the class, or the number itself where there are no classes."""
    if not table:
        raise DataError(f"{path} must hold at least one row, but has none.")
    places, labels = {name: place for place, name in enumerate(names)}, []
    for number, _, label in table:
        if names and label not in places:
            raise DataError(
                f"{path}, line {number}: the label must be one of {', '.join(names[:10])}, but is {label!r} instead."
            )
        value = places[label] if names else _number(label)
        low, high = limits or (-math.inf, math.inf)
        if not math.isfinite(value) or not (names or low <= value <= high):
            wanted = "a finite number" if limits is None else f"a number of {low:g} to {high:g}"
            raise DataError(f"{path}, line {number}: the label must be {wanted}, but is {label!r} instead.")
        labels.append(value)
    return Rows(texts=tuple(texts for _, texts, _ in table), labels=tuple(labels))


def _number(text: str) -> float:
    """The value of a text that is a number, infinity for others."""
    try:
        value = float(text)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(value) else value
