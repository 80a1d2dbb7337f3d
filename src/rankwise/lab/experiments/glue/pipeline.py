"""From a GLUE experiment to a table: a dense base, then every arm from it: pruned, compacted, healed, evaluated, kept.

The same call again goes on with the first part that is not finished. No choice is made on the reported rows: the last
weights are the ones that are exported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import Budget, count
from rankwise.core.copies import copied
from rankwise.core.plan import Plan
from rankwise.distill import distillation_loss
from rankwise.errors import RankwiseError
from rankwise.lab.data.glue import load_glue
from rankwise.lab.data.glue.tasks import task_named
from rankwise.lab.experiments.arms import FORMAT, VERSION, Arm, Watcher
from rankwise.lab.experiments.folder import (
    BASE,
    EXPERIMENT,
    EXPORT,
    MODEL,
    RECORD,
    check_part,
    claim,
    has_models,
    is_of,
    write,
    write_experiment,
)
from rankwise.lab.experiments.glue.at_once import compress_at_once
from rankwise.lab.experiments.glue.config import GlueExperiment
from rankwise.lab.experiments.glue.data import load_splits
from rankwise.lab.experiments.glue.encoder import check_encoder, load_encoder
from rankwise.lab.experiments.glue.stage import Stage, described
from rankwise.lab.experiments.latency import FILE as LATENCY
from rankwise.lab.experiments.latency import Latency, find_latency
from rankwise.lab.training.records import surroundings
from rankwise.lab.training.snapshots import Snapshot, Snapshots
from rankwise.lab.training.tune import Batch, Loss
from rankwise.methods.base import Method
from rankwise.methods.svd import Svd
from rankwise.pruner import Pruner, plan_for_method, size_account

CONTROL = "control"
CALIBRATION_BATCH = 32


def run_arms(
    experiment: GlueExperiment,
    arms: Sequence[Arm[GlueExperiment]],
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Several methods from the base of one experiment; the record, which is also in `record.json`."""
    if trackers:
        raise RankwiseError(f"`trackers` are for language models, but {', '.join(trackers)} was given. Leave it out.")
    path, watcher = Path(folder), watcher or Watcher()
    settings = described(experiment)
    wanted = [arm.name for arm in arms]
    finished = claim(path, FORMAT)
    if finished is not None:
        watcher.phase(f"reading {experiment.task}")
        data = load_glue(experiment.task, data=experiment.data, progress=watcher.read)
        if is_of(finished, settings, wanted, data.fingerprint) and has_models(path, finished["rows"]):
            return finished
    stage = begin(experiment, path, watcher)
    if stage.latency is not None:
        arms = [Arm(arm.name, stage.latency.applied(arm.experiment)) for arm in arms]
    _check_parts(stage, experiment, arms)
    if not (path / EXPERIMENT).exists():
        write_experiment(path, experiment)
    if stage.latency is not None:
        write(path / LATENCY, stage.latency.record())
    base = train_base(stage, experiment)
    rows = [base]
    for arm in arms:
        if arm.name != "dense":
            rows += prune_base(stage, arm)
        elif len(arms) > 1:
            rows.append(train_control(stage, arm.experiment))
    stage.add_timings(rows)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "name": experiment.name,
        "seed": experiment.seed,
        "experiment": settings,
        "arms": wanted,
        "corpus": stage.splits.dataset.record(),
        "rows": rows,
        **({} if stage.latency is None else {"latency": stage.latency.record()}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(stage.device),
    }
    write_experiment(path, experiment)
    write(path / RECORD, record)
    return record


def begin(experiment: GlueExperiment, folder: Path, watcher: Watcher | None = None) -> Stage:
    """Read the data and refuse what cannot be run; nothing is written yet."""
    watcher = watcher or Watcher()
    device = torch.device("cuda" if experiment.device == "auto" and torch.cuda.is_available() else "cpu")
    check_encoder(experiment.model.name, task_named(experiment.task), experiment.model.max_length)
    watcher.phase(f"reading {experiment.task}")
    stage = Stage(load_splits(experiment, device, watcher.read), folder, watcher, device, experiment.precision)
    model = load_encoder(experiment.model.name, stage.splits.dataset.task)
    stage = replace(stage, latency=_latency(stage, experiment, model))
    _check(experiment if stage.latency is None else stage.latency.applied(experiment), model)
    return stage


def _latency(stage: Stage, experiment: GlueExperiment, model: nn.Module) -> Latency | None:
    """The size for a time, where the budget is one: of the dense model before it is fine-tuned, which is as fast."""
    if experiment.budget is None or experiment.budget.latency_ms is None:
        return None
    stage.watcher.phase(f"finding the size for {experiment.budget.latency_ms:g} ms")
    inputs = {"input_ids": stage.longest()}
    return find_latency(experiment, model.to(stage.device), _plan(experiment, model), inputs, stage.folder)


def _check(experiment: GlueExperiment, model: nn.Module) -> None:
    """Refuse a budget out of reach: here, not after the base is trained."""
    if experiment.budget is not None:
        plan, method = _plan(experiment, model), experiment.method
        account = size_account(model, plan_for_method(model, plan, method), method, trained=True)
        for budget in _budgets(experiment, experiment.budget):
            budget.resolve(account)


def train_base(stage: Stage, experiment: GlueExperiment) -> dict[str, Any]:
    """Fine-tune the dense model, unless that is done already; its row of the table."""
    of = _of_base(stage, experiment)
    if done := _finished(stage, BASE, of):
        return done[0]
    stage.watcher.phase("fine-tuning the dense model")
    model = stage.encoder(experiment.model.name, seed=experiment.seed)
    seconds = stage.train(BASE, of, model, experiment.base, _own_loss, seed=2 * experiment.seed)
    steps = {"steps": stage.steps(experiment.base), "seconds": seconds}
    row = stage.export(BASE, model, {"name": "dense", **_whole(model), **steps}, None)
    write(stage.folder / BASE / EXPORT, {"of": of, "rows": [row]})
    return row


def train_control(stage: Stage, experiment: GlueExperiment) -> dict[str, Any]:
    """The base trained on as a pruned one is, for as long and by the same loss, with nothing removed; its row."""
    of = _of_arm(stage, experiment)
    if done := _finished(stage, CONTROL, of):
        return done[0]
    model = stage.encoder(stage.folder / BASE / MODEL)
    loss, steps, seconds = _loss(experiment, model), 0, 0.0
    stage.watcher.phase("training the dense model on")
    for name, phase in ((CONTROL, experiment.training), (f"{CONTROL}/healing", experiment.healing)):
        if phase is not None:
            seconds += stage.train(name, of, model, phase, loss, seed=2 * experiment.seed + 1)
            steps += stage.steps(phase)
    row = {"name": CONTROL, **_whole(model), "steps": steps, "seconds": seconds}
    row = stage.export(CONTROL, model, row, None)
    write(stage.folder / CONTROL / EXPORT, {"of": of, "rows": [row]})
    return row


def _whole(model: nn.Module) -> dict[str, Any]:
    """What a row says of a dense model."""
    sizes = {"parameters": count(model), "removed": 0.0, "removed_of_prunable": 0.0, "nonzeros": False}
    return {"method": "dense", **sizes}


def prune_base(stage: Stage, arm: Arm[GlueExperiment]) -> list[dict[str, Any]]:
    """Prune, compact and heal from the base, unless that is done already; a row for each size."""
    experiment = arm.experiment
    assert experiment.budget is not None
    of = _of_arm(stage, experiment)
    if done := _finished(stage, arm.name, of):
        return done
    model = stage.encoder(stage.folder / BASE / MODEL)
    loss = _loss(experiment, model)
    make = _at_once if isinstance(experiment.method, Svd) else _along_the_ramp
    rows = [_healed(stage, arm, snapshot, loss, seconds) for snapshot, seconds in make(stage, arm, of, model, loss)]
    write_experiment(stage.folder / arm.name, experiment)
    write(stage.folder / arm.name / EXPORT, {"of": of, "rows": rows})
    return rows


def _check_parts(stage: Stage, experiment: GlueExperiment, arms: Sequence[Arm[GlueExperiment]]) -> None:
    """Refuse a folder whose base or arms were made otherwise, before any of them is trained."""
    check_part(stage.folder / BASE, _of_base(stage, experiment))
    for arm in arms:
        if arm.name != "dense" or len(arms) > 1:
            name = CONTROL if arm.name == "dense" else arm.name
            check_part(stage.folder / name, _of_arm(stage, arm.experiment))


def _finished(stage: Stage, name: str, of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part that was finished, if their models are there; one that was made otherwise is refused."""
    done = check_part(stage.folder / name, of)
    rows: list[dict[str, Any]] = [] if done is None else done["rows"]
    return rows if has_models(stage.folder, rows) else []


def _of_base(stage: Stage, experiment: GlueExperiment) -> dict[str, Any]:
    """What the base is made from."""
    return stage.made_from(experiment, ("task", "held_out", "model", "base", "precision", "seed"))


def _of_arm(stage: Stage, experiment: GlueExperiment) -> dict[str, Any]:
    """What comes from the base depends on it too, but not on what else does."""
    names = [field.name for field in dataclasses.fields(experiment) if field.name not in ("base", "compare")]
    return {**stage.made_from(experiment, names), "base": _of_base(stage, experiment)}


def _loss(experiment: GlueExperiment, base: nn.Module) -> Loss:
    """What a model that comes from the base is trained by."""
    if experiment.distillation is None:
        return _own_loss
    return distillation_loss(copied(base), experiment.distillation)


def _along_the_ramp(
    stage: Stage, arm: Arm[GlueExperiment], of: Mapping[str, Any], model: nn.Module, loss: Loss
) -> Iterator[tuple[Snapshot, float]]:
    """A model of each size from one run with gates, and the seconds that it took."""
    experiment = arm.experiment
    assert experiment.budget is not None
    pruner = _gate(stage, experiment, model)
    snapshots = Snapshots(pruner, _budgets(experiment, experiment.budget))
    stage.watcher.phase(f"pruning with {arm.name}")
    seconds = stage.train(
        arm.name, of, model, experiment.training, loss,
        seed=2 * experiment.seed + 1, pruner=pruner, after_step=snapshots.take,
    )  # fmt: skip
    yield from ((snapshot, seconds) for snapshot in snapshots.finish())


def _at_once(
    stage: Stage, arm: Arm[GlueExperiment], of: Mapping[str, Any], model: nn.Module, loss: Loss
) -> Iterator[tuple[Snapshot, float]]:
    """A model of each size, compressed before any training and then trained, and the seconds that this took."""
    experiment = arm.experiment
    assert experiment.budget is not None
    training, plan = experiment.training, _plan(experiment, model)
    calibration = _calibration(stage, experiment) if experiment.init == "whitened" else None
    for budget in _budgets(experiment, experiment.budget):
        name = _name(arm, budget)
        stage.watcher.phase(f"compressing for {name}")
        small, size = compress_at_once(experiment, model, plan, budget, calibration)
        stage.watcher.phase(f"training {name}")
        seconds = stage.train(name, of, small, training, loss, seed=2 * experiment.seed + 1)
        yield Snapshot(budget, small, size, stage.steps(training)), seconds


def _name(arm: Arm[GlueExperiment], budget: Budget) -> str:
    """Of the row of one size."""
    return arm.name if budget == arm.experiment.budget else f"{arm.name}-at-{100 * (budget.removed or 0):g}"


def _healed(stage: Stage, arm: Arm[GlueExperiment], snapshot: Snapshot, loss: Loss, seconds: float) -> dict[str, Any]:
    """Train the compact model itself for a while, evaluate and save it; its row."""
    experiment = arm.experiment
    name = _name(arm, snapshot.budget)
    steps = snapshot.step
    if experiment.healing is not None:
        stage.watcher.phase(f"healing {name}")
        of = {"healing": dataclasses.asdict(experiment.healing)}
        healing = experiment.healing
        seconds += stage.train(f"{name}/healing", of, snapshot.model, healing, loss, seed=2 * experiment.seed + 1)
        steps += stage.steps(healing)
    size = snapshot.size
    row = {
        "name": name,
        "method": experiment.method.name,
        "parameters": size.exported,
        "removed": size.removed,
        "removed_of_prunable": size.removed_of_prunable,
        "nonzeros": size.nonzeros,
        "steps": steps,
        "seconds": seconds,
    }
    return stage.export(name, snapshot.model, row, size)


def _gate(stage: Stage, experiment: GlueExperiment, model: nn.Module) -> Pruner:
    assert experiment.budget is not None
    calibration = None
    if experiment.init == "whitened":
        calibration = _calibration(stage, experiment)
    return Pruner(
        model,
        experiment.budget,
        _method(experiment, stage.steps(experiment.training)),
        plan=_plan(experiment, model),
        init=experiment.init,
        calibration=calibration,
        seed=experiment.seed,
    )


def _plan(experiment: GlueExperiment, model: nn.Module) -> Plan:
    """The encoder's matrices. The head stays whole: it is small, and without a component of it there is no answer."""
    base = getattr(model, "base_model_prefix", "")
    heads = [
        name for name, part in model.named_children() if name != base and next(part.parameters(), None) is not None
    ]
    return find_plan(model, exclude=[*experiment.exclude, *heads])


def _method(experiment: GlueExperiment, steps: int) -> Method:
    """With the ramp in steps, for a method that has one."""
    method = experiment.method
    if not hasattr(method, "anneal_steps"):
        return method
    return replace(method, anneal_steps=max(1, int(experiment.ramp * steps)))  # type: ignore[call-arg]


def _calibration(stage: Stage, experiment: GlueExperiment) -> list[Batch]:
    found, batches = 0, []
    for batch in stage.splits.train.batches(CALIBRATION_BATCH, experiment.seed):
        batches.append({name: tensor for name, tensor in batch.items() if name != "labels"})
        found += len(batch["input_ids"])
        if found >= experiment.calibration_rows:
            break
    return batches


def _budgets(experiment: GlueExperiment, budget: Budget) -> list[Budget]:
    """The budget itself, and what is taken on the way to it."""
    further = [replace(budget, removed=size) for size in experiment.sizes if size != budget.removed]
    return [*further, budget]


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss
