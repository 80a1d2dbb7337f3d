"""Figures of how it went: gates, sizes, losses and speed over the steps of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np

from rankwise.lab.report.charts import Columns, Control, Figure, colour_scale
from rankwise.lab.report.curves import LOSSES, SIZES, SPEEDS
from rankwise.lab.report.figures import IS_SHOWN, Data, chart_of, shown_of, tip
from rankwise.lab.report.found import Run, Training

NUMBERS = 40_000
"""About so many numbers all histograms of gates have together."""
FEWEST_MOMENTS = 8
"""Moments of a training whose histograms are shown, however many trainings there are."""
BINS = 20
"""Equal parts of [0, 1] that a training counts gates in."""
HEIGHT = 240
UNIT = alt.Scale(domain=[0, 1])
VISIBLE = 0.985
"""The part of all losses that an axis reaches up to."""

ABOUT_GATES = (
    "How many components are closed (left) and open (right). Move the slider, or use the arrow keys, to go through "
    "training; below, every moment side by side, darker where there are more components."
)

Trained = Sequence[tuple[Run, Training]]


def trained(runs: Sequence[Run]) -> list[tuple[Run, Training]]:
    """Every training of every run."""
    return [(run, training) for run in runs for training in run.trainings]


def label_of(run: Run, training: Training, runs: Sequence[Run]) -> str:
    """A name for a training that no other one has."""
    words = [training.name]
    if len({other.title for other in runs}) > 1:
        words.append(f"({run.title})")
    if any(other.title == run.title and other.seed != run.seed for other in runs):
        words.append(f"seed {run.seed}")
    return " ".join(words)


def gates(found: Trained, runs: Sequence[Run], data: Data) -> Iterator[Figure]:
    """How gates open and close: histograms to scrub through, and all of them at once; a figure for each network."""
    groups: dict[tuple[str, ...], list[tuple[Run, Training]]] = {}
    for run, training in found:
        if training.metrics.gates and len(next(iter(training.metrics.gates.values()))[0]) == BINS:
            groups.setdefault(tuple(training.metrics.gates), []).append((run, training))
    for number, (names, group) in enumerate(groups.items()):
        name = "gates" if number == 0 else f"gates-{number + 1}"
        # the first and the last, which the paper shows, come first
        matrices = list(dict.fromkeys((names[0], names[-1], *names)))
        data[name], labels, matrices = _gate_data(group, runs, matrices, NUMBERS // len(groups))
        most = max(data[name]["point"])
        slots = matrices[:2]
        signals = [alt.param(name="model", value=labels[0]), alt.param(name="point", value=most)]
        signals += [alt.param(name=f"matrix{slot}", value=matrix) for slot, matrix in enumerate(slots)]
        charts = [
            chart_of(draw(name, slot).add_params(*signals), [], about=f"how far the gates of {matrix} are open")
            for draw in (_gate_bars, _gate_history)
            for slot, matrix in enumerate(slots)
        ]
        controls = [Control("point", "Step of training", last=most, value=most)]
        controls += [Control("model", "Model", labels, value=labels[0])]
        controls += [Control(f"matrix{slot}", "Matrix", matrices, value=matrix) for slot, matrix in enumerate(slots)]
        title = "Gates over training" + (f": {group[0][0].title}" if len(groups) > 1 else "")
        yield Figure(name, title, ABOUT_GATES, charts, controls, columns=len(slots))


def _gate_data(
    group: Trained, runs: Sequence[Run], matrices: Sequence[str], room: int
) -> tuple[Columns, list[str], list[str]]:
    """Columns, labels and matrices. Where there are many trainings, two matrices and fewer moments of each."""
    moments = max(len(training.metrics.gate_steps) for _, training in group)
    moments = min(moments, max(FEWEST_MOMENTS, room // (2 * BINS * len(group))))
    matrices = matrices[: max(2, room // (moments * BINS * len(group)))]
    columns: Columns = {key: [] for key in ("model", "matrix", "point", "step", "end", "bin", "count", "share")}
    labels = [label_of(run, training, runs) for run, training in group]
    for label, (_, training) in zip(labels, group, strict=True):
        for matrix in matrices:
            _add_histograms(columns, label, matrix, training, moments)
    return columns, labels, list(matrices)


def _add_histograms(columns: Columns, label: str, matrix: str, training: Training, moments: int) -> None:
    steps, histograms = training.metrics.gate_steps, (training.metrics.gates or {})[matrix]
    places = sorted(set(np.linspace(0, len(steps) - 1, min(moments, len(steps))).round().astype(int).tolist()))
    ends = [*(steps[place] for place in places[1:]), max(training.metrics.last_step, steps[places[-1]] + 1)]
    for point, (place, end) in enumerate(zip(places, ends, strict=True)):
        total = sum(histograms[place]) or 1
        for number, count in enumerate(histograms[place]):
            if count:
                row = (label, matrix, point, steps[place], end, number, count, round(count / total, 4))
                for key, value in zip(columns, row, strict=True):
                    columns[key].append(value)


def _of_slot(name: str, slot: int) -> Any:
    own = f"datum.model == model && datum.matrix == matrix{slot}"
    found = alt.Chart(alt.NamedData(name)).transform_filter(own)
    return found.transform_calculate(low=f"datum.bin / {BINS}", high=f"(datum.bin + 1) / {BINS}")


def _gate_bars(name: str, slot: int) -> Any:
    """The histogram of one moment."""
    # a shorter training stands still at its end
    now = _of_slot(name, slot).transform_joinaggregate(final="max(point)")
    now = now.transform_filter("datum.point == min(point, datum.final)")
    bars = now.transform_calculate(zero="0").mark_rect(fill="var(--accent)", stroke="var(--paper)").encode(
        alt.X("low:Q", title="how far open", scale=UNIT, axis=alt.Axis(format=".1f", tickCount=5)),
        alt.X2("high:Q"),
        alt.Y("share:Q", title=None, scale=UNIT, axis=alt.Axis(format="%", tickCount=4, minExtent=34)),
        alt.Y2("zero:Q"),
        tooltip=[tip("step:Q", form=","), tip("low:Q", "from"), tip("high:Q", "to"), tip("count:Q", "components")],
    )  # fmt: skip
    text = (
        now.transform_aggregate(step="max(step)", matrix="max(matrix)")
        .transform_calculate(words="datum.matrix + ', step ' + format(datum.step, ',')")
        .mark_text(align="left", baseline="bottom", fontWeight=600, color="var(--text)", x=0, y=-8)
        .encode(text="words:N")
    )
    return (bars + text).properties(height=150)


def _gate_history(name: str, slot: int) -> Any:
    """The histograms of all moments, and where the slider stands."""
    base = _of_slot(name, slot)
    cells = base.transform_calculate(shade="sqrt(datum.share)").mark_rect(fill="var(--accent)").encode(
        alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=5), scale=alt.Scale(nice=False)),
        alt.X2("end:Q"),
        alt.Y("low:Q", title="how far open", scale=UNIT, axis=alt.Axis(format=".1f", tickCount=3, minExtent=34)),
        alt.Y2("high:Q"),
        alt.Opacity("shade:Q", scale=alt.Scale(domain=[0, 1], range=[0.05, 1]), legend=None),
        tooltip=[tip("step:Q", form=","), tip("count:Q", "components")],
    )  # fmt: skip
    rule = (
        base.transform_joinaggregate(final="max(point)")
        .transform_filter("datum.point == min(point, datum.final)")
        .transform_aggregate(step="max(step)")
        .mark_rule(color="var(--text)", strokeWidth=1.5)
        .encode(alt.X("step:Q"))
    )
    return (cells + rule).properties(height=110)


def _curves(found: Trained, runs: Sequence[Run], metrics: Sequence[str]) -> Columns:
    columns: Columns = {key: [] for key in ("training", "series", "method", "metric", "step", "value")}
    for run, training in found:
        for metric in metrics:
            steps, values = training.metrics.curves.get(metric, ((), ()))
            number, label = len(steps), label_of(run, training, runs)
            constant = (label, training.series, training.method, metric)
            for key, value in zip(columns, constant, strict=False):
                columns[key] += [value] * number
            columns["step"] += [int(step) for step in steps]
            columns["value"] += [float(value) for value in values]
    return columns


def _line_chart(name: str, title: str, methods: Sequence[str], *, form: str, domain: list[float], second: str) -> Any:
    """Curves over steps. `second` is the metric that accompanies the other one, dashed or faint."""
    base = alt.Chart(alt.NamedData(name)).transform_filter(IS_SHOWN)
    is_second = f"datum.metric == '{second}'"
    faint = second == LOSSES[0]
    return base.mark_line(strokeJoin="round", clip=True).encode(
        alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=6), scale=alt.Scale(nice=False)),
        alt.Y("value:Q", title=title, scale=alt.Scale(domain=domain), axis=alt.Axis(format=form, tickCount=5)),
        alt.Color("method:N", scale=alt.Scale(**colour_scale(methods)), legend=None),
        strokeDash=alt.condition(is_second, alt.value([1, 0] if faint else [4, 3]), alt.value([1, 0])),
        strokeWidth=alt.condition(is_second, alt.value(1), alt.value(1.6)),
        strokeOpacity=alt.condition(is_second, alt.value(0.4 if faint else 0.8), alt.value(0.9)),
        detail=["training:N", "metric:N"],
        tooltip=[tip("training:N"), tip("metric:N"), tip("step:Q", form=","), tip("value:Q", form=",.4~g")],
    ).properties(height=HEIGHT)  # fmt: skip


def _domain(values: Sequence[float], *, zero: bool) -> list[float]:
    """The range of an axis. The first steps of a training may be far above all others, and need not be seen."""
    high = max(values) if zero else float(np.quantile(values, VISIBLE))
    low = 0.0 if zero else min(values)
    room = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    return [low if zero else low - room, high + room]


def over_steps(found: Trained, runs: Sequence[Run], data: Data) -> Iterator[Figure]:
    """Sizes, losses and speed over the steps of training."""
    kinds = (
        ("sizes", "Size over training", "parameters", SIZES, ".3~s", True, SIZES[1],
         "Expected size under the gates, and dashed the target that they follow."),
        ("loss", "Loss", "loss", LOSSES, ".3~f", False, LOSSES[0],
         "On validation data, of what would be exported then; faint: of training, with the gates' noise."),
        ("speed", "Training speed", "per second", SPEEDS, ".3~s", True, "",
         "Tokens (or examples) per second of training, as a running median: there is less to compute as components "
         "close."),
    )  # fmt: skip
    shown = shown_of([training for _, training in found])
    methods = [training.method for _, training in found]
    for name, title, unit, metrics, form, zero, second, about in kinds:
        columns = _curves(found, runs, metrics)
        if columns["step"]:
            data[name] = columns
            domain = _domain(columns["value"], zero=zero)
            drawn = _line_chart(name, unit, methods, form=form, domain=domain, second=second)
            yield Figure(name, title, about, [chart_of(drawn, shown, about=f"{title} of {len(found)} trainings")])
