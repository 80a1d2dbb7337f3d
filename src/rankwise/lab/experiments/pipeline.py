"""From an experiment to a table: a dense base, then every method from the same base, each exported and evaluated.

Every part is kept as it is finished, so the same call again continues where it was stopped. The validation data choose
among checkpoints; the test data are read once per exported model. Nothing here knows which task it runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.core.budget import Budget
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.experiments.latency import FILE as LATENCY
from rankwise.lab.experiments.latency import find_latency, with_size
from rankwise.lab.experiments.run_folder import (
    BASE,
    CHECKPOINTS,
    EXPERIMENT,
    EXPORT,
    FORMAT,
    MODEL,
    RECORD,
    SWEEP,
    VERSION,
    check_part,
    claim,
    has_models,
    is_of,
    write_experiment,
)
from rankwise.lab.experiments.variants import (
    DENSE,
    HEALING,
    AnyTask,
    Context,
    Part,
    Trained,
    Variant,
    size_row,
    units,
)
from rankwise.lab.tasks.base import Data, Experiment, check_seed, described
from rankwise.lab.training import Watcher
from rankwise.lab.training.loop import check_trackers
from rankwise.lab.training.records import FORMAT as TRAINED
from rankwise.lab.training.records import surroundings, write_file
from rankwise.measure import time_together

CONTROL = "control"
"""The row of the control, where the base is called dense."""
REPEATS = 30
"""How often every model is timed."""

Place = str | os.PathLike[str]
Row = dict[str, Any]
"""The row of a model in the table of a run."""
Read = Callable[[Callable[[str, int, int | None], None]], Data]
"""Reads data, and tells how far it is."""


def run(
    experiment: Experiment, folder: Place, *, watcher: Watcher | None = None, trackers: Sequence[str] = ()
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
    folder: Place,
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
        rows += run_variant(context, variant, _base_of(path, variant))
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
        **({} if latency is None else {"latency": latency}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(task.device),
    }
    write_experiment(path, experiment)
    write_file(path / RECORD, record)
    return record


def sweep(
    experiment: Experiment,
    folder: Place,
    *,
    methods: Sequence[str],
    removed: Sequence[float],
    seeds: Sequence[int] = (0,),
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Run every method at every size with every seed; the record, which is also in `record.json`.

    Runs of one seed share their base. `removed` is a fraction of what the experiment's own budget counts. Where the
    others are compared with a dense control, it is trained whether or not "dense" is among the methods.
    """
    if experiment.base is None:
        raise RankwiseError(f"A sweep needs a base to share, but {experiment.name} has none. Choose another preset.")
    for name, values in (("methods", methods), ("removed", removed), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise RankwiseError(
                f"`{name}` must hold at least one value, and none twice, but is {list(values)} instead."
            )
    for seed in seeds:
        check_seed(seed)
    path, watcher = Path(folder), watcher or Watcher()
    claim(path, SWEEP)
    of = "model" if experiment.budget is None else experiment.budget.of
    sizes = {f"{100 * level:g}": Budget(removed=level, of=of) for level in removed}
    variants = []
    for method in methods if experiment.reference == "base" or DENSE in methods else [DENSE, *methods]:
        if method == DENSE:
            variants.append(Variant(DENSE, experiment.control()))
        else:
            variants += [Variant(f"{method}-{n}", experiment.with_method(method, size)) for n, size in sizes.items()]
    records = []
    for seed in seeds:
        watcher.phase(f"seed {seed}")
        seeded = [replace(each, experiment=replace(each.experiment, seed=seed)) for each in variants]
        own = replace(experiment, seed=seed)
        records.append(run_variants(own, seeded, path / f"seed-{seed}", watcher=watcher, trackers=trackers))
    write_experiment(path, experiment)
    record = {"format": SWEEP, "version": VERSION, "name": experiment.name, "runs": records}
    write_file(path / RECORD, record)
    return record


def train(
    experiment: Experiment, folder: Place, *, watcher: Watcher | None = None, trackers: Sequence[str] = ()
) -> Row:
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
    with_size(experiment, latency).make_task(context.data).check()
    _check_parts(context, experiment, [])
    _announce(experiment, path, latency)
    return train_base(context, experiment)


def prune(
    experiment: Experiment,
    base: Place,
    folder: Place,
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    read: Read | None = None,
) -> Row:
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
    part = Part.of_variant(context, Variant(path.name, with_size(experiment, latency)), model, model)
    part.task.check()
    check_part(path, part.of)
    control = None
    if experiment.distills and experiment.reference == "control":
        control = Part.of_variant(replace(context, folder=path), Variant(DENSE, experiment.control()), model)
        check_part(control.folder, control.of)
        part = replace(part, teacher=control.folder / MODEL)
    if latency is not None:
        write_file(path / LATENCY, latency)
    if control is not None:
        _make(control)
    return _make(part)[-1]


def begin(
    experiment: Experiment,
    folder: Path,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    read: Read | None = None,
) -> Context:
    """Read the data; nothing is written yet."""
    check_trackers(trackers)
    experiment.check_model()
    watcher = watcher or Watcher()
    watcher.phase(f"reading {experiment.reads}")
    return Context((read or experiment.read)(watcher.read), folder, watcher, trackers)


def train_base(context: Context, experiment: Experiment) -> Row:
    """Train the dense model, unless that is done already; its row of the table."""
    (row,) = _make(Part.of_base(context, experiment))
    return row


def run_variant(context: Context, variant: Variant, base: Path | None) -> list[Row]:
    """Make all models of a variant, unless that is done already; a row for each size.

    `base` is the folder of the dense model; None: the variant starts from fresh weights.
    """
    return _make(Part.of_variant(context, variant, base))


def _make(part: Part) -> list[Row]:
    """Train, export and evaluate the models of a part, unless that is done already; their rows of the table."""
    done, folder = check_part(part.folder, part.of), part.context.folder
    if done is not None and has_models(folder, done["rows"], EXPERIMENT, *part.task.beside):
        finished: list[Row] = done["rows"]
        return finished
    rows = [_export(part, made) for made in part.models()]
    write_file(part.folder / EXPORT, {"of": part.of, "rows": rows})
    if not part.config.keeps_checkpoints:
        for row in rows:
            for phase in ("", HEALING):
                shutil.rmtree(folder / row["folder"] / phase / CHECKPOINTS, ignore_errors=True)
    return rows


def _export(part: Part, made: Trained) -> Row:
    """Save and evaluate a model in the folder of its name; its row of the table."""
    part.context.watcher.phase(f"evaluating {made.name}")
    folder, task, model = part.context.folder / made.name, part.task, made.model.eval()
    task.save(model, folder / MODEL, made.size)
    write_experiment(folder, made.experiment, task.fingerprint)
    is_reference = made.name == BASE and made.size is None and made.experiment.reference == "base"
    return {
        "name": DENSE if is_reference else made.name,
        "method": made.experiment.method.name,
        **made.experiment.row(),
        **size_row(model, made.size),
        "valid": task.evaluate(model, "valid"),
        "test": task.evaluate(model, "test"),
        "steps": made.steps,
        **{unit: made.record[unit] for unit in units(made.record)},
        "seconds": made.record["seconds"],
        "folder": made.name,
        **made.more,
    }


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


def _base_of(folder: Path, variant: Variant) -> Path | None:
    return None if variant.experiment.base is None else folder / BASE / MODEL


def _sized(variant: Variant, latency: dict[str, Any] | None) -> Variant:
    return replace(variant, experiment=with_size(variant.experiment, latency))


def _latency(context: Context, task: AnyTask, folder: Path) -> dict[str, Any] | None:
    """The size for a time, where the budget is one: an untrained model is as fast as a trained one."""
    budget = task.experiment.budget
    if budget is None or budget.latency_ms is None:
        return None
    context.watcher.phase(f"finding the size for {budget.latency_ms:g} ms")
    model = task.make().to(task.device)
    return find_latency(task.experiment, model, task.plan(model), task.example(), folder)


def _check_parts(context: Context, experiment: Experiment, variants: Sequence[Variant]) -> None:
    """Refuse a folder whose base or variants were made otherwise, before any of them is trained."""
    parts = [] if experiment.base is None else [Part.of_base(context, experiment)]
    for part in [*parts, *(Part.of_variant(context, each, _base_of(context.folder, each)) for each in variants)]:
        check_part(part.folder, part.of)


def _announce(experiment: Experiment, folder: Path, latency: dict[str, Any] | None) -> None:
    """Write down what will be run, unless an earlier run has: this one may yet be refused."""
    if not (folder / EXPERIMENT).exists():
        write_experiment(folder, experiment)
    if latency is not None:
        write_file(folder / LATENCY, latency)


def _add_timings(rows: list[Row], folder: Path, task: AnyTask) -> None:
    """Milliseconds for one text of the usual length, batch 1, and how much faster than the first row that is."""
    inputs = task.example()

    def call(model: nn.Module) -> Callable[[], object]:
        @torch.inference_mode()
        def forward() -> object:
            return model(**inputs)

        return forward

    models = {row["folder"]: task.load(folder / row["folder"] / MODEL).to(task.device).eval() for row in rows}
    timings = time_together({name: call(model) for name, model in models.items()}, repeats=REPEATS, device=task.device)
    for row in rows:
        timing = timings[row["folder"]]
        row["milliseconds"] = asdict(timing)
        row["speedup"] = timings[rows[0]["folder"]].median / timing.median
