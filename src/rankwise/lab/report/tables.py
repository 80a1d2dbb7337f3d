"""The records of finished runs, and their tables: size, quality, loss against the dense control, speed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.errors import CheckpointError, RankwiseError, shortened
from rankwise.files import read_json as read_content
from rankwise.files import reason

MEASURES = {
    "bits_per_character": "bits per character",
    "perplexity": "perplexity",
    "f1": "F1",
    "spearman": "Spearman",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "accuracy": "accuracy",
    "output_error": "relative error of the outputs",
}
"""The measures of quality. The first that a row has is compared with the dense model's."""
SPLITS = ("valid", "test")
SHARES = {"removed": "removed", "removed_of_prunable": "of prunable"}
"""What was removed, as a share of the model and of its prunable part."""
CONTROL = "dense"
"""The row that others are compared with. The base has another name, because it was trained for fewer steps."""
TAUGHT = "taught"
"""The row that others which learn from the control's answers are compared with."""
RECORD, EXPERIMENT, EXPORT = "record.json", "experiment.json", "export.json"
MODELS = "rankwise-models"
"""The format of a record of models that were pruned one by one."""
FORMATS = ("rankwise-experiment", "rankwise-sweep", MODELS)
"""The formats of records that have a table."""
TABLE = "rankwise-table"
"""The format of a record that is filled cell by cell: `runs`, each the record of an experiment from one base."""
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


@_reading()
def row_table(row: Mapping[str, Any]) -> Table:
    """The table of a single model: its size, and its quality on both splits."""
    shares = [share for share in SHARES if share == "removed" or row[share] != row["removed"]]
    figures = [(split, measure) for split in SPLITS for measure in measures_of(row[split])]
    columns = ("", "parameters", *(SHARES[s] for s in shares), *(f"{s} {MEASURES.get(m, m)}" for s, m in figures))
    cells = (*(f"{row[share]:.1%}" for share in shares), *(f"{row[s][m]:.4f}" for s, m in figures))
    return Table(columns, ((str(row["name"]), f"{row['parameters']:,}", *cells),))


@_reading()
def table(record: Mapping[str, Any]) -> Table:
    """The table of a run, or of a sweep, which has means over seeds and their spread."""
    runs = record.get("runs", [record])
    measures = measures_of(runs[0]["rows"][0]["test"])
    names = list(dict.fromkeys(row["name"] for run in runs for row in run["rows"]))
    found = {name: [row for run in runs for row in run["rows"] if row["name"] == name] for name in names}
    shares = list(SHARES) if any(map(_asks_of_prunable, runs)) else ["removed"]
    # what was compressed at once has no validation data
    has_valid = any(row["valid"] for group in found.values() for row in group)
    splits = {**({"valid": "valid"} if has_valid else {}), "test": measured_on(runs[0])}
    # models that were pruned one by one are not timed together
    timed = all("milliseconds" in row for group in found.values() for row in group)
    rows = []
    for name, group in found.items():
        lost = _lost(runs, name, measures[0]) if measures else []
        rows.append(
            (
                str(name),
                f"{group[0]['parameters']:,}{' *' if group[0]['nonzeros'] else ''}",
                *(f"{group[0][share]:.1%}" for share in shares),
                *(
                    spread([row[split][m] for row in group if row[split] and m in row[split]])
                    for split in splits
                    for m in measures
                ),
                spread([100 * loss for loss in lost], "+.1f", "%") if lost else "",
                *(_times(group) if timed else ()),
            )
        )
    notes = [f"over {len(runs)} seeds: mean ± standard deviation"] if len(runs) > 1 else []
    if any(row["nonzeros"] for group in found.values() for row in group):
        notes.append("* non-zero parameters: the matrices keep their shape")
    if failed := failures(record):
        notes.append(f"without {', '.join(failed)}: failed")
    controls = [control_of(run["rows"], row) for run in runs for row in run["rows"]]
    if any(control is not None and control["name"] == TAUGHT for control in controls):
        notes.append(f"rows that learn from {CONTROL} are compared with {TAUGHT}: a dense model that does so too")
    columns = (
        "", "parameters", *(SHARES[share] for share in shares),
        *(f"{words} {MEASURES.get(m, m)}" for words in splits.values() for m in measures),
        "against dense", *(("ms per window", "speed") if timed else ()),
    )  # fmt: skip
    return Table(columns, tuple(rows), tuple(notes))


def _asks_of_prunable(run: Mapping[str, Any]) -> bool:
    """Whether the budget is a share of the prunable part, and that part is not all of the model."""
    budget = (run.get("experiment") or {}).get("budget") or {}
    return budget.get("of") == "prunable" and any(len({row[share] for share in SHARES}) > 1 for row in run["rows"])


def measures_of(quality: Mapping[str, Any]) -> list[str]:
    """The measures of a row's quality that are shown, ours first; one that has no words here is named by itself."""
    known = [name for name in MEASURES if isinstance(quality.get(name), int | float)]
    return known or [name for name, value in quality.items() if isinstance(value, float) and name != "loss"]


def _times(group: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    medians = spread([row["milliseconds"]["median"] for row in group], ".1f")
    return medians, spread([row["speedup"] for row in group], ".2f", "x")


def _lost(runs: Sequence[Mapping[str, Any]], name: str, measure: str) -> list[float]:
    """By how much the test measure of a method exceeds that of its dense control of the same seed."""
    pairs = [(row, control_of(run["rows"], row)) for run in runs for row in run["rows"] if row["name"] == name]
    # a model that has learned nothing may score 0
    return [
        row["test"][measure] / control["test"][measure] - 1
        for row, control in pairs
        if control is not None and control["test"][measure] > 0
    ]


def control_of(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The dense model that a row is compared with: where there is one, one that learned from dense if the row did.

    Nothing is compared with a base, which trained for fewer steps.
    """
    named = {other["name"]: other for other in rows}
    if row["name"] in (CONTROL, TAUGHT):
        return None
    return (named.get(TAUGHT) if row.get("distill") else None) or named.get(CONTROL)


def failures(record: Mapping[str, Any]) -> dict[str, str]:
    """The models that are missing from a record because they failed, and why, where it says so."""
    failed = record.get("failed")
    # a sweep says more of them than a run
    told = [
        each if isinstance(each, Mapping) else {"cell": each} for each in (failed if isinstance(failed, list) else [])
    ]
    return {str(each.get("cell")): str(each.get("why", "")) for each in told}


def measured_on(record: Mapping[str, Any]) -> str:
    """What the figures under "test" were measured on."""
    return str(record.get("measured_on") or "test")


def spread(values: Sequence[float], form: str = ".4f", unit: str = "") -> str:
    """The mean, and the standard deviation where there are several values."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    if len(values) < 2:
        return f"{mean}{unit}"
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}{unit}"


@_reading()
def gather(paths: Sequence[Path]) -> dict[str, Any]:
    """The records that these paths hold, by title. Models that were pruned one by one share a record."""
    found: dict[str, Any] = {}
    # folders of models of one method and their rows: what `rankwise prune` wrote, or parts of a run
    models = [path for path in paths if (path / EXPORT).is_file() and "rows" in read_json(path / EXPORT)]
    for path in paths:
        if path not in models:
            found |= {f"{record['name']}, {file}": record for file, record in _records_at(path).items()}
    if models:
        found[", ".join(map(str, models))] = _record_of_models(models)
    return found


def _record_of_models(folders: Sequence[Path]) -> dict[str, Any]:
    """A record whose rows are models that were pruned one by one, the dense ones first."""
    found = {folder: read_json(folder / EXPORT) for folder in folders}
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
        record = read_json(path / RECORD)
        if record.get("format") not in FORMATS:
            form = record.get("format")
            raise CheckpointError(f"{path / RECORD} must be the record of a whole run, but is a {form!r}. {REMEDY}")
        return {path: record}
    if (path / "compression.json").is_file():
        from rankwise.lab.report.found import compressed_run

        try:
            return {path: compressed_run(path, path.name).record}
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = {file: content for file in files if (content := read_json(file)).get("format") in FORMATS}
    if not found:
        raise CheckpointError(f"A report must be of runs or of pruned models, but {path} holds none of them. {REMEDY}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = read_content(path)
    except (OSError, ValueError) as error:
        why = reason(error)
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but is not: {why}. {REMEDY}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but is no object. {REMEDY}")
    return content
