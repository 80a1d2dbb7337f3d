"""From an experiment to a table: a dense base, then every method from the same base, each exported and evaluated.

Every part is kept as it is finished, so the same call again continues where it was stopped. The validation data choose
among checkpoints; the test data are read once per exported model. Nothing here knows which task it runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.experiments.analysis import size_row
from rankwise.lab.experiments.latency import FILE as LATENCY
from rankwise.lab.experiments.latency import Latency, find_latency
from rankwise.lab.experiments.run_folder import (
    BASE,
    CHECKPOINTS,
    EXPERIMENT,
    EXPORT,
    FORMAT,
    MODEL,
    RECORD,
    VERSION,
    base_fingerprint,
    check_part,
    claim,
    has_models,
    is_of,
    rows_of,
    variant_fingerprint,
    write_experiment,
)
from rankwise.lab.experiments.variants import (
    DENSE,
    HEALING,
    AnyTask,
    Context,
    Making,
    Trained,
    Variant,
    fit_part,
    units,
)
from rankwise.lab.tasks.base import Data, Experiment, described
from rankwise.lab.training import LoopConfig, Watcher
from rankwise.lab.training.loop import check_trackers
from rankwise.lab.training.records import FORMAT as TRAINED
from rankwise.lab.training.records import surroundings, write_file
from rankwise.measure import time_together

CONTROL = "control"
"""The row of the control, where the base is called dense."""
REPEATS = 30
"""How often every model is timed."""


def run(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, prune, export, evaluate and time; the record, which is also in `record.json`."""
    own = experiment.method.name
    names = dict.fromkeys((own, *experiment.compare))
    if experiment.budget is None and (others := [name for name in names if name != own]):
        raise RankwiseError(
            f"`compare` must be empty with the method dense, which has no size, but is {','.join(others)} instead. "
            f"Example: --method {others[0]} --compare dense --budget.removed 0.8."
        )
    variants = [Variant(name, experiment if name == own else experiment.with_method(name)) for name in names]
    return run_variants(experiment, variants, folder, watcher=watcher, trackers=trackers)


def run_variants(
    experiment: Experiment,
    variants: Sequence[Variant],
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Several variants from the base of one experiment; the record, which is also in `record.json`."""
    path, settings, wanted = Path(folder), described(experiment), [variant.name for variant in variants]
    finished = claim(path, FORMAT)
    context = begin(experiment, path, watcher, trackers)
    task = experiment.make_task(context.data)
    if (
        finished is not None
        and is_of(finished, settings, wanted, task.fingerprint)
        and has_models(path, finished["rows"], *task.beside)
    ):
        return finished
    latency = _latency(context, task, path)
    variants = _from_base(experiment, [_sized(variant, latency) for variant in variants])
    for variant in variants:
        variant.experiment.make_task(context.data).check()
    _check_parts(context, experiment, variants)
    _announce(experiment, path, latency)
    base, rows = None, []
    if experiment.base is not None:
        base = train_base(context, experiment)
        rows = [base] if all(variant.name != DENSE for variant in variants) else []
    for variant in variants:
        rows += run_variant(context, variant, None if variant.experiment.base is None else path / BASE / MODEL)
    rows.sort(key=lambda row: row["name"] != DENSE)
    context.watcher.phase("timing")
    _add_timings(rows, path, task)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "name": experiment.name,
        "seed": experiment.seed,
        "experiment": settings,
        "arms": wanted,
        "corpus": task.record(),
        "base": base,
        "rows": rows,
        **({} if latency is None else {"latency": latency.record()}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(task.device),
    }
    write_experiment(path, experiment)
    write_file(path / RECORD, record)
    return record


def train(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train the dense base alone, in `folder`/base; its row."""
    if experiment.base is None:
        raise CheckpointError(
            f"{experiment.name} starts from fresh weights, so it has no base to train. "
            "Run it whole, with `rankwise run`."
        )
    path = Path(folder)
    claim(path, FORMAT)
    context = begin(experiment, path, watcher, trackers)
    latency = _latency(context, experiment.make_task(context.data), path)
    _sized(Variant(BASE, experiment), latency).experiment.make_task(context.data).check()
    _check_parts(context, experiment, [])
    _announce(experiment, path, latency)
    return train_base(context, experiment)


def prune(
    experiment: Experiment,
    base: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    read: Callable[[Callable[[str, int, int | None], None]], Data] | None = None,
) -> dict[str, Any]:
    """Prune the base that was trained in the folder `base`; the row of the model in `folder`.

    `read` gives the data, where they are not to be read as the experiment says.
    """
    path, model = Path(folder), Path(base) / MODEL
    claim(path, TRAINED)
    if not model.is_dir():
        raise CheckpointError(
            f"A base must be trained before it is pruned, but there is no model in {base}. Run `rankwise train` first."
        )
    context = begin(experiment, path.parent, watcher, trackers, read)
    task = experiment.make_task(context.data)
    task.check_base(Path(base))
    latency = _latency(context, task, path)
    variant = _sized(Variant(path.name, experiment), latency)
    own = variant.experiment.make_task(context.data)
    own.check()
    needs_control = experiment.distills and experiment.reference == "control"
    teacher, control = model, Variant(DENSE, experiment.control())
    inside = replace(context, folder=path)
    check_part(path, _made_from(own, model)[1])
    if needs_control:
        check_part(path / DENSE, _made_from(control.experiment.make_task(context.data), model)[1])
    if latency is not None:
        write_file(path / LATENCY, latency.record())
    if needs_control:
        run_variant(inside, control, model)
        teacher = path / DENSE / MODEL
    return run_variant(context, variant, model, teacher)[-1]


def begin(
    experiment: Experiment,
    folder: Path,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    read: Callable[[Callable[[str, int, int | None], None]], Data] | None = None,
) -> Context:
    """Read the data; nothing is written yet."""
    check_trackers(trackers)
    experiment.check_model()
    watcher = watcher or Watcher()
    watcher.phase(f"reading {experiment.reads}")
    return Context((read or experiment.read)(watcher.read), folder, watcher, trackers)


def train_base(context: Context, experiment: Experiment) -> dict[str, Any]:
    """Train the dense model, unless that is done already; its row of the table."""
    alone = replace(experiment.control(), training=experiment.base, healing=None)
    task = alone.make_task(context.data)
    config = task.phase(experiment.base, 2 * experiment.seed)
    of = base_fingerprint(task, config)
    if done := _finished(context, BASE, of, task):
        return done[0]
    context.watcher.phase("training the dense model")
    outcome = fit_part(context, task, BASE, of, config, task.make())
    name = BASE if experiment.reference == "control" else DENSE
    made = Trained(name, alone, outcome.model, None, config.steps, outcome.record)
    row = _export(context, task, made, BASE, of)
    write_file(context.folder / BASE / EXPORT, {"of": of, "rows": [row]})
    _drop_checkpoints(context.folder / BASE, config)
    return row


def run_variant(
    context: Context, variant: Variant, base: Path | None, teacher: Path | None = None
) -> list[dict[str, Any]]:
    """Make all models of a variant from the base, unless that is done already; a row for each size.

    Args:
        base: the folder of the dense model; None: the variant starts from fresh weights.
        teacher: the folder of the dense model that is learned from, where it is not that of this run.
    """
    experiment = variant.experiment
    task = experiment.make_task(context.data)
    config, of = _made_from(task, base)
    if done := _finished(context, variant.name, of, task):
        return done
    reference = base if experiment.reference == "base" else context.folder / DENSE / MODEL
    making = Making(context, variant, task, config, of, base, teacher or reference)
    rows = [_export(context, task, making.healed(made), made.name, of) for made in making.models()]
    write_file(context.folder / variant.name / EXPORT, {"of": of, "rows": rows})
    for row in rows:
        _drop_checkpoints(context.folder / row["folder"], config)
        _drop_checkpoints(context.folder / row["folder"] / HEALING, config)
    return rows


def _from_base(experiment: Experiment, variants: Sequence[Variant]) -> list[Variant]:
    """What is made from the base, in order; the control is made first where others learn from it."""
    if experiment.reference == "base":
        renamed = [replace(each, name=CONTROL) if each.name == DENSE else each for each in variants]
        # alone, the dense model is the base
        return renamed if len(variants) > 1 else [each for each in renamed if each.name != CONTROL]
    control = [each for each in variants if each.name == DENSE]
    if any(each.experiment.distills for each in control):
        raise RankwiseError("`training.distill` must be 0 with the method dense: it is the teacher. Leave it out.")
    if not any(each.experiment.distills for each in variants):
        return list(variants)
    control = control or [Variant(DENSE, experiment.control())]
    return [*control, *(each for each in variants if each.name != DENSE)]


def _sized(variant: Variant, latency: Latency | None) -> Variant:
    return variant if latency is None else replace(variant, experiment=latency.applied(variant.experiment))


def _latency(context: Context, task: AnyTask, folder: Path) -> Latency | None:
    """The size for a time, where the budget is one: an untrained model is as fast as a trained one."""
    budget = task.experiment.budget
    if budget is None or budget.latency_ms is None:
        return None
    context.watcher.phase(f"finding the size for {budget.latency_ms:g} ms")
    model = task.make().to(task.device)
    return find_latency(task.experiment, model, task.plan(model), task.example(), folder)


def _announce(experiment: Experiment, folder: Path, latency: Latency | None) -> None:
    """Write down what will be run, unless an earlier run has: this one may yet be refused."""
    if not (folder / EXPERIMENT).exists():
        write_experiment(folder, experiment)
    if latency is not None:
        write_file(folder / LATENCY, latency.record())


def _made_from(task: AnyTask, base: Path | None) -> tuple[LoopConfig, dict[str, Any]]:
    """How a variant is trained, and what it is made from."""
    config = task.phase(task.experiment.training, 2 * task.experiment.seed + 1)
    return config, variant_fingerprint(task, config, base)


def _check_parts(context: Context, experiment: Experiment, variants: Sequence[Variant]) -> None:
    """Refuse a folder whose base or variants were made otherwise, before any of them is trained."""
    base = context.folder / BASE
    if experiment.base is not None:
        task = experiment.make_task(context.data)
        check_part(base, base_fingerprint(task, task.phase(experiment.base, 2 * experiment.seed)))
    for variant in variants:
        own = None if variant.experiment.base is None else base / MODEL
        check_part(context.folder / variant.name, _made_from(variant.experiment.make_task(context.data), own)[1])


def _finished(context: Context, name: str, of: Mapping[str, Any], task: AnyTask) -> list[dict[str, Any]]:
    """The rows of a part that was finished, if its models are there; one that was made otherwise is refused."""
    done = check_part(context.folder / name, of)
    rows = [] if done is None else rows_of(done)
    return rows if has_models(context.folder, rows, EXPERIMENT, *task.beside) else []


def _export(context: Context, task: AnyTask, made: Trained, name: str, of: Mapping[str, Any]) -> dict[str, Any]:
    """Save and evaluate a model in the folder of that name; its row of the table."""
    context.watcher.phase(f"evaluating {name}")
    folder, model = context.folder / name, made.model.eval()
    task.save(model, folder / MODEL, made.size)
    write_experiment(folder, made.experiment, task.fingerprint)
    return {
        "name": made.name,
        "method": made.experiment.method.name,
        **made.experiment.row(),
        **size_row(model, made.size),
        "valid": task.evaluate(model, "valid"),
        "test": task.evaluate(model, "test"),
        "steps": made.steps,
        **{unit: made.record[unit] for unit in units(made.record)},
        "seconds": made.record["seconds"],
        "folder": name,
        **made.more,
    }


def _drop_checkpoints(folder: Path, config: LoopConfig) -> None:
    if not config.keeps_checkpoints:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _add_timings(rows: list[dict[str, Any]], folder: Path, task: AnyTask) -> None:
    """Milliseconds for one text of the usual length, batch 1, and how much faster than the first row that is."""
    inputs = task.example()

    def call(model: nn.Module) -> Callable[[], object]:
        @torch.inference_mode()
        def forward() -> object:
            return model(**inputs)

        return forward

    models = {row["folder"]: task.load(folder / row["folder"] / MODEL).to(task.device).eval() for row in rows}
    calls = {name: call(model) for name, model in models.items()}
    timings = time_together(calls, repeats=REPEATS, device=task.device)
    for row in rows:
        timing = timings[row["folder"]]
        row["milliseconds"] = asdict(timing)
        row["speedup"] = timings[rows[0]["folder"]].median / timing.median
