"""One page about any runs: a single HTML file that opens without a network, and pictures of its figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.errors import CheckpointError, MissingPackageError, install_extra
from rankwise.files import reason
from rankwise.lab.report.comparison import paper_tables
from rankwise.lab.report.found import Found, Problem, Run, read
from rankwise.lab.report.models import models_of
from rankwise.lab.report.tables import Table, table
from rankwise.lab.report.words import Headline, headline, places_of, recipes, settings_of, status_of
from rankwise.version import VERSION

if TYPE_CHECKING:
    from rankwise.lab.report.charts import Columns, Figure

NEEDS = ("altair", "jinja2", "vl_convert")
"""What is imported of the extra `report`."""
APART = 8
"""Most runs that have a table each; of more runs, those with the same columns share one."""
LISTED = 20
"""Runs whose settings are listed; those of the others are in their folders."""


@dataclass(frozen=True)
class Page:
    """What a page shows."""

    found: Found
    headline: Headline
    figures: Sequence[Figure]
    datasets: Mapping[str, Columns]
    tables: Sequence[tuple[str, Table]]

    def html(self, *, reload_seconds: int | None = None) -> str:
        """The page; with `reload_seconds` it loads itself again, to show a run that goes on."""
        return _html(self, reload_seconds)

    def status(self) -> str:
        """How far runs are that are not finished."""
        return " ".join(line for run in self.found.runs if (line := status_of(run)))

    def pictures(self, form: str) -> dict[str, bytes]:
        """A file for every chart, by name."""
        from rankwise.lab.report.charts import picture

        made = {}
        for figure in self.figures:
            for place, chart in enumerate(figure.charts):
                number = f"-{place + 1}" if len(figure.charts) > 1 else ""
                made[f"{figure.name}{number}.{form}"] = picture(chart, self.datasets, form)
        return made


def missing_packages() -> str | None:
    """The line about what a page needs and is not installed; None where everything is."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    return f"A page needs {' and '.join(missing)}, not installed here. {install_extra('report')}" if missing else None


def make_page(paths: Sequence[Path]) -> Page:
    """Read everything at these paths and draw it. What cannot be read is named on the page."""
    if (line := missing_packages()) is not None:
        raise MissingPackageError(line)
    found = read(paths)
    if not found.runs:
        why = "; ".join(f"{problem.place} {problem.why}" for problem in found.problems)
        raise CheckpointError(f"A report must be of at least one run or compressed model, but {why}.")
    problems = list(found.problems)
    datasets: dict[str, Columns] = {}
    figures = _figures(found.runs, datasets)
    tables = [*paper_tables(found.runs), *_tables(found.runs, problems)]
    return Page(Found(found.runs, tuple(problems)), headline(found.runs), figures, datasets, tables)


def _figures(runs: Sequence[Run], datasets: dict[str, Columns]) -> list[Figure]:
    from rankwise.lab.report import figures, training_figures

    models, trained = models_of(runs), training_figures.trained(runs)
    return [
        *figures.quality(runs, models, datasets),
        *figures.network(models, datasets),
        *figures.parts(models, datasets),
        *training_figures.gates(trained, runs, datasets),
        *training_figures.over_steps(trained, runs, datasets),
    ]


def _tables(runs: Sequence[Run], problems: list[Problem]) -> list[tuple[str, Table]]:
    """A table for every run or sweep that has finished models."""
    made = []
    for title in dict.fromkeys(run.title for run in runs):
        records = [run.record for run in runs if run.title == title and run.rows]
        try:
            if records:
                made.append((title, without_empty_columns(table({"runs": records}))))
        except (KeyError, TypeError, ValueError) as error:
            problems.append(Problem(title, f"has rows that make no table: {error!r}"))
    return made if len(made) <= APART else _joined(made)


def _joined(tables: Sequence[tuple[str, Table]]) -> list[tuple[str, Table]]:
    """Tables with the same columns as one, whose rows say what run they are of."""
    groups: dict[tuple[str, ...], list[tuple[str, Table]]] = {}
    for title, found in tables:
        groups.setdefault(found.columns, []).append((title, found))
    joined = []
    for columns, group in groups.items():
        rows = tuple((f"{title}: {row[0]}", *row[1:]) for title, found in group for row in found.rows)
        notes = tuple(dict.fromkeys(note for _, found in group for note in found.notes))
        joined.append((f"{len(group)} runs" if len(group) > 1 else group[0][0], Table(columns, rows, notes)))
    return joined


def without_empty_columns(found: Table) -> Table:
    """The table without columns in which nothing stands."""
    kept = [i for i, name in enumerate(found.columns) if not name or any(row[i] for row in found.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in found.rows)
    return Table(tuple(found.columns[i] for i in kept), rows, found.notes)


def write_page(page: Page, file: Path, *, reload_seconds: int | None = None) -> None:
    """Write the page; one that is being read is replaced as a whole."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page.html(reload_seconds=reload_seconds), encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as error:
        raise CheckpointError(
            f"The page must be written to {file}, but that failed: {reason(error)}. Choose another place with -o."
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


@cache
def _library() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed, which draws the charts."""
    import vl_convert

    # its stub asks for an argument that has a default
    code: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    # the text of a script element ends at its closing tag, wherever that stands
    return code.replace("</script", "<\\/script")


def _json(content: Any) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _html(page: Page, reload_seconds: int | None) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from rankwise.lab.report import charts

    runs = page.found.runs
    here = files("rankwise.lab.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    models = models_of(runs)
    methods = {model.series: model.row["method"] for model in models}
    methods |= {training.series: training.method for run in runs for training in run.trainings}
    known = list(dict.fromkeys(methods.values()))
    content = {
        "config": charts.CONFIG,
        "figures": {figure.name: [chart.spec for chart in figure.charts] for figure in page.figures},
        "datasets": {name: charts.compact(columns) for name, columns in page.datasets.items()},
        "reload": reload_seconds,
    }
    titles = list(dict.fromkeys(run.title for run in runs))
    return template.render(
        page=page,
        live=reload_seconds is not None,
        css=Markup(here.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(here.joinpath("page.js").read_text(encoding="utf-8")),
        library=Markup(_library()),
        content=Markup(_json(content)),
        series=[(name, charts.method_colour(methods[name], known)) for name in sorted(methods)],
        title=titles[0] if len(titles) == 1 else f"{len(titles)} runs",
        statuses=[line for run in runs if (line := status_of(run))],
        recipes=recipes(runs),
        settings=[(title, settings_of(next(run for run in runs if run.title == title))) for title in titles[:LISTED]],
        num_unlisted=max(0, len(titles) - LISTED),
        places=places_of(runs),
        made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=VERSION,
    )
