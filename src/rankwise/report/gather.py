"""What the paths of a report hold: records of runs, models that were pruned one by one, records of results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import CheckpointError
from rankwise.report.page import KNOWN
from rankwise.report.records import MODELS, TABLE, is_run, name_of, read_files

RECORD, EXPERIMENT, EXPORT = "record.json", "experiment.json", "export.json"
REMEDY = "Give a folder that `rankwise run`, `sweep` or `prune` wrote to; where it was stopped, run it again."


def gather(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Records for the page of results, by name; and those that have a table of their own, by title.

    A file with the record of a run belongs to the page only beside others of it.
    """
    own: dict[str, Any] = {}
    models = [path for path in paths if _is_model(path)]
    files: dict[Path, Any] = {}
    for path in paths:
        if path in models:
            continue
        if not path.exists() or any((path / name).exists() for name in (RECORD, EXPERIMENT)):
            record = _record_of(path)
            own[_title(path, record)] = record
        else:
            files |= _records_in(path)
    if models:
        own[", ".join(map(str, models))] = together(models)
    results = {} if all(map(is_run, files.values())) else _for_page(files)
    rest = {path: content for path, content in files.items() if name_of(path, content) not in results}
    return results, own | {_title(path, record): record for path, record in rest.items()}


def _for_page(files: Mapping[Path, Any]) -> dict[str, Any]:
    named = ((name_of(path, content), content) for path, content in files.items())
    return {name: content for name, content in named if name in KNOWN or not is_run(content)}


def _title(path: Path, record: Mapping[str, Any]) -> str:
    return f"{record['name']}, {path}"


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
    names = [export["row"]["name"] for export in found.values()]
    rows = [
        # two of one name are no two seeds of one model
        {**export["row"], "name": str(folder)} if names.count(export["row"]["name"]) > 1 else export["row"]
        for folder, export in found.items()
    ]
    return {"format": MODELS, "name": "models", "rows": sorted(rows, key=lambda row: row["method"] != "dense")}


def _is_model(path: Path) -> bool:
    """Whether a folder holds one model and its row: what `rankwise prune` wrote, or one of a run."""
    export = path / EXPORT
    return export.is_file() and "row" in _read(export)


def _record_of(folder: Path) -> dict[str, Any]:
    """The record of a finished run or sweep."""
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"A finished run must hold {RECORD}, but {folder} does not. {REMEDY}")
    record = _read(path)
    if not is_run(record):
        raise CheckpointError(f"{path} must be the record of a whole run, but is a {record.get('format')!r}. {REMEDY}")
    return record


def _records_in(path: Path) -> dict[Path, Any]:
    """The files of a folder of records, or the one that was named."""
    found = read_files([path])
    if not any(_is_record(file, content) for file, content in found.items()):
        raise CheckpointError(
            f"A report must be of runs, of pruned models or of records, but {path} holds none of them. {REMEDY}"
        )
    return found


def _is_record(path: Path, content: Any) -> bool:
    known = name_of(path, content) in KNOWN or is_run(content)
    return known or (isinstance(content, Mapping) and content.get("format") == TABLE)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("its outermost value is no object")
        return content
    except ValueError as error:
        raise CheckpointError(f"{path} must be JSON that rankwise wrote, but is not: {error}.") from error
