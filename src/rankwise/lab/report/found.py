"""What lies in the places that a user names: runs, sweeps, models of them, records, compressed folders.

Nothing here may stop a report: a place that cannot be read becomes a line, and the others still show.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankwise.errors import CheckpointError
from rankwise.lab.report.curves import METRICS, Metrics, read_metrics
from rankwise.lab.report.records import check_rows, complete
from rankwise.lab.report.tables import EXPERIMENT, EXPORT, FORMATS, RECORD, TABLE, failures, measures_of, read_json

CONFIG, COMPRESSION, STRUCTURE, MODEL = "config.json", "compression.json", "rankwise.json", "model"
COMPRESSED, TRAINED = "rankwise-compressed", "rankwise-run"
VERSION = 1
"""The version of the records that this code writes."""
SEED = "seed-*"
POINTS = 16_000
"""About so many points all curves of one metric have together."""
FEWEST, MOST = 40, 600
"""Points of one curve."""
LEVEL = re.compile(r"-(?:at-)?\d+(?:\.\d+)?(?=-|$)")
"""The size in the name of a row: `flop-l0-80`, `svd-at-35`."""


@dataclass(frozen=True)
class Training:
    """One training of a run."""

    name: str
    method: str
    folder: Path
    seed: int = 0
    metrics: Metrics = field(default_factory=lambda: Metrics({}))

    @property
    def series(self) -> str:
        """What stays the same over sizes and seeds."""
        return series_of(self.name)


@dataclass(frozen=True, eq=False)
class Run:
    """A base and what was made from it, with one seed; or a compressed folder."""

    title: str
    folder: Path | None
    record: Mapping[str, Any]
    """As `record.json` has it: `rows` is there, everything else may be missing."""
    finished: bool = True
    trainings: tuple[Training, ...] = ()

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        rows: Sequence[Mapping[str, Any]] = self.record["rows"]
        return rows

    @property
    def seed(self) -> int:
        seed = self.record.get("seed")
        return seed if isinstance(seed, int) else 0

    @property
    def experiment(self) -> Mapping[str, Any]:
        return self.record.get("experiment") or {}

    @property
    def dense(self) -> Mapping[str, Any] | None:
        """The row that the others are compared with."""
        named = {row["name"]: row for row in self.rows}
        return named.get("dense") or named.get("base")

    @property
    def corpus(self) -> str:
        """What its quality was measured on; models of the same are compared."""
        corpus = self.record.get("corpus")
        corpus = corpus if isinstance(corpus, Mapping) else {}
        return str(corpus.get("fingerprint") or corpus.get("name") or self.title)

    @property
    def measure(self) -> str | None:
        """The measure of quality that is compared."""
        return next((name for row in self.rows for name in measures_of(row["test"])), None)


@dataclass(frozen=True)
class Problem:
    """A place, or a part of one, that could not be shown."""

    place: str
    why: str


@dataclass(frozen=True)
class Found:
    """All that a report shows."""

    runs: tuple[Run, ...]
    problems: tuple[Problem, ...]

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


def series_of(name: str) -> str:
    """The name of a row without its size: models of one series are a curve over sizes."""
    return LEVEL.sub("", name)


def read(paths: Sequence[Path]) -> Found:
    """Read everything at these paths."""
    problems: list[Problem] = []
    runs: list[Run] = []
    unique = list({path.resolve(): path for path in paths}.values())
    for path, title in zip(unique, _titles(unique), strict=True):
        try:
            found = list(_runs_at(path, title, problems))
            if not found:
                raise CheckpointError("holds no run, no record and no compressed model")
            runs += found
        except (CheckpointError, OSError) as error:
            problems.append(Problem(title, _why(error)))
    return Found(tuple(_with_metrics(runs, problems)), tuple(problems))


def _why(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _titles(paths: Sequence[Path]) -> list[str]:
    """Names for places: what is the same in all of them is left out."""
    whole = [path.resolve() for path in paths]
    above = Path(os.path.commonpath([path.parent for path in whole])) if whole else Path()
    return [str(path.relative_to(above)) for path in whole]


def _runs_at(path: Path, title: str, problems: list[Problem]) -> Iterator[Run]:
    if not path.exists():
        raise CheckpointError("does not exist")
    if path.is_file():
        yield from _of_record(read_json(path), title, None, problems)
    elif (path / COMPRESSION).is_file():
        yield compressed_run(path, title)
    elif _is_further_size(path):
        raise CheckpointError("holds a model whose figures are with its smallest size")
    elif (path / METRICS).is_file() or (path / EXPORT).is_file():
        yield _part(path, title)
    elif (path / RECORD).is_file():
        yield from _of_record(read_json(path / RECORD), title, path, problems)
    elif any(path.glob(f"{SEED}/{EXPERIMENT}")):
        yield from _unfinished_sweep(path, title, problems)
    elif (path / EXPERIMENT).is_file() and not (path / STRUCTURE).is_file():
        yield _unfinished(path, title)
    elif (path / STRUCTURE).is_file() or _is_ours(path):
        raise CheckpointError(
            "holds a compressed model without the figures that newer versions keep. Compress it again to see it here"
        )
    else:
        yield from _inside(path, title, problems)


def _unfinished_sweep(path: Path, title: str, problems: list[Problem]) -> Iterator[Run]:
    found: list[Run] = []
    for seed in sorted(path.glob(SEED)):
        try:
            found += _runs_at(seed, title, problems)
        except CheckpointError as error:
            problems.append(Problem(f"{title}/{seed.name}", _why(error)))
    # a sweep without a record goes on, though all seeds that were begun may be finished
    yield from found[:-1]
    yield from (replace(run, finished=False) for run in found[-1:])


def _is_further_size(folder: Path) -> bool:
    """Whether the row of the model in this folder is with those of another: one of several sizes, but not the last."""
    if (folder / EXPORT).is_file() or not (folder / MODEL).is_dir():
        return False
    found = [read_json(file).get("rows") for file in folder.parent.glob(f"*/{EXPORT}")]
    rows = [row for each in found if isinstance(each, list) for row in each if isinstance(row, Mapping)]
    return any(row.get("folder") == folder.name for row in rows)


def _inside(path: Path, title: str, problems: list[Problem]) -> Iterator[Run]:
    """What a folder of records, or of runs, holds. What else lies there is no mistake."""
    for file in sorted(path.glob("*.json")):
        try:
            content = read_json(file)
        except CheckpointError as error:
            problems.append(Problem(f"{title}/{file.name}", _why(error)))
            continue
        if content.get("format") in (*FORMATS, TABLE):
            yield from _of_record(content, f"{title}/{file.stem}", None, problems)
    for folder in sorted(child for child in path.iterdir() if child.is_dir()):
        if any((folder / name).is_file() for name in (RECORD, EXPERIMENT, COMPRESSION, METRICS)):
            try:
                if not _is_further_size(folder):
                    yield from _runs_at(folder, f"{title}/{folder.name}", problems)
            except CheckpointError as error:
                problems.append(Problem(f"{title}/{folder.name}", _why(error)))


def _of_record(record: Mapping[str, Any], title: str, folder: Path | None, problems: list[Problem]) -> Iterator[Run]:
    """The runs of a record, one for each base."""
    form, version = record.get("format"), record.get("version", 0)
    if form not in (*FORMATS, TABLE):
        raise CheckpointError(f"is a {form!r} and not the record of a run")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(f"was written by a newer version of rankwise (format {version}). Update rankwise")
    inner = record.get("runs", [record])
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise CheckpointError("has no list of runs")
    for each in inner:
        check_rows(each)
        place = folder / f"seed-{each.get('seed')}" if folder is not None and "runs" in record else folder
        yield Run(title, place, complete(each), trainings=tuple(_trainings(place, each)))
    for name, why in failures(record).items():
        problems.append(Problem(f"{title}/{name}", f"failed{': ' * bool(why)}{why.rstrip('.')}"))


def _part(folder: Path, title: str) -> Run:
    """One training: a model that `rankwise prune` wrote, or a part of a run."""
    export = read_json(folder / EXPORT) if (folder / EXPORT).is_file() else {}
    experiment = read_json(folder / EXPERIMENT) if (folder / EXPERIMENT).is_file() else {}
    about = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    record = {**about, "name": title, "experiment": experiment, "rows": export.get("rows", [])}
    if record["rows"]:
        check_rows(record)
    # rows name their folder from the one above
    return Run(title, folder.parent, complete(record), bool(export), tuple(_one_training(folder, "")))


def _unfinished(folder: Path, title: str) -> Run:
    """A run that goes on, or was stopped: the models that are finished, and how far the others are."""
    rows: list[Any] = []
    for export in sorted(folder.glob(f"*/{EXPORT}")):
        rows += read_json(export).get("rows", [])
    experiment = read_json(folder / EXPERIMENT)
    record = {"name": title, "seed": experiment.get("seed"), "experiment": experiment, "rows": rows}
    if rows:
        check_rows(record)
    return Run(title, folder, complete(record), False, tuple(_trainings(folder, record)))


def _trainings(folder: Path | None, record: Mapping[str, Any]) -> Iterator[Training]:
    """The trainings whose metrics are there."""
    if folder is None:
        return
    for file in sorted(folder.glob(f"*/{METRICS}"), key=lambda file: file.stat().st_mtime):
        for training in _one_training(file.parent, ""):
            yield replace(training, seed=record.get("seed") or 0)


def _one_training(folder: Path, above: str) -> Iterator[Training]:
    if not (folder / METRICS).is_file():
        return
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    about = config.get("about") or {}
    name = f"{above}{folder.name}"
    yield Training(name, str((about.get("method") or {}).get("name", "dense")), folder)
    yield from _one_training(folder / "healing", f"{name}, ")


def compressed_run(folder: Path, title: str) -> Run:
    """What `rankwise compress` made, and the model it started from, as the rows of a run."""
    record = read_json(folder / COMPRESSION)
    if record.get("format") != COMPRESSED or record.get("version") != VERSION:
        raise CheckpointError(f"holds a {COMPRESSION} of another version of rankwise. Compress it again")
    try:
        quality, speed = record.get("healed") or record["quality"], record["speed"]
        longest = max(speed, key=int, default=None)
        rows = []
        for place, name in enumerate(("dense", record["method"])):
            row = {"name": name, "method": name, "parameters": record[("dense", "exported")[place]], "removed": 0.0}
            row["test"] = {} if quality is None else {quality["measure"]: quality[("dense", "small")[place]]}
            if longest is not None:
                row["milliseconds"] = {"median": speed[longest][place]}
                row["speedup"] = speed[longest][0] / speed[longest][place]
            rows.append(row)
        kept = {key: record[key] for key in ("removed", "removed_of_prunable", "matrices", "ranks", "nonzeros")}
        rows[1] |= {**kept, "folder": ".", "asked": record["budget"]}
        if record.get("healed"):
            rows[1]["name"] += ", healed"
        made = {**record, "rows": rows, "corpus": {"name": title}, "measured_on": "kept-back"}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"holds a damaged {COMPRESSION}: {error!r}") from None
    check_rows(made)
    return Run(title, folder, complete(made))


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder of transformers with layers of ours."""
    if not (folder / CONFIG).is_file():
        return False
    entry = read_json(folder / CONFIG).get("quantization_config")
    return isinstance(entry, Mapping) and entry.get("quant_method") == "rankwise"


def _with_metrics(runs: Sequence[Run], problems: list[Problem]) -> Iterator[Run]:
    number = sum(len(run.trainings) for run in runs)
    limit = max(FEWEST, min(MOST, POINTS // max(number, 1)))
    for run in runs:
        read_ones = []
        for training in run.trainings:
            metrics = read_metrics(training.folder / METRICS, limit)
            if metrics.broken:
                place = f"{run.title}/{training.name}/{METRICS}"
                problems.append(Problem(place, f"has {metrics.broken} lines that cannot be read; they are left out"))
            read_ones.append(replace(training, metrics=metrics))
        yield replace(run, trainings=tuple(read_ones))
