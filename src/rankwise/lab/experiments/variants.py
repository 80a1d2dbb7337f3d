"""One variant of an experiment: from the base to a trained compact model of each size.

A one-shot method compresses before training; the others prune along a ramp; then the compact model may be healed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.core.budget import Budget, SizeReport
from rankwise.lab.experiments.analysis import kept_by_gates, kept_by_shape
from rankwise.lab.experiments.run_folder import CHECKPOINTS, EXPORT, MODEL
from rankwise.lab.tasks.base import Data, Experiment, Task
from rankwise.lab.training import LoopConfig, Outcome, Watcher, fit
from rankwise.lab.training.records import RunFolder, read_json, write_file
from rankwise.lab.training.snapshots import Snapshots
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress
from rankwise.pruner import Pruner, plan_for_method, size_account

DENSE = "dense"
"""The row that the others are compared with: the base, or its control (`Experiment.reference`)."""
HEALING, SNAPSHOT = "healing", "snapshot"

AnyTask = Task[Any, Any]


@dataclass(frozen=True)
class Variant:
    """What is made from the shared base: a method with its settings, under a name."""

    name: str
    experiment: Experiment


@dataclass(frozen=True, eq=False)
class Context:
    """What all parts of an experiment share."""

    data: Data
    folder: Path
    watcher: Watcher
    trackers: Sequence[str]


@dataclass(frozen=True, eq=False)
class Trained:
    """A model of one size after its training, and what its row tells."""

    name: str
    experiment: Experiment
    model: nn.Module
    size: SizeReport | None
    steps: int
    record: Mapping[str, Any]
    """The record of its training."""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Making:
    """A variant that is being made from the base."""

    context: Context
    variant: Variant
    task: AnyTask
    config: LoopConfig
    of: Mapping[str, Any]
    base: Path | None
    teacher: Path | None

    @property
    def experiment(self) -> Experiment:
        return self.variant.experiment

    def models(self) -> Iterator[Trained]:
        """A trained model of each size."""
        method = self.experiment.method
        if method.name == DENSE:
            return self._dense()
        return self._one_shot(method) if isinstance(method, Svd) and self.base is not None else self._along_ramp()

    def healed(self, made: Trained) -> Trained:
        """The compact model after some training of its own, where the experiment asks for it."""
        if self.experiment.healing is None:
            return made
        config = self.task.phase(self.experiment.healing, self.config.seed)
        self.context.watcher.phase(f"healing {made.name}")
        outcome = self._fit(f"{made.name}/{HEALING}", made.model, config=config)
        total = {key: made.record[key] + outcome.record[key] for key in ("seconds", *units(outcome.record))}
        return replace(made, model=outcome.model, steps=made.steps + config.steps, record=total)

    def _dense(self) -> Iterator[Trained]:
        self.context.watcher.phase("training the dense model on")
        outcome = self._fit(self.variant.name, self.task.start(self.base))
        yield Trained(self.variant.name, self.experiment, outcome.model, None, self.config.steps, outcome.record)

    def _one_shot(self, method: Svd) -> Iterator[Trained]:
        """A model of each size, compressed before any training and then trained."""
        for budget in self.experiment.budgets():
            name = self._name(budget)
            self.context.watcher.phase(f"compressing for {name}")
            model = self.task.start(self.base).to(self.task.device)
            plan, found = self.task.plan(model), self.task.calibration()
            account = size_account(model, plan_for_method(model, plan, method), method, trained=True)
            data: dict[str, Any] = {} if found is None else {"calibration": found.batches, "loss": found.loss}
            small = compress(model, budget, plan=plan, layout=method.layout, **data)
            self.context.watcher.phase(f"training {name}")
            outcome = self._fit(name, small)
            size, kept = SizeReport.of(outcome.model, account, budget), kept_by_shape(plan.sites, outcome.model)
            own = self._of_size(budget)
            yield Trained(name, own, outcome.model, size, self.config.steps, outcome.record, kept)

    def _along_ramp(self) -> Iterator[Trained]:
        """A model of each size from one training with gates, each taken when the target passes its size."""
        self.context.watcher.phase(f"pruning with {self.variant.name}")
        *further, last = self.experiment.budgets()
        folders = {budget: self.context.folder / self._name(budget) / SNAPSHOT for budget in further}
        sizes = SizesAlongRamp(self.task, folders)
        try:
            outcome = self._fit(self.variant.name, self.task.start(self.base), gate=self._gate, after_step=sizes)
        except SnapshotLostError:
            shutil.rmtree(self.context.folder / self.variant.name / CHECKPOINTS)
            outcome = self._fit(self.variant.name, self.task.start(self.base), gate=self._gate, after_step=sizes)
        assert outcome.pruner is not None
        for budget in sorted(further, key=lambda budget: budget.removed or 0):
            model, size, step = sizes.load(budget)
            kept = kept_by_shape(outcome.pruner.plan.sites, model)
            yield Trained(self._name(budget), self._of_size(budget), model, size, step, outcome.record, kept)
        lines = RunFolder(outcome.folder).lines()
        kept, size = kept_by_gates(outcome.pruner, lines), outcome.pruner.size()
        small, steps = outcome.pruner.compact(), self.config.steps
        yield Trained(self.variant.name, self._of_size(last), small, size, steps, outcome.record, kept)

    def _gate(self, model: nn.Module) -> Pruner:
        experiment = self.experiment
        assert experiment.budget is not None
        found = self.task.calibration() if experiment.init == "whitened" else None
        return Pruner(
            model,
            experiment.budget,
            experiment.method_for(self.config.steps),
            plan=self.task.plan(model),
            init=experiment.init,
            calibration=None if found is None else found.batches,
            seed=experiment.seed,
        )

    def _fit(
        self,
        name: str,
        model: nn.Module,
        *,
        config: LoopConfig | None = None,
        gate: Callable[[nn.Module], Pruner] | None = None,
        after_step: Callable[[Pruner], None] | None = None,
    ) -> Outcome:
        config = config or self.config
        teacher = self.teacher if self.task.distills(config) else None
        return fit_part(self.context, self.task, name, self.of, config, model, gate, teacher, after_step)

    def _name(self, budget: Budget) -> str:
        """The name of the row of one size."""
        name, own = self.variant.name, self.experiment.budget
        return name if budget == own else f"{name}-at-{100 * (budget.removed or 0):g}"

    def _of_size(self, budget: Budget) -> Experiment:
        return replace(self.experiment, budget=budget, sizes=()) if self.experiment.sizes else self.experiment


class SnapshotLostError(Exception):
    """A training cannot be resumed, because a model that was taken from it before is gone."""


class SizesAlongRamp:
    """Saves a compact model when the target passes its size; called after each step of the pruner."""

    def __init__(self, task: AnyTask, folders: Mapping[Budget, Path]) -> None:
        self.task, self.folders = task, folders
        self.snapshots: Snapshots | None = None

    def __call__(self, pruner: Pruner) -> None:
        if not self.folders:
            return
        if self.snapshots is None or self.snapshots.pruner is not pruner:
            waiting = [budget for budget, folder in self.folders.items() if not self._has(folder, pruner.steps)]
            self.snapshots = Snapshots(pruner, waiting)
            target = pruner.controller.target_size()
            # a fresh training is first seen after its first step
            if pruner.steps > 1 and any(budget.resolve(pruner.account) >= target for budget in waiting):
                raise SnapshotLostError
        self.snapshots.take()
        for snapshot in self.snapshots.taken:
            folder = self.folders[snapshot.budget]
            self.task.save(snapshot.model.eval(), folder / MODEL, snapshot.size)
            # last: what is described is complete
            write_file(folder / EXPORT, {"step": snapshot.step, "size": asdict(snapshot.size)})
        self.snapshots.taken.clear()

    def load(self, budget: Budget) -> tuple[nn.Module, SizeReport, int]:
        """The model that was taken for a size, its size, and the step of the pruner."""
        folder = self.folders[budget]
        about = read_json(folder / EXPORT, "step", "size") or {}
        return self.task.load(folder / MODEL), SizeReport(**about["size"]), about["step"]

    def _has(self, folder: Path, step: int) -> bool:
        about = read_json(folder / EXPORT, "step", "size")
        return about is not None and about["step"] <= step and (folder / MODEL).is_dir()


def fit_part(
    context: Context,
    task: AnyTask,
    name: str,
    of: Mapping[str, Any],
    config: LoopConfig,
    model: nn.Module,
    gate: Callable[[nn.Module], Pruner] | None = None,
    teacher: Path | None = None,
    after_step: Callable[[Pruner], None] | None = None,
) -> Outcome:
    """One phase of training, in the folder of that name."""
    return fit(
        model,
        task,
        config,
        context.folder / name,
        pruner=gate,
        teacher=None if teacher is None else task.load(teacher),
        about=of["about"],
        trackers=context.trackers,
        progress=context.watcher,
        after_step=after_step,
    )


def units(record: Mapping[str, Any]) -> list[str]:
    """What a record of training counts: tokens, or examples."""
    return [unit for unit in ("tokens", "examples") if unit in record]
