"""The words of a page: the headline, how to use what came out, and where it was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwise.lab.report.found import CONFIG, MODEL, STRUCTURE, Run
from rankwise.lab.report.models import Model, Point, models_of, points_of
from rankwise.lab.report.tables import CONTROL, EXPERIMENT, MEASURES, measured_on


@dataclass(frozen=True)
class Tile:
    """One figure before and after."""

    title: str
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class Headline:
    """What came of it, in one sentence and at a glance."""

    sentence: str
    tiles: Sequence[Tile] = ()


@dataclass(frozen=True)
class Recipe:
    """Something to copy."""

    title: str
    text: str


def headline(runs: Sequence[Run]) -> Headline:
    """Size asked for and achieved, quality and speed before and after, of the model that the first run is about."""
    models = [model for model in models_of(runs) if not model.is_dense]
    if not models:
        return _nothing_yet(runs)
    alike = [model for model in models if model.run.title == models[0].run.title]
    model = _main(alike)
    point = next((point for point in points_of(alike) if model in point.models), None)
    row, dense = model.row, model.run.dense
    name = str(model.run.record.get("name") or model.run.title).rstrip("/").rpartition("/")[2] or model.run.title
    before = None if dense is None else dense["parameters"]
    asked = f" (asked for: {model.asked}, achieved: {_achieved(model)})" if model.asked else ""
    size = f"{row['parameters']:,}{f' of {before:,}' if before else ''} parameters"
    if row["nonzeros"]:
        # its matrices keep their shape
        sentence, counted = f"With {row['name']}, {size} are not zero in {name}", "non-zero parameters"
    elif before:
        sentence, counted = f"{row['name']} makes {name} {row['removed']:.1%} smaller, {size}", "parameters"
    else:
        sentence, counted = f"{row['name']} leaves {size} of {name}", "parameters"
    tile = Tile(counted, _short(before) if before else "", _short(row["parameters"]), f"{-row['removed']:+.1%}")
    words, more = _quality(model, point)
    timing, last = _speed(model, point)
    return Headline(f"{sentence}{asked}{words}{timing}.", [tile, *more, *last])


def _nothing_yet(runs: Sequence[Run]) -> Headline:
    unfinished = [run.title for run in runs if not run.finished]
    if unfinished:
        return Headline(f"No model of {', '.join(dict.fromkeys(unfinished))} is finished yet.")
    return Headline("These runs hold dense models only: nothing was made smaller.")


def _main(models: Sequence[Model]) -> Model:
    """The model of the run's own method and size; else of that method the smallest; else the first."""
    experiment = models[0].run.experiment
    own = [model for model in models if model.row["method"] == (experiment.get("method") or {}).get("name")]
    removed = (experiment.get("budget") or {}).get("removed")
    of_size = [model for model in own if removed is not None and model.level == round(100 * removed, 4)]
    return next(iter(of_size), None) or max(own or models[:1], key=lambda model: float(model.row["removed"]))


def _achieved(model: Model) -> str:
    of_prunable = (model.run.experiment.get("budget") or {}).get("of") == "prunable"
    if "asked" in model.row:
        return f"{model.row['parameters']:,}"
    return f"{model.row['removed_of_prunable' if of_prunable else 'removed']:.1%}"


def _quality(model: Model, point: Point | None) -> tuple[str, list[Tile]]:
    measure = model.run.measure
    if point is None or measure is None:
        return ", of a quality that was not measured", []
    unit, value = f"{measured_on(model.run.record)} {MEASURES.get(measure, measure)}", point.mean
    controls = [each.control for each in point.models if each.control is not None]
    denses = [figure for control in controls if (figure := control.value) is not None]
    if not denses:
        start = model.run.dense
        base = None if start is None else Model(model.run, start).value
        than = "" if base is None else f" ({base:.4g} of the dense base, which trained for fewer steps)"
        return f", with {unit} of {value:.4g}{than}", [Tile(unit, "", f"{value:.4g}", "")]
    before = sum(denses) / len(denses)
    change = "" if point.lost is None else f"{point.lost:+.1%}"
    seeds = f" over {len(point.models)} seeds" if len(point.models) > 1 else ""
    # a control other than the dense model of the other figures is named
    whose = f" of {name}" if (name := controls[0].row["name"]) != CONTROL else ""
    words = f", with {unit} of {value:.4g} instead of {before:.4g}{whose}{f' ({change})' if change else ''}{seeds}"
    return words, [Tile(f"{unit}{f', against {name}' if whose else ''}", f"{before:.4g}", f"{value:.4g}", change)]


def _speed(model: Model, point: Point | None) -> tuple[str, list[Tile]]:
    dense, row = model.run.dense, model.row
    if dense is None or "milliseconds" not in dense or "milliseconds" not in row:
        return ", and a speed that was not measured", []
    then, now = dense["milliseconds"]["median"], row["milliseconds"]["median"]
    times = (point.speedup if point is not None else None) or then / now
    words = f", and {now:.3g} ms instead of {then:.3g} ms for an answer ({times:.2f} times as fast)"
    return words, [Tile("milliseconds for an answer", f"{then:.3g}", f"{now:.3g}", f"{times:.2f}x")]


def _short(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def status_of(run: Run) -> str:
    """How far a run is that has no record yet."""
    if run.finished:
        return ""
    steps = [f"{training.name} at step {training.metrics.last_step:,}" for training in run.trainings]
    seed = f", seed {run.seed}" if run.seed else ""
    return f"{run.title}{seed} is not finished: {'; '.join(steps) or 'no step is logged yet'}."


def recipes(runs: Sequence[Run]) -> list[Recipe]:
    """How to load, serve and sample the model that the headline is about."""
    for run in runs:
        models = [model for model in models_of([run]) if not model.is_dense]
        if run.folder is None or not models:
            continue
        folder = run.folder / str(_main(models).row.get("folder", _main(models).row["name"]))
        saved = folder / MODEL if (folder / MODEL).is_dir() else folder
        if (saved / CONFIG).is_file():
            return list(_pretrained(saved))
        if (saved / STRUCTURE).is_file():
            return list(_own(folder, saved))
    return []


def _own(folder: Path, saved: Path) -> Iterator[Recipe]:
    place = shlex.quote(str(folder))
    yield Recipe("Load it", f"import rankwise as rw\n\nmodel = rw.load({json.dumps(str(saved))})")
    bench = f"rankwise bench {place}"
    # a model that no run made has no vocabulary and no data
    if (folder / EXPERIMENT).is_file():
        yield Recipe("Sample from it", f"rankwise sample {place} --length 200")
        bench = f"rankwise evaluate {place} --split test\n{bench}"
    yield Recipe("Measure it here", bench)
    yield _export(place)


def _pretrained(saved: Path) -> Iterator[Recipe]:
    try:
        config = json.loads((saved / CONFIG).read_bytes())
        kind = str(config["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        config, kind = {}, "AutoModel"
    name, place = json.dumps(str(saved)), shlex.quote(str(saved))
    first = "import rankwise.hf\n" if "quantization_config" in config else ""
    yield Recipe("Load it", f"{first}from transformers import {kind}\n\nmodel = {kind}.from_pretrained({name})")
    if kind.endswith("ForCausalLM"):
        text = f"{first}from transformers import pipeline\n\n"
        yield Recipe("Sample from it", f'{text}print(pipeline("text-generation", {name})("The", max_new_tokens=100))')
        yield Recipe("Serve it", f"vllm serve {place}")
    yield Recipe("Measure it here", f"rankwise bench {place}")
    yield _export(place)


def _export(place: str) -> Recipe:
    return Recipe("Export it", f"rankwise export {place} --to onnx   # or openvino, pt2")


def settings_of(run: Run) -> list[tuple[str, str]]:
    """The settings of a run by dotted name."""
    found = list(_flat("", run.experiment))
    if not found:
        keys = ("name", "method", "layout", "allocation", "device")
        found = [(key, str(run.record[key])) for key in keys if run.record.get(key)]
    return found


def _flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


def places_of(runs: Sequence[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(runs, facts) where, when and with what runs were made; runs with the same answer together."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        record, hardware = run.record, run.record.get("hardware") or {}
        versions = record.get("versions") or {}
        facts = {
            "hardware": ", ".join(str(hardware[key]) for key in ("device", "processor", "system") if hardware.get(key)),
            "cores and threads": " and ".join(str(hardware[key]) for key in ("cores", "threads") if key in hardware),
            "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
            "commit": str(record.get("commit") or ""),
        }
        key = tuple((name, fact) for name, fact in facts.items() if fact)
        if key:
            when = f", {record['finished'][:10]}" if isinstance(record.get("finished"), str) else ""
            groups.setdefault(key, []).append(f"{run.title}, seed {run.seed}{when}")
    return [("; ".join(dict.fromkeys(titles)), list(facts)) for facts, titles in groups.items()]
