"""Figures of what came out: quality against size, and where in the network the parameters went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from rankwise.lab.report.charts import SHAPES, SHOWN, Chart, Columns, Control, Figure, colour_scale
from rankwise.lab.report.found import Run
from rankwise.lab.report.models import Model, Point, comparable, points_of
from rankwise.lab.report.network import CLUSTERS, OTHER, PARTS, REST, by_part, place_of
from rankwise.lab.report.paper import PaperTable, paper_of
from rankwise.lab.report.tables import MEASURES, measured_on

IS_SHOWN = f"indexof({SHOWN}, datum.series) >= 0"
GAP = 0.055
"""The least distance of two labels, as a part of the height."""
LABELS = 16
"""Most series that are labelled in a chart."""
BARS = 24
"""Most models that are shown part by part."""
MAPS = 60
"""Most models whose matrices can be looked at."""
CELL = 34
"""Pixels of a matrix in the map, up to which it is drawn as wide as there is room."""
HIGHER = {"f1", "spearman", "matthews", "pearson", "accuracy"}
"""Measures of which more is better."""

Data = dict[str, Columns]


def tip(field: str, title: str = "", form: str = "") -> alt.Tooltip:
    """A line of a tooltip."""
    return alt.Tooltip(field, title=title or field.split(":")[0], format=form or alt.Undefined)


def shown_of(models: Iterable[Any]) -> list[str]:
    """All series, which are shown at first."""
    return sorted({model.series for model in models})


def chart_of(chart: Any, shown: Sequence[str], *, width: int | None = None, about: str) -> Chart:
    """A chart as wide as its place, with the series that a reader chose."""
    made = chart.properties(width="container").add_params(alt.param(name=SHOWN, value=list(shown)))
    spec = made.to_dict()
    spec.pop("config", None)
    spec.pop("$schema", None)
    return Chart({**spec, "autosize": {"type": "fit-x", "contains": "padding"}}, width, about)


def quality(runs: Sequence[Run], models: Sequence[Model], data: Data) -> Iterator[Figure]:
    """Quality against size, one figure for all runs that can be compared."""
    shown = shown_of(models)
    groups = list(comparable(runs))
    for number, (measure, group) in enumerate(groups):
        points = points_of([model for model in models if model.run in group])
        if len({point.parameters for point in points}) < 2:
            continue
        name = f"quality-{number + 1}" if number else "quality"
        paper = next((found for run in group if (found := paper_of(run.experiment)) is not None), None)
        data[name] = _quality_data(points, paper)
        better = "higher" if measure in HIGHER else "lower"
        unit = MEASURES.get(measure, measure)
        seeds = max(len(point.models) for point in points)
        about = f"Each mark is a model; {better} is better."
        about += f" Marks are means over {seeds} seeds, bars reach from the worst to the best." if seeds > 1 else ""
        about += " Hollow diamonds are the paper's figures, as printed." if paper is not None else ""
        title = _titled("Quality against size", [point.title for point in points] if len(groups) > 1 else [])
        drawn = _quality_chart(
            name, f"{measured_on(group[0].record)} {unit} ({better} is better)", points, data[name], paper
        )
        words = f"{unit} of {len(points)} models against their number of parameters"
        yield Figure(name, title, about, [chart_of(drawn, shown, about=words)])


def _quality_data(points: Sequence[Point], paper: PaperTable | None) -> Columns:
    rows: list[dict[str, Any]] = []
    variants: dict[str, list[str]] = {}
    for point in points:
        known = variants.setdefault(point.method, [])
        known += [point.series] if point.series not in known else []
        lost = point.lost
        rows.append({
            "run": point.title, "series": point.series, "method": point.method, "model": point.row["name"],
            "parameters": point.parameters, "value": point.mean, "low": min(point.values), "high": max(point.values),
            "seeds": len(point.values), "lost": "" if lost is None else f"{lost:+.1%}",
            "removed": f"{point.row['removed']:.1%}", "shape": SHAPES[known.index(point.series) % len(SHAPES)],
            "source": "ours", "label": "", "label_at": point.mean,
        })  # fmt: skip
    _add_labels(rows)
    for method, removed, parameters, value in paper.points() if paper is not None else ():
        rows.append({
            "run": "the paper", "series": method, "method": method, "model": f"{method}, paper",
            "parameters": parameters, "value": value, "low": value, "high": value, "seeds": 1, "lost": "",
            "removed": removed, "shape": "diamond", "source": "paper", "label": "", "label_at": value,
        })  # fmt: skip
    return {key: [row[key] for row in rows] for key in rows[0]}


def _add_labels(rows: list[dict[str, Any]]) -> None:
    """Label each series once, at its smallest model, and move labels apart that would lie on each other."""
    smallest: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["parameters"]):
        smallest.setdefault(row["series"], row)
    labelled = sorted(smallest.values(), key=lambda row: float(row["value"]))
    values = [float(row[key]) for row in rows for key in ("low", "high")]
    least = GAP * (max(values) - min(values))
    for place, row in enumerate(labelled if len(labelled) <= LABELS else ()):
        row["label"] = row["series"]
        # only those of models of about one size can meet
        beside = [one["label_at"] for one in labelled[:place] if abs(one["parameters"] / row["parameters"] - 1) < 0.5]
        row["label_at"] = max([float(row["value"]), *(at + least for at in beside)])


def _range(values: Sequence[float]) -> alt.Scale:
    """A scale with room around the values; differences that mean nothing are not blown up."""
    low, high = min(values), max(values)
    middle, half = (low + high) / 2, 0.56 * max(high - low, 0.02 * abs(high)) or 1.0
    # no measure of ours is below -1, and few are below 0
    return alt.Scale(
        domain=[max(middle - half, 0.0) if low >= 0 else middle - half, middle + half], nice=False, zero=False
    )


def _sizes(values: Sequence[float]) -> alt.Scale:
    """A scale of sizes, with room for labels to the left; logarithmic where they differ by more than three times."""
    low, high = min(values), max(values)
    if high <= 3 * low:
        room = (high - low) or high
        return alt.Scale(domain=[max(low - 0.16 * room, 0.0), high + 0.05 * room], nice=False, zero=False)
    ratio = high / low
    return alt.Scale(type="log", domain=[low / ratio**0.16, high * ratio**0.05], nice=False)


def _quality_chart(name: str, title: str, points: Sequence[Point], columns: Columns, paper: PaperTable | None) -> Any:
    methods = [*(point.method for point in points), *(["dense"] if paper is not None else []), *columns["method"]]
    values = [*columns["low"], *columns["high"], *columns["label_at"]]
    # to the left there is room for labels
    x = alt.X("parameters:Q", title="parameters", axis=alt.Axis(format=".3~s", tickCount=6),
              scale=_sizes(columns["parameters"]))  # fmt: skip
    y = alt.Y("value:Q", title=title, scale=_range(values))
    colour = alt.Color("method:N", scale=alt.Scale(**colour_scale(methods)), legend=None)
    told = [
        tip("model:N"), tip("run:N"), tip("parameters:Q", form=",.0f"), tip("removed:N"),
        tip("value:Q", title.split(" (")[0], ".4~f"), tip("lost:N", "against dense"), tip("seeds:Q"),
    ]  # fmt: skip
    base = alt.Chart(alt.NamedData(name)).transform_filter(IS_SHOWN)
    ours, theirs = base.transform_filter("datum.source == 'ours'"), base.transform_filter("datum.source == 'paper'")
    drawn = ours.transform_filter("datum.method != 'dense'")
    lines = drawn.mark_line(strokeWidth=1.5, opacity=0.55).encode(x, y, colour, detail=["series:N", "run:N"])
    bars = ours.mark_rule(strokeWidth=2, opacity=0.5).encode(x, alt.Y("low:Q", title=title), alt.Y2("high:Q"), colour)
    marks = ours.mark_point(filled=True, size=70, opacity=1).encode(
        x, y, colour, shape=alt.Shape("shape:N", scale=None), tooltip=told
    )
    printed = theirs.mark_point(filled=False, size=60, shape="diamond", strokeWidth=1.5).encode(
        x, y, colour, tooltip=told
    )
    # dense models stand at the right, so their labels are to the left of them as well
    labels = ours.transform_filter("datum.label != ''").mark_text(align="right", dx=-9, fontWeight=600).encode(
        x, alt.Y("label_at:Q", title=title), colour, text="label:N"
    )  # fmt: skip
    level = ours.transform_filter("datum.model == 'dense'").mark_rule(strokeDash=[2, 4], opacity=0.6).encode(y, colour)
    layers = [level, lines, bars, *([printed] if paper is not None else []), marks, labels]
    return alt.layer(*layers).properties(height=320)


def parts(models: Sequence[Model], data: Data) -> Iterator[Figure]:
    """Where the parameters are: every model part by part, the dense one first; a figure for each network."""
    groups = by_network(_first_seeds(models), "matrices")
    for number, group in enumerate(groups):
        name, title = _numbered("parts", "Where the parameters are", number, group, several=len(groups) > 1)
        rows = list(_part_rows(group[:BARS]))
        data[name] = {key: [row[key] for row in rows] for key in rows[0]}
        order = sorted(dict.fromkeys(row["part"] for row in rows), key=_rank_of_part)
        clusters = any(part.startswith("words, cluster") for part in order)
        about = "Parameters that are left in each part of the network" + (
            ", and in each cluster of words, the most frequent first." if clusters else "."
        )
        left = len(group) - BARS
        chart = chart_of(_part_chart(name, rows, order), shown_of(models), about=about)
        yield Figure(name, title, about, [chart], notes=[f"{left} further models are not shown."] if left > 0 else [])


def by_network(models: Iterable[Model], key: str) -> list[list[Model]]:
    """Models whose rows have this key, those with the same matrices together."""
    groups: dict[tuple[str, ...], list[Model]] = {}
    for model in models:
        if model.row.get(key):
            groups.setdefault(tuple(sorted(model.row[key])), []).append(model)
    return list(groups.values())


def _numbered(name: str, title: str, number: int, models: Sequence[Model], *, several: bool) -> tuple[str, str]:
    """Name and title of one of several figures of a kind."""
    titles = [model.run.title for model in models] if several else []
    return (f"{name}-{number + 1}" if number else name), _titled(title, titles)


def _titled(title: str, of: Iterable[str]) -> str:
    """A title with the runs that it is of, the first of them where there are many."""
    names = list(dict.fromkeys(of))
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return f"{title}: {', '.join(names[:2] if more else names)}{more}" if names else title


def _part_rows(models: Sequence[Model]) -> Iterator[dict[str, Any]]:
    labels = _short(models)
    begun: set[int] = set()
    for model in models:
        dense = model.run.dense
        total = (dense or {}).get("parameters") or sum(pair[0] for pair in model.row["matrices"].values())
        found = by_part(model.row["matrices"], (total, model.row["parameters"]))
        which = [(1, labels[model.key])]
        if total not in begun:
            begun.add(total)
            which.insert(0, (0, "dense" if len(begun) == 1 else f"dense ({model.run.title})"))
        for place, label in which:
            for part, pair in found.items():
                share = pair[1] / pair[0] if place and pair[0] else 1.0
                yield {
                    "model": label, "part": part, "parameters": pair[place], "kept": f"{share:.1%}",
                    "series": model.series if place else "dense", "dense": pair[0],
                }  # fmt: skip


def _part_chart(name: str, rows: Sequence[Mapping[str, Any]], order: Sequence[str]) -> Any:
    colours = alt.Scale(domain=order, range=[_part_colour(part, order) for part in order])
    bars = list(dict.fromkeys(row["model"] for row in rows))
    return (
        alt.Chart(alt.NamedData(name))
        .transform_filter(f"{IS_SHOWN} || datum.series == 'dense'")
        .transform_calculate(order=f"indexof({list(order)!r}, datum.part)")
        .mark_bar(height={"band": 0.72})
        .encode(
            alt.Y("model:N", sort=bars, title=None, axis=alt.Axis(labelLimit=190, labelColor="var(--text)")),
            alt.X("parameters:Q", title="parameters", axis=alt.Axis(format=".3~s", grid=True, tickCount=6)),
            alt.Color("part:N", scale=colours, legend=alt.Legend(title=None, columns=4)),
            alt.Order("order:Q"),
            tooltip=[
                tip("model:N"), tip("part:N"), tip("parameters:Q", form=","), tip("dense:Q", form=","), tip("kept:N"),
            ],
        )
        .properties(height=24 * len(bars))
    )  # fmt: skip


def _short(models: Sequence[Model]) -> dict[str, str]:
    """Names of models without what is the same in all of them."""
    one_run = len({model.run.title for model in models}) == 1
    return {model.key: model.row["name"] if one_run else f"{model.row['name']} ({model.run.title})" for model in models}


def _first_seeds(models: Iterable[Model]) -> list[Model]:
    """One model for each run and name: seeds differ little in where they keep parameters."""
    return list({(model.run.title, model.row["name"]): model for model in reversed(list(models))}.values())[::-1]


def _rank_of_part(part: str) -> tuple[int, str]:
    names = [name for name, _ in PARTS]
    if part in names:
        return names.index(part), part
    return (len(names) + 2 if part == REST else len(names) + 1 if part == OTHER else len(names)), part


def _part_colour(part: str, order: Sequence[str]) -> str:
    words = [name for name in order if name.startswith("words")]
    if part in words:
        return f"var(--words-{words.index(part) % 6})"
    return f"var(--part-{part.replace(' ', '-')})"


def network(models: Sequence[Model], data: Data) -> Iterator[Figure]:
    """The rank that every matrix keeps, as a map: layers to the right, matrices of a layer below each other."""
    groups = by_network(_first_seeds(models), "ranks")
    for number, group in enumerate(groups):
        name, title = _numbered("network", "Rank kept in each layer", number, group, several=len(groups) > 1)
        labels = _short(group[:MAPS])
        rows = [row for model in group[:MAPS] for row in _map_rows(labels[model.key], model.row)]
        data[name] = {key: [row[key] for row in rows] for key in rows[0]}
        options = list(labels.values())
        names = sorted({row["part"] for row in rows}, key=lambda part: _rank_of_part(part)[0])
        # rows of all parts begin at the same place
        extent = min(170, 7 * max(len(row["kind"]) for row in rows))
        of = {part: [row for row in rows if row["part"] == part] for part in names}
        charts = [_map_chart(name, part, found, options[0], extent) for part, found in of.items()]
        about = (
            "Components that are kept, of each matrix; darker is more of them. Hover or tap for shape, rank and share. "
            "0 means that the matrix is gone."
        )
        yield Figure(name, title, about, charts, [Control("model", "Model", options, value=options[0])])


def _map_rows(label: str, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, (outputs, inputs, kept, of) in row["ranks"].items():
        place = place_of(name)
        dense, small = row.get("matrices", {}).get(name, (0, 0))
        yield {
            "model": label, "name": name, "part": place.part, "kind": place.kind,
            "layer": "" if place.layer is None else str(place.layer + (place.part == CLUSTERS)),
            "rank": kept, "of": of, "share": kept / of if of else 0.0, "shape": f"{outputs:,} x {inputs:,}",
            "parameters": f"{small:,} of {dense:,}" if dense else "",
        }  # fmt: skip


def _map_chart(name: str, part: str, rows: Sequence[Mapping[str, Any]], first: str, extent: int) -> Chart:
    layers = sorted({row["layer"] for row in rows}, key=lambda layer: int(layer or 0))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    axis = None if layers == [""] else alt.Axis(labelAngle=0, ticks=False, domain=False, labelOverlap=True)
    names = alt.Axis(labelColor="var(--text)", labelLimit=170, minExtent=extent)
    title = "word cluster, the most frequent first" if part == CLUSTERS else "layer"
    base = (
        alt.Chart(alt.NamedData(name))
        .transform_filter(f"datum.part == {part!r} && datum.model == model")
        .encode(
            alt.X("layer:O", sort=layers, title=None if layers == [""] else title, axis=axis),
            alt.Y("kind:N", sort=kinds, title=None, axis=names),
            tooltip=[
                tip("name:N", "matrix"), tip("shape:N"), tip("rank:Q", "kept"), tip("of:Q"), tip("share:Q", form=".1%"),
                tip("parameters:N"),
            ],
        )
    )  # fmt: skip
    fill = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.06, 1.0]), legend=None)
    cells = base.mark_rect(fill="var(--accent)", stroke="var(--paper)", strokeWidth=2, cornerRadius=3).encode(fill)
    chart = cells
    if len(layers) <= 24:
        on = alt.value("var(--on-accent)")
        colour: Any = alt.condition("datum.share > 0.55", on, alt.value("var(--text)"))
        chart = cells + base.mark_text(fontSize=11).encode(text=alt.Text("rank:Q", format=","), color=colour)
    chart = chart.properties(height=(CELL - 4) * len(kinds), title=part).add_params(
        alt.param(name="model", value=first)
    )
    width = None if len(layers) > 12 else extent + 30 + max(2, len(layers)) * (2 * CELL)
    words = f"rank kept by {len(kinds)} matrices in {len(layers)} layers: {part}"
    return chart_of(chart, [], width=width, about=words)
