"""Figures of how it went: gates, sizes, losses and speed over the steps of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt

from rankwise.lab.report.charts import Columns, Control, Figure, colour_scale
from rankwise.lab.report.curves import SIZES, SPEEDS
from rankwise.lab.report.figures import IS_SHOWN, Data, chart_of, shown_of, tip
from rankwise.lab.report.found import Run, Training

NUMBERS = 150_000
"""About so many numbers all histograms of gates have together."""
HEIGHT = 240

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
    """How gates open and close: histograms to scrub through, and all of them at once."""
    with_gates = [(run, training) for run, training in found if training.metrics.gates]
    if not with_gates:
        return
    columns: Columns = {key: [] for key in ("model", "matrix", "point", "step", "end", "low", "high", "share", "count")}
    labels, matrices, left, most = [], [], NUMBERS, 1
    for run, training in with_gates:
        histograms = training.metrics.gates or {}
        names = list(histograms)
        # the first and the last, which the paper shows, come first
        for place, name in enumerate(dict.fromkeys((names[0], names[-1], *names))):
            cost = sum(map(len, histograms[name]))
            if place > 1 and left < cost:
                break
            left -= cost
            matrices.append(name)
            _add_histograms(columns, label_of(run, training, runs), name, training, histograms[name])
        labels.append(label_of(run, training, runs))
        most = max(most, len(training.metrics.gate_steps))
        if left < 0:
            break
    data["gates"] = columns
    names = list(dict.fromkeys(matrices))
    slots = names[:2] if len(names) > 1 else names
    signals = [alt.param(name="model", value=labels[0]), alt.param(name="point", value=most - 1)]
    charts = []
    for draw in (_gate_bars, _gate_history):
        for slot, name in enumerate(slots):
            own = [*signals, alt.param(name=f"matrix{slot}", value=name)]
            words = f"how far the gates of {name} are open"
            charts.append(chart_of(draw(slot).add_params(*own), [], about=words))
    controls = [Control("point", "Step of training", last=most - 1, value=most - 1)]
    controls += [Control("model", "Model", labels, value=labels[0])]
    controls += [Control(f"matrix{slot}", "Matrix", names, value=name) for slot, name in enumerate(slots)]
    about = (
        "How many components are closed (left) and open (right). Move the slider, or use the arrow keys, to go through "
        "training; below, every moment side by side, darker where there are more components."
    )
    yield Figure("gates", "Gates over training", about, charts, controls, columns=len(slots))


def _add_histograms(
    columns: Columns, label: str, name: str, training: Training, histograms: Sequence[Sequence[int]]
) -> None:
    steps = training.metrics.gate_steps
    for point, (step, counts) in enumerate(zip(steps, histograms, strict=True)):
        end = steps[point + 1] if point + 1 < len(steps) else max(training.metrics.last_step, step + 1)
        total = sum(counts) or 1
        for place, count in enumerate(counts):
            if count:
                low, high = place / len(counts), (place + 1) / len(counts)
                row = (label, name, point, step, end, low, high, count / total, count)
                for key, value in zip(columns, row, strict=True):
                    columns[key].append(value)


def _of_slot(slot: int) -> Any:
    own = f"datum.model == model && datum.matrix == matrix{slot}"
    return alt.Chart(alt.NamedData("gates")).transform_filter(own)


def _gate_bars(slot: int) -> Any:
    """The histogram of one moment."""
    # a shorter training stands still at its end
    now = _of_slot(slot).transform_joinaggregate(final="max(point)")
    now = now.transform_filter("datum.point == min(point, datum.final)")
    bars = now.mark_bar(color="var(--accent)").encode(
        alt.X("low:Q", title="how far open", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".1f", tickCount=5)),
        alt.X2("high:Q"),
        alt.Y("share:Q", title="components", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=4)),
        tooltip=[tip("step:Q", form=","), tip("low:Q", "from"),
                 tip("high:Q", "to"), tip("count:Q", "components")],
    )  # fmt: skip
    text = (
        now.transform_aggregate(step="max(step)", matrix="max(matrix)")
        .transform_calculate(words="datum.matrix + ', step ' + format(datum.step, ',')")
        .mark_text(align="left", baseline="bottom", fontWeight=600, color="var(--text)", x=0, y=-16)
        .encode(text="words:N")
    )
    return (bars + text).properties(height=150)


def _gate_history(slot: int) -> Any:
    """The histograms of all moments, and where the slider stands."""
    base = _of_slot(slot)
    cells = base.transform_calculate(shade="sqrt(datum.share)").mark_rect(fill="var(--accent)").encode(
        alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=5), scale=alt.Scale(nice=False)),
        alt.X2("end:Q"),
        alt.Y("low:Q", title="how far open", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".1f", tickCount=3)),
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


def _line_chart(name: str, title: str, methods: Sequence[str], *, form: str, zero: bool, dashed: str) -> Any:
    colour = alt.Color("method:N", scale=alt.Scale(**colour_scale(methods)), legend=None)
    scale = alt.Scale(domain=["dashed", "solid"], range=[[4, 3], [1, 0]])
    base = alt.Chart(alt.NamedData(name)).transform_filter(IS_SHOWN)
    base = base.transform_calculate(line=f"datum.metric == '{dashed}' ? 'dashed' : 'solid'")
    return base.mark_line(strokeWidth=1.4, strokeJoin="round").encode(
        alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickCount=6), scale=alt.Scale(nice=False)),
        alt.Y("value:Q", title=title, scale=alt.Scale(zero=zero), axis=alt.Axis(format=form, tickCount=5)),
        colour,
        alt.StrokeDash("line:N", legend=None, scale=scale),
        detail=["training:N", "metric:N"],
        tooltip=[tip("training:N"), tip("metric:N"), tip("step:Q", form=","),
                 tip("value:Q", form=",.4~g")],
    ).properties(height=HEIGHT)  # fmt: skip


def over_steps(found: Trained, runs: Sequence[Run], data: Data) -> Iterator[Figure]:
    """Sizes, losses and speed over the steps of training."""
    kinds = (
        ("sizes", "Size over training", "parameters", SIZES, ".3~s", True, "target_size",
         "Expected size under the gates, and dashed the target that they follow."),
        ("loss", "Loss", "loss", ("loss", "valid_loss"), ".3~f", False, "loss",
         "Solid: on validation data, of what would be exported then. Dashed: of training, with the gates' noise."),
        ("speed", "Training speed", "per second", SPEEDS, ".3~s", True, "",
         "Tokens (or examples) per second of training: less to compute as components close."),
    )  # fmt: skip
    shown = shown_of([training for _, training in found])
    methods = [training.method for _, training in found]
    for name, title, unit, metrics, form, zero, dashed, about in kinds:
        columns = _curves(found, runs, metrics)
        if columns["step"]:
            data[name] = columns
            drawn = _line_chart(name, unit, methods, form=form, zero=zero, dashed=dashed)
            yield Figure(name, title, about, [chart_of(drawn, shown, about=f"{title} of {len(found)} trainings")])
