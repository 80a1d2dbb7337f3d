"""Records as strangers, older versions and accidents leave them: what must be there, and what is not to be trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankwise.errors import CheckpointError

NEEDED: Mapping[str, tuple[type, ...]] = {
    "name": (str,), "method": (str,), "parameters": (int,), "removed": (int, float), "test": (dict,),
}  # fmt: skip
"""What a row must hold to be shown."""
GROUPS = ("budget", "method", "model", "corpus", "training", "base")
"""Settings of an experiment that are groups of others."""


def check_rows(record: Mapping[str, Any]) -> None:
    """Refuse a record whose rows say nothing that could be shown."""
    remedy = "it is damaged, or of an older version of rankwise. Run it again"
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows:
        raise CheckpointError(f"has no rows: {remedy}")
    for row in rows:
        for key, kinds in NEEDED.items():
            if not isinstance(row, dict) or not isinstance(row.get(key), kinds):
                raise CheckpointError(f"has a row without `{key}`: {remedy}")


def complete(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with what older ones do not have, and without what is not of the kind that it should be."""
    experiment = record.get("experiment")
    settings = {
        key: value
        for key, value in (experiment.items() if isinstance(experiment, Mapping) else ())
        if key not in GROUPS or value is None or isinstance(value, Mapping)
    }
    about = {key: record.get(key) for key in ("corpus", "hardware", "versions", "base")}
    about = {key: value if isinstance(value, Mapping) else None for key, value in about.items()}
    return {**record, **about, "experiment": settings, "rows": [_complete_row(row) for row in record["rows"]]}


def _complete_row(row: Mapping[str, Any]) -> dict[str, Any]:
    sound = {key: value for key, value in row.items() if key not in FITS or FITS[key](value)}
    return {"nonzeros": False, "valid": None, "removed_of_prunable": row["removed"], **sound}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lists_of(length: int) -> Callable[[Any], bool]:
    """Whether a value is lists of so many whole numbers by name."""

    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(one, list) and len(one) == length and all(type(number) is int for number in one)
            for one in value.values()
        )

    return fits


FITS: Mapping[str, Callable[[Any], bool]] = {
    "valid": lambda value: value is None or isinstance(value, Mapping),
    "milliseconds": lambda value: isinstance(value, Mapping) and _is_number(value.get("median")),
    "speedup": _is_number,
    "removed_of_prunable": _is_number,
    "nonzeros": lambda value: isinstance(value, bool),
    "matrices": _lists_of(2),
    "ranks": _lists_of(4),
    "folder": lambda value: isinstance(value, str),
    "asked": _is_number,
}
"""What fields of a row must be; one that is anything else is left out."""
