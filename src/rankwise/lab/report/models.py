"""The models of a report as points: what each was asked to be, what it is, and what it lost, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankwise.lab.report.found import Run, series_of
from rankwise.lab.report.tables import control_of


@dataclass(frozen=True)
class Model:
    """A row of a run."""

    run: Run
    row: Mapping[str, Any]

    @property
    def series(self) -> str:
        return series_of(self.row["name"])

    @property
    def is_dense(self) -> bool:
        return bool(self.row["method"] == "dense")

    @property
    def key(self) -> str:
        """A name that no other model of the report has."""
        seed = f", seed {self.run.seed}" if self.run.seed else ""
        return f"{self.run.title}: {self.row['name']}{seed}"

    @property
    def value(self) -> float | None:
        """Its quality on the test data."""
        value = self.row["test"].get(self.run.measure)
        return float(value) if isinstance(value, int | float) else None

    @property
    def control(self) -> Model | None:
        """The dense model that its quality is compared with, as in tables."""
        row = control_of(self.run.rows, self.row)
        return None if row is None else Model(self.run, row)

    @property
    def lost(self) -> float | None:
        """By how much its measure is larger than its control's."""
        dense = None if self.control is None else self.control.value
        return None if self.value is None or not dense or dense <= 0 else self.value / dense - 1

    @property
    def asked(self) -> str:
        """The size that was asked for, in words; empty where the record does not say it."""
        if "asked" in self.row:
            return f"at most {self.row['asked']:,} parameters"
        budget = self.run.experiment.get("budget") or {}
        level = self.level
        if level is not None:
            return f"{level:g}% of the {'prunable ' if budget.get('of') == 'prunable' else ''}parameters removed"
        for key, words in (("params", "{:,} parameters"), ("megabytes", "{:g} MB"), ("latency_ms", "{:g} ms")):
            if isinstance(budget.get(key), int | float):
                return words.format(budget[key])
        return ""

    @property
    def level(self) -> float | None:
        """The percentage that was to be removed: from the name of the row, or from the run's own budget."""
        name = self.row["name"]
        if self.is_dense:
            return None
        if name != self.series:
            digits = [word for word in name.split("-") if word.replace(".", "").isdigit()]
            return float(digits[-1]) if digits else None
        removed = (self.run.experiment.get("budget") or {}).get("removed")
        return round(100 * removed, 4) if isinstance(removed, int | float) else None


def models_of(runs: Sequence[Run]) -> list[Model]:
    """Every row of every run."""
    return [Model(run, row) for run in runs for row in run.rows]


@dataclass(frozen=True)
class Point:
    """One size of one series of a run or sweep: the mean over seeds, and how far they are apart."""

    title: str
    series: str
    method: str
    models: tuple[Model, ...]

    @property
    def values(self) -> list[float]:
        return [model.value for model in self.models if model.value is not None]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def parameters(self) -> float:
        return float(statistics.mean(model.row["parameters"] for model in self.models))

    @property
    def row(self) -> Mapping[str, Any]:
        """The row of the first seed."""
        return self.models[0].row

    @property
    def lost(self) -> float | None:
        losses = [model.lost for model in self.models if model.lost is not None]
        return statistics.mean(losses) if losses else None

    @property
    def speedup(self) -> float | None:
        found = [model.row["speedup"] for model in self.models if "speedup" in model.row]
        return statistics.mean(found) if found else None


def points_of(models: Sequence[Model]) -> list[Point]:
    """Models with a measured quality; seeds of one run or sweep together."""
    groups: dict[tuple[str, str], list[Model]] = {}
    for model in models:
        if model.value is not None:
            groups.setdefault((model.run.title, model.row["name"]), []).append(model)
    return [Point(title, group[0].series, group[0].row["method"], tuple(group)) for (title, _), group in groups.items()]


def comparable(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """(measure, runs) of runs of one kind of model whose quality is measured alike on the same data."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.measure is not None:
            model = run.experiment.get("model") or {}
            kind = str(model.get("architecture") or model.get("name") or "")
            groups.setdefault((run.corpus, run.measure, kind), []).append(run)
    for (_, measure, _), group in groups.items():
        yield measure, group
