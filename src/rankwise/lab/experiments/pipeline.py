"""From an experiment to a table: a dense base, then every method from the same base, each exported and evaluated.

Every part is kept as it is finished, so the same call again continues where it was stopped. The validation data choose
among checkpoints; the test data are read once per exported model. Nothing here knows which task it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.budget import Budget, count
from rankwise.core.plan import Plan
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.experiments.following import led
from rankwise.lab.experiments.run_folder import (
    BASE,
    EXPERIMENT,
    FORMAT,
    MODEL,
    RECORD,
    VERSION,
    claim,
    has_models,
    is_of,
    write_experiment,
)
from rankwise.lab.experiments.variants import DENSE, AnyTask, Context, Part, Row, Variant
from rankwise.lab.tasks.base import Data, Experiment, described
from rankwise.lab.training import Watcher
from rankwise.lab.training.records import FORMAT as TRAINED
from rankwise.lab.training.records import RunFolder, read_json, write_file
from rankwise.lab.training.trackers import check_trackers
from rankwise.latency import SLOWER, meet_latency
from rankwise.measure import time_together
from rankwise.surroundings import surroundings

CONTROL = "control"
"""The row of the control, where the base is called dense."""
TAUGHT = "taught"
"""The row of the control that learns from the plain one, as the others do."""
REPEATS = 30
"""How often every model is timed."""
LATENCY = "latency.json"
"""Keeps the size that was found for a time, so that a run that is resumed later has the same one."""
LATENCY_KEYS = ("asked", "measured", "dense", "params", "left_dense", "of")
"""Milliseconds for one answer on this machine: asked for, measured at `params` parameters and uniform ranks, and of the
dense model; the layers that a low-rank pair would make slower; and what was timed."""

Place = str | os.PathLike[str]
Read = Callable[[Callable[[str, int, int | None], None]], Data]
"""Reads data, and tells how far it is."""


@led
def run(
    experiment: Experiment, folder: Place, *, watcher: Watcher | None = None, trackers: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, prune, export, evaluate and time; the record, which is also in `record.json`."""
    return run_variants(experiment, asked_for(experiment), folder, watcher=watcher, trackers=trackers)


def asked_for(experiment: Experiment) -> list[Variant]:
    """The experiment's own method, and those that it is compared with."""
    own = experiment.method.name
    names = dict.fromkeys((own, *experiment.compare))
    if experiment.budget is None and (others := [name for name in names if name != own]):
        raise RankwiseError(
            f"`compare` must be empty with the method dense, which has no size, but is {','.join(others)} instead. "
            f"Example: --method {others[0]} --compare dense --budget.removed 0.8."
        )
    return [Variant(name, experiment if name == own else experiment.with_method(name)) for name in names]


@led
def run_variants(
    experiment: Experiment,
    variants: Sequence[Variant],
    folder: Place,
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    failed: Sequence[str] = (),
) -> dict[str, Any]:
    """Several variants from the base of one experiment; the record, which is also in `record.json`.

    `failed` names parts that could not be made elsewhere: they are left out, and the record says so.
    """
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
    with RunFolder(path).held():
        return _run_variants(context, experiment, variants, wanted, task, failed)


def _run_variants(
    context: Context,
    experiment: Experiment,
    variants: Sequence[Variant],
    wanted: list[str],
    task: AnyTask,
    failed: Sequence[str],
) -> dict[str, Any]:
    """Every part that is not finished; the folder is ours alone meanwhile."""
    path = context.folder
    latency = _latency(context, task, path)
    sized = [replace(each, experiment=with_size(each.experiment, latency)) for each in variants]
    variants = [variant for variant in from_base(experiment, sized) if variant.name not in failed]
    for variant in variants:
        variant.experiment.make_task(context.data).check()
    check_parts(context, experiment, variants)
    announce(experiment, path, latency)
    base, rows = None, []
    if experiment.base is not None:
        (base,) = Part.of_base(context, experiment).make()
        rows = [base] if all(variant.name != DENSE for variant in variants) else []
    for variant in variants:
        rows += Part.of_variant(context, variant, _base_of(path, variant)).make()
    rows.sort(key=lambda row: row["name"] != DENSE)
    context.watcher.phase("timing")
    _add_timings(rows, path, task)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "name": experiment.name,
        "seed": experiment.seed,
        "experiment": described(experiment),
        "arms": wanted,
        "corpus": task.record(),
        "base": base,
        "rows": rows,
        **({} if latency is None else {"latency": latency}),
        **({"failed": list(failed)} if failed else {}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(task.device),
    }
    write_experiment(path, experiment)
    write_file(path / RECORD, record)
    return record


@led
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
    with RunFolder(path).held():
        latency = _latency(context, experiment.make_task(context.data), path)
        with_size(experiment, latency).make_task(context.data).check()
        check_parts(context, experiment, [])
        announce(experiment, path, latency)
        (row,) = Part.of_base(context, experiment).make()
        return row


@led
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
    with RunFolder(path).held():
        return _prune(context, task, path, model)


def _prune(context: Context, task: AnyTask, path: Path, model: Path) -> Row:
    experiment = task.experiment
    latency = _latency(context, task, path)
    part = Part.of_variant(context, Variant(path.name, with_size(experiment, latency)), model, model)
    part.task.check()
    part.check()
    control = None
    if experiment.distills and experiment.reference == "control":
        control = Part.of_variant(replace(context, folder=path), Variant(DENSE, experiment.control()), model)
        control.check()
        part = replace(part, teacher=control.folder / MODEL)
    if latency is not None:
        write_file(path / LATENCY, latency)
    if control is not None:
        control.make()
    return part.make()[-1]


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


def from_base(experiment: Experiment, variants: Sequence[Variant]) -> list[Variant]:
    """What is made from the base, in order; the control is made first where others learn from it."""
    if experiment.reference == "base":
        renamed = [replace(each, name=CONTROL) if each.name == DENSE else each for each in variants]
        # alone, the dense model is the base
        return renamed if len(variants) > 1 else [each for each in renamed if each.name != CONTROL]
    control = [each for each in variants if each.name == DENSE]
    if any(each.experiment.distills for each in control):
        raise RankwiseError("`training.distill` must be 0 with the method dense: it is the teacher. Leave it out.")
    taught = next((each.experiment for each in variants if each.experiment.distills), None)
    if taught is None:
        return list(variants)
    others = [each for each in variants if each.name != DENSE]
    if control and all(each.name != TAUGHT for each in others):
        # what learns from a teacher is compared with a dense model that does so too
        others.insert(0, Variant(TAUGHT, taught.taught_control()))
    return [*(control or [Variant(DENSE, experiment.control())]), *others]


def _base_of(folder: Path, variant: Variant) -> Path | None:
    return None if variant.experiment.base is None else folder / BASE / MODEL


def _latency(context: Context, task: AnyTask, folder: Path) -> dict[str, Any] | None:
    """The size for a time, where the budget is one: an untrained model is as fast as a trained one."""
    budget = task.experiment.budget
    if budget is None or budget.latency_ms is None:
        return None
    context.watcher.phase(f"finding the size for {budget.latency_ms:g} ms")
    model = task.make().to(task.device)
    return find_latency(task.experiment, model, task.plan(model), task.example(), folder)


def find_latency(
    experiment: Experiment, model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], folder: Path
) -> dict[str, Any]:
    """The size for the experiment's time, as `folder` has it from before or newly measured on the dense `model`."""
    budget = experiment.budget
    assert budget is not None
    shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
    of = {"parameters": count(model), "inputs": shapes, "exclude": list(experiment.exclude)}
    before = read_json(folder / LATENCY, *LATENCY_KEYS)
    if before is not None and (before["asked"], before["of"]) == (budget.latency_ms, of):
        return before
    found = meet_latency(model, budget, inputs, plan=plan)
    left_dense = [left.name for left in found.plan.left_out if left.reason == SLOWER]
    times = (budget.latency_ms, found.milliseconds, found.dense_milliseconds)
    return dict(zip(LATENCY_KEYS, (*times, found.budget.params, left_dense, of), strict=True))


def with_size(experiment: Experiment, latency: Mapping[str, Any] | None) -> Experiment:
    """The experiment with the size that was found in place of the time; as it is, if it asks for none."""
    if latency is None or experiment.budget is None or experiment.budget.latency_ms is None:
        return experiment
    exclude = (*experiment.exclude, *latency["left_dense"])
    return replace(experiment, budget=Budget(params=latency["params"]), exclude=exclude)


def check_parts(context: Context, experiment: Experiment, variants: Sequence[Variant]) -> None:
    """Refuse a folder whose base or variants were made otherwise, before any of them is trained."""
    for part in parts_of(context, experiment, variants):
        part.check()


def parts_of(context: Context, experiment: Experiment, variants: Sequence[Variant]) -> list[Part]:
    """The base, where there is one, and the variants that `from_base` gave."""
    base = [] if experiment.base is None else [Part.of_base(context, experiment)]
    return [*base, *(Part.of_variant(context, each, _base_of(context.folder, each)) for each in variants)]


def announce(experiment: Experiment, folder: Path, latency: dict[str, Any] | None) -> None:
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
