"""The records of finished runs, and their tables: size, quality, loss against the dense control, speed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.errors import CheckpointError, RankwiseError, shortened
from rankwise.files import read_json, reason

MEASURES = {
    "bits_per_character": "bits per character",
    "perplexity": "perplexity",
    "f1": "F1",
    "spearman": "Spearman",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "accuracy": "accuracy",
}
"""The measures of quality. The first that a row has is compared with the dense model's."""
SPLITS = ("valid", "test")
SHARES = {"removed": "removed", "removed_of_prunable": "of prunable"}
"""What was removed, as a share of the model and of its prunable part."""
CONTROL = "dense"
"""The row that others are compared with. The base has another name, because it was trained for fewer steps."""
RECORD, EXPERIMENT, EXPORT = "record.json", "experiment.json", "export.json"
MODELS = "rankwise-models"
"""The format of a record of models that were pruned one by one."""
FORMATS = ("rankwise-experiment", "rankwise-sweep", MODELS)
"""The formats of records that have a table."""
REMEDY = "Give a folder that `rankwise run`, `sweep` or `prune` wrote to; where it was stopped, run it again."


@dataclass(frozen=True)
class Table:
    """The text of a table, for Markdown and for the terminal."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table as Markdown, with its notes below."""
        lines = ["| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def row_table(row: Mapping[str, Any]) -> Table:
    """The table of a single model: its size, and its quality on both splits."""
    with _reading():
        return _row_table(row)


def _row_table(row: Mapping[str, Any]) -> Table:
    shares = [share for share in SHARES if share == "removed" or row[share] != row["removed"]]
    figures = [(split, measure) for split in SPLITS for measure in _measures(row[split])]
    columns = ("", "parameters", *(SHARES[s] for s in shares), *(f"{s} {MEASURES[m]}" for s, m in figures))
    cells = (*(f"{row[share]:.1%}" for share in shares), *(f"{row[s][m]:.4f}" for s, m in figures))
    return Table(columns, ((str(row["name"]), f"{row['parameters']:,}", *cells),))


def table(record: Mapping[str, Any]) -> Table:
    """The table of a run, or of a sweep, which has means over seeds and their spread."""
    with _reading():
        return _table(record)


@contextmanager
def _reading() -> Iterator[None]:
    """Say in one line that what was read is no record of ours: its content is checked by being used."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, RankwiseError):
            raise
        raise CheckpointError(
            f"A record must be as rankwise wrote it, but is not: {shortened(reason(error), 200)}. {REMEDY}"
        ) from error


def _table(record: Mapping[str, Any]) -> Table:
    runs = record.get("runs", [record])
    measures = _measures(runs[0]["rows"][0]["test"])
    names = list(dict.fromkeys(row["name"] for run in runs for row in run["rows"]))
    found = {name: [row for run in runs for row in run["rows"] if row["name"] == name] for name in names}
    shares = list(SHARES) if any(map(_asks_of_prunable, runs)) else ["removed"]
    # models that were pruned one by one are not timed together
    timed = all("milliseconds" in row for group in found.values() for row in group)
    rows = []
    for name, group in found.items():
        lost = _lost(runs, name, measures[0])
        rows.append(
            (
                str(name),
                f"{group[0]['parameters']:,}{' *' if group[0]['nonzeros'] else ''}",
                *(f"{group[0][share]:.1%}" for share in shares),
                *(spread([row[split][m] for row in group if row[split]]) for split in SPLITS for m in measures),
                spread([100 * loss for loss in lost], "+.1f", "%") if lost else "",
                *(_times(group) if timed else ()),
            )
        )
    notes = [f"over {len(runs)} seeds: mean ± standard deviation"] if len(runs) > 1 else []
    if any(row["nonzeros"] for group in found.values() for row in group):
        notes.append("* non-zero parameters: the matrices keep their shape")
    columns = (
        "", "parameters", *(SHARES[share] for share in shares),
        *(f"{split} {MEASURES[m]}" for split in SPLITS for m in measures),
        "against dense", *(("ms per window", "speed") if timed else ()),
    )  # fmt: skip
    return Table(columns, tuple(rows), tuple(notes))


def _asks_of_prunable(run: Mapping[str, Any]) -> bool:
    """Whether the budget is a share of the prunable part, and that part is not all of the model."""
    budget = (run.get("experiment") or {}).get("budget") or {}
    return budget.get("of") == "prunable" and any(len({row[share] for share in SHARES}) > 1 for row in run["rows"])


def _measures(quality: Mapping[str, Any]) -> list[str]:
    return [measure for measure in MEASURES if measure in quality]


def _times(group: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    medians = spread([row["milliseconds"]["median"] for row in group], ".1f")
    return medians, spread([row["speedup"] for row in group], ".2f", "x")


def _lost(runs: Sequence[Mapping[str, Any]], name: str, measure: str) -> list[float]:
    """By how much the test measure of a method exceeds that of the dense control of the same seed."""
    losses = []
    for run in runs:
        control = next((row["test"][measure] for row in run["rows"] if row["name"] == CONTROL), 0)
        # a model that has learned nothing may score 0
        if name != CONTROL and control > 0:
            losses += [row["test"][measure] / control - 1 for row in run["rows"] if row["name"] == name]
    return losses


def spread(values: Sequence[float], form: str = ".4f", unit: str = "") -> str:
    """The mean, and the standard deviation where there are several values."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    if len(values) < 2:
        return f"{mean}{unit}"
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}{unit}"


def gather(paths: Sequence[Path]) -> dict[str, Any]:
    """The records that these paths hold, by title. Models that were pruned one by one share a record."""
    found: dict[str, Any] = {}
    # folders of models of one method and their rows: what `rankwise prune` wrote, or parts of a run
    models = [path for path in paths if (path / EXPORT).is_file() and "rows" in _read(path / EXPORT)]
    for path in paths:
        if path not in models:
            with _reading():
                found |= {f"{record['name']}, {file}": record for file, record in _records_at(path).items()}
    if models:
        with _reading():
            found[", ".join(map(str, models))] = _record_of_models(models)
    return found


def _record_of_models(folders: Sequence[Path]) -> dict[str, Any]:
    """A record whose rows are models that were pruned one by one, the dense ones first."""
    found = {folder: _read(folder / EXPORT) for folder in folders}
    for folder, export in found.items():
        if export["of"].get("corpus") != found[folders[0]]["of"].get("corpus"):
            raise CheckpointError(
                f"Models in one table must have read the same text, but {folders[0]} and {folder} have not. "
                "Report them apart."
            )
    pairs = [(folder, row) for folder, export in found.items() for row in export["rows"]]
    names = [row["name"] for _, row in pairs]
    # two models of one name are not two seeds of one model
    rows = [{**row, "name": str(folder)} if names.count(row["name"]) > 1 else row for folder, row in pairs]
    return {"format": MODELS, "name": "models", "rows": sorted(rows, key=lambda row: row["method"] != "dense")}


def _records_at(path: Path) -> dict[Path, Any]:
    """The record of a run's folder, of a file, or of every file in a folder that holds one."""
    if not path.exists() or any((path / name).exists() for name in (RECORD, EXPERIMENT)):
        if not (path / RECORD).is_file():
            raise CheckpointError(f"A finished run must hold {RECORD}, but {path} does not. {REMEDY}")
        record = _read(path / RECORD)
        if record.get("format") not in FORMATS:
            form = record.get("format")
            raise CheckpointError(f"{path / RECORD} must be the record of a whole run, but is a {form!r}. {REMEDY}")
        return {path: record}
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = {file: content for file in files if (content := _read(file)).get("format") in FORMATS}
    if not found:
        raise CheckpointError(f"A report must be of runs or of pruned models, but {path} holds none of them. {REMEDY}")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        why = reason(error)
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but is not: {why}. {REMEDY}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but is no object. {REMEDY}")
    return content
