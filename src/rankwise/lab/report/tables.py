"""The table of a run or a sweep: size, quality, loss of quality against the dense control, and speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    shares = [share for share in SHARES if share == "removed" or row[share] != row["removed"]]
    figures = [(split, measure) for split in SPLITS for measure in _measures(row[split])]
    columns = ("", "parameters", *(SHARES[s] for s in shares), *(f"{s} {MEASURES[m]}" for s, m in figures))
    cells = (*(f"{row[share]:.1%}" for share in shares), *(f"{row[s][m]:.4f}" for s, m in figures))
    return Table(columns, ((row["name"], f"{row['parameters']:,}", *cells),))


def table(record: Mapping[str, Any]) -> Table:
    """The table of a run, or of a sweep, which has means over seeds and their spread."""
    runs = record.get("runs", [record])
    measures = _measures(runs[0]["rows"][0]["test"])
    names = list(dict.fromkeys(row["name"] for run in runs for row in run["rows"]))
    found = {name: [row for run in runs for row in run["rows"] if row["name"] == name] for name in names}
    dense = [next((row for row in run["rows"] if row["name"] == CONTROL), None) for run in runs]
    shares = list(SHARES) if any(map(_asks_of_prunable, runs)) else ["removed"]
    # models that were pruned one by one are not timed together
    timed = all("milliseconds" in row for group in found.values() for row in group)
    rows = []
    for name, group in found.items():
        lost = _lost(runs, dense, name, measures[0])
        rows.append(
            (
                name,
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


def _lost(
    runs: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any] | None], name: str, measure: str
) -> list[float]:
    """By how much the test measure of a method exceeds that of the dense control of the same seed."""
    losses = []
    for run, control in zip(runs, dense, strict=True):
        for row in run["rows"]:
            # a model that has learned nothing may score 0
            if row["name"] == name and control and row is not control and control["test"][measure] > 0:
                losses.append(row["test"][measure] / control["test"][measure] - 1)
    return losses


def spread(values: Sequence[float], form: str = ".4f", unit: str = "") -> str:
    """The mean, and the standard deviation where there are several values."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    if len(values) < 2:
        return f"{mean}{unit}"
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}{unit}"
