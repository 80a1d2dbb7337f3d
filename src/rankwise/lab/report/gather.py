"""What the paths given to `rankwise report` hold: records of runs, and models that were pruned one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import CheckpointError

RECORD, EXPERIMENT, EXPORT = "record.json", "experiment.json", "export.json"
MODELS = "rankwise-models"
"""Format of a record of models that were pruned one by one."""
FORMATS = ("rankwise-experiment", "rankwise-sweep", MODELS)
"""Formats of records that have a table."""
REMEDY = "Give a folder that `rankwise run`, `sweep` or `prune` wrote to; where it was stopped, run it again."


def gather(paths: Sequence[Path]) -> dict[str, Any]:
    """Records by title: of runs and sweeps, of files that hold one, and one for all models pruned one by one."""
    found: dict[str, Any] = {}
    models = [path for path in paths if _is_model(path)]
    for path in paths:
        if path not in models:
            found |= {f"{record['name']}, {file}": record for file, record in _records_at(path).items()}
    if models:
        found[", ".join(map(str, models))] = together(models)
    return found


def together(folders: Sequence[Path]) -> dict[str, Any]:
    """Models that were pruned one by one, as the rows of one record; the dense ones first."""
    found = {folder: json.loads((folder / EXPORT).read_bytes()) for folder in folders}
    texts = {folder: export["of"].get("corpus") for folder, export in found.items()}
    for folder, text in texts.items():
        if text != texts[folders[0]]:
            raise CheckpointError(
                f"Models in one table must have read the same text, but {folders[0]} and {folder} have not. "
                "Report them apart."
            )
    pairs = [(folder, row) for folder, export in found.items() for row in _rows(export)]
    names = [row["name"] for _, row in pairs]
    # two models of one name are not two seeds of one model
    rows = [{**row, "name": str(folder)} if names.count(row["name"]) > 1 else row for folder, row in pairs]
    return {"format": MODELS, "name": "models", "rows": sorted(rows, key=lambda row: row["method"] != "dense")}


def _is_model(path: Path) -> bool:
    """Whether a folder holds models of one method and their rows: what `rankwise prune` wrote, or a part of a run."""
    export = path / EXPORT
    return export.is_file() and bool(_rows(_read(export)))


def _rows(export: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part; earlier versions wrote one."""
    rows: list[dict[str, Any]] = export.get("rows") or ([export["row"]] if "row" in export else [])
    return rows


def _records_at(path: Path) -> dict[Path, Any]:
    """The record of a run's folder, of a file, or of every file in a folder that holds one."""
    if not path.exists() or any((path / name).exists() for name in (RECORD, EXPERIMENT)):
        return {path: _record_of(path)}
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    found = {file: content for file in files if _has_table(content := _read(file))}
    if not found:
        raise CheckpointError(f"A report must be of runs or of pruned models, but {path} holds none of them. {REMEDY}")
    return found


def _record_of(folder: Path) -> dict[str, Any]:
    """The record of a finished run or sweep."""
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"A finished run must hold {RECORD}, but {folder} does not. {REMEDY}")
    record = _read(path)
    if not _has_table(record):
        raise CheckpointError(f"{path} must be the record of a whole run, but is a {record.get('format')!r}. {REMEDY}")
    return record


def _has_table(content: Mapping[str, Any]) -> bool:
    return content.get("format") in FORMATS


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("its outermost value is not an object")
        return content
    except ValueError as error:
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but is not: {error}.") from error
