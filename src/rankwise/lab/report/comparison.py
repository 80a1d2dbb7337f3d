"""Tables with the paper's figures and ours side by side. Each one's loss is against its own dense model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankwise.lab.report.found import Run
from rankwise.lab.report.models import Model
from rankwise.lab.report.paper import FACTORIZATION, LANGUAGE_MODELS, PaperTable
from rankwise.lab.report.tables import MEASURES, TAUGHT, Table, control_of, spread

VARIANTS = (
    ("fac, from scratch", "fac", "fac-{}-scratch"),
    ("fac, from the base", None, "fac-{}"),
    ("fac, from the base, distilled", None, "fac-{}-distilled"),
    ("agp *", "agp", "agp-{}"),
    ("np-l0", "np-l0", "np-l0-{}"),
    ("flop-agp", "flop-agp", "flop-agp-{}"),
    ("flop-l0", "flop-l0", "flop-l0-{}"),
    ("flop-l0, published recipe", None, "flop-l0-{}-published"),
    ("flop-l0, distilled", None, "flop-l0-{}-distilled"),
    ("svd, one-shot, then trained", None, "svd-{}"),
    ("svd, one-shot, distilled", None, "svd-{}-distilled"),
)
"""What a row is called, the paper's method that it stands beside, and our cell."""
DIGITS = {"bits_per_character": (".2f", ".4f"), "perplexity": (".1f", ".2f")}
"""As the paper prints a measure, and as we do."""

OURS = 5
"""The column of a comparison in which our figures begin."""

Source = tuple[Mapping[str, Any] | None, str]
"""A record, and the name of a base in it."""


@dataclass(frozen=True)
class Cell:
    """One measured model, and the dense model of the same seed that trained as long."""

    row: Mapping[str, Any]
    seed: int
    control: Mapping[str, Any] | None

    def lost(self, measure: str) -> float | None:
        """How much larger its figure on the test text is than the control's."""
        if self.control is None or self.row is self.control:
            return None
        found: float = self.row["test"][measure] / self.control["test"][measure] - 1
        return found


def cells(record: Mapping[str, Any] | None, base: str, name: str) -> list[Cell]:
    """The models of that name, one per seed, among those from the bases called `base`."""
    runs = [run for run in (record or {}).get("runs", []) if run["name"] == base]
    controls = {run["seed"]: row for run in reversed(runs) for row in run["rows"] if row["name"] == "dense"}
    return [
        Cell(row, run["seed"], _taught(run, row) or controls.get(run["seed"]))
        for run in runs
        for row in run["rows"]
        if row["name"] == name
    ]


def _taught(run: Mapping[str, Any], row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    control = control_of(run["rows"], row)
    return control if control is not None and control["name"] == TAUGHT else None


def bases(record: Mapping[str, Any] | None, base: str) -> list[Mapping[str, Any]]:
    """The dense bases that were trained under that name, in order."""
    return [run.get("base") for run in (record or {}).get("runs", []) if run["name"] == base]


def comparison(paper: PaperTable, own: Source, plain: Source, measure: str) -> Table:
    """Every row of the paper, and every one of ours.

    Args:
        own: where our factorized models are.
        plain: where our models without factorization are, which np-l0 prunes.
        measure: "bits_per_character" or "perplexity".
    """
    printed = DIGITS[measure][0]
    rows = [
        ("dense", "", paper.dense.size, format(paper.dense.value, printed), "", *_ours(cells(*own, "dense"), measure))
    ]
    if distilled := cells(*own, "dense-distilled"):
        rows.append(("dense, distilled", "", "", "", "", *_ours(distilled, measure)))
    for level in sorted({level for level, _ in paper.rows}):
        for name, method, cell in VARIANTS:
            figure = paper.rows.get((level, method)) if method else None
            found = cells(*(plain if method == "np-l0" else own), cell.format(level))
            if figure is None and not found:
                continue
            lost = paper.lost(level, method) if method else None
            theirs = ("", "", "") if figure is None else (figure.size, format(figure.value, printed), _percent(lost))
            rows.append((name, f"{level}%", *theirs, *_ours(found, measure)))
    unit = MEASURES[measure]
    columns = (
        "", "removed", "paper: size", f"paper: {unit}", "paper: lost",
        "ours: parameters", f"ours: valid {unit}", f"ours: test {unit}", "ours: lost",
    )  # fmt: skip
    return Table(columns, tuple(rows), tuple(_notes(own, plain, measure)))


def paper_tables(runs: Iterable[Run]) -> Iterator[tuple[str, Table]]:
    """(title, table) of each table of the paper that some of these runs belong to, ours beside the paper's."""
    runs = list(runs)
    for paper, measure in LANGUAGE_MODELS.items():
        own = [_in_cells(run, "own") for run in runs if paper.is_of(run.experiment)]
        plain = [_in_cells(run, "plain") for run in runs if paper.is_of(run.experiment, plain=True)]
        if own or plain:
            table = comparison(paper, ({"runs": own}, "own"), ({"runs": plain}, "plain"), measure)
            if not any(row[OURS] for row in table.rows):
                continue
            yield paper.title, replace(table, notes=tuple(note for note in table.notes if note.startswith("\\*")))


def _in_cells(run: Run, name: str) -> dict[str, Any]:
    """The record of a run with rows named by method and percentage, as in a table of results."""
    rows = []
    # the paper's percentages are of the prunable part
    of_prunable = (run.experiment.get("budget") or {}).get("of") != "model"
    for row in run.rows:
        model = Model(run, row)
        if not (of_prunable or model.is_dense):
            continue
        # only what the run was asked for is a cell: a model of another size is none
        level = model.level if row["name"] == model.series else None
        rows.append({**row, "name": row["name"] if level is None else f"{row['name']}-{level:g}"})
    return {**run.record, "name": name, "seed": run.seed, "rows": rows}


def measured(own: Source, levels: Iterable[int], measure: str) -> Table:
    """Ours alone, of a text that the paper has no figures for."""
    rows = [("dense", "", *_ours(cells(*own, "dense"), measure))]
    for level in levels:
        for name, _, cell in VARIANTS:
            if found := cells(*own, cell.format(level)):
                rows.append((name, f"{level}%", *_ours(found, measure)))
    unit = MEASURES[measure]
    columns = ("", "removed", "parameters", f"valid {unit}", f"test {unit}", "lost")
    return Table(columns, tuple(rows), tuple(_notes(own, (None, ""), measure)))


def factorization(own: Source, small: Source, large: Source) -> Table:
    """NP-L0, which closes inputs of plain matrices, against FLOP-L0, at every size."""
    measure, levels = "bits_per_character", (70, 80, 85, 90)
    rows = []
    ours = (("NP-L0, small", small, "np-l0-{}"), ("NP-L0, large", large, "np-l0-{}"), ("FLOP-L0", own, "flop-l0-{}"))
    for name, source, cell in ours:
        dense, values = FACTORIZATION[name]
        printed = [f"{value:.2f} ({_percent(value / dense.value - 1)})" for value in values.values()]
        rows.append((name, "paper", dense.size, f"{dense.value:.2f}", *printed))
        size = next((f"{base['parameters']:,}" for base in bases(*source)), "")
        measured = [_with_loss(cells(*source, cell.format(level)), measure) for level in levels]
        rows.append((name, "ours", size, spread(_values(cells(*source, "dense"), "test", measure)), *measured))
    return Table(("", "", "size", "dense", *(f"{level}% removed" for level in levels)), tuple(rows))


def _ours(found: Iterable[Cell], measure: str) -> tuple[str, str, str, str]:
    found = list(found)
    if not found:
        return "", "", "", ""
    exact = DIGITS[measure][1]
    lost = [100 * loss for cell in found if (loss := cell.lost(measure)) is not None]
    return (
        f"{found[0].row['parameters']:,}",
        spread(_values(found, "valid", measure), exact),
        spread(_values(found, "test", measure), exact),
        spread(lost, "+.1f", "%"),
    )


def _with_loss(found: list[Cell], measure: str) -> str:
    _, _, test, lost = _ours(found, measure)
    return f"{test} ({lost})" if lost else test


def _values(found: Iterable[Cell], split: str, measure: str) -> list[float]:
    return [cell.row[split][measure] for cell in found]


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:+.1f}%"


def _notes(own: Source, plain: Source, measure: str) -> Iterable[str]:
    if any(row["nonzeros"] for run in (own[0] or {}).get("runs", []) for row in run["rows"]):
        yield "\\* unstructured: non-zero parameters are counted, the matrices keep their shape."
    for record, name in (own, plain):
        found = [base for base in bases(record, name) if base is not None]
        experiment = next((run["experiment"] for run in (record or {}).get("runs", []) if run["name"] == name), None)
        if not found or not experiment or not experiment.get("base"):
            continue
        yield (
            f"`{name}`: {found[0]['steps']:,} steps of the dense base, whose learning rate follows the schedule "
            f"*{experiment['base']['schedule']}*, then {experiment['training']['steps']:,} of every row"
            + (", the dense control too" if cells(record, name, "dense") else "")
            + f"; sizes are reached after {experiment['method'].get('anneal_steps', 0):,}"
            + _dropout(record, name, experiment["model"]["dropout"])
            + "; the base on validation text: "
            + ", ".join(format(base["valid"][measure], DIGITS[measure][1]) for base in found)
            + (" (the same base, trained again for the rows that were missing)." if _again(record, name) else ".")
        )


def _dropout(record: Mapping[str, Any] | None, name: str, dense: float) -> str:
    """How low it goes, where the smaller models have less."""
    runs = [run for run in (record or {})["runs"] if run["name"] == name]
    lowest = min((row["dropout"] for run in runs for row in run["rows"] if "dropout" in row), default=dense)
    return f"; dropout {dense:g} of the dense model, down to {lowest:g} of the smallest" if lowest < dense else ""


def _again(record: Mapping[str, Any] | None, name: str) -> bool:
    """Whether a base of the same seed was trained more than once."""
    seeds = [run["seed"] for run in (record or {}).get("runs", []) if run["name"] == name]
    return len(set(seeds)) < len(seeds)
