"""One part of a run: the dense base, or a variant that is made from it, a trained model of each size.

A one-shot method compresses before training; the others prune along a ramp; then the compact model may be healed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.core.budget import Budget, SizeReport, count
from rankwise.deploy.compressed import kept_by_shape
from rankwise.errors import RankwiseError
from rankwise.lab.experiments.run_folder import (
    BASE,
    CHECKPOINTS,
    EXPERIMENT,
    EXPORT,
    MODEL,
    base_fingerprint,
    check_part,
    has_models,
    variant_fingerprint,
    write_experiment,
)
from rankwise.lab.tasks.base import Data, Experiment, Task
from rankwise.lab.training import LoopConfig, Outcome, Watcher, fit
from rankwise.lab.training.histograms import GATES
from rankwise.lab.training.ranks import check_share, own_ranks
from rankwise.lab.training.records import SKIPPED, RunFolder, read_json, write_file
from rankwise.lab.training.snapshots import Snapshots
from rankwise.methods.svd import Svd
from rankwise.oneshot import compress
from rankwise.pruner import Pruner
from rankwise.sizes import plan_for_method, size_account

DENSE = "dense"
"""The row that the others are compared with: the base, or its control (`Experiment.reference`)."""
HEALING, SNAPSHOT, HANDED = "healing", "snapshot", "handed"

AnyTask = Task[Any, Any]
Row = dict[str, Any]
"""The row of a model in the table of a run."""


@dataclass(frozen=True)
class Variant:
    """What is made from the shared base: a method with its settings, under a name."""

    name: str
    experiment: Experiment

    @property
    def models(self) -> list[str]:
        """The names of the rows of all sizes, its own last."""
        return [self.model(budget) for budget in self.experiment.budgets()] or [self.name]

    def model(self, budget: Budget) -> str:
        """The name of the row of one size."""
        own = self.experiment.budget
        return self.name if budget == own else f"{self.name}-at-{100 * (budget.removed or 0):g}"

    @property
    def trains_each_size(self) -> bool:
        """Whether every size is compressed before a training of its own, and not taken along one ramp."""
        return isinstance(self.experiment.method, Svd) and self.experiment.base is not None


@dataclass(frozen=True, eq=False)
class Context:
    """What all parts of an experiment share."""

    data: Data
    folder: Path
    watcher: Watcher
    trackers: Sequence[str]


@dataclass(frozen=True)
class Phase:
    """One training of a part."""

    name: str
    """Of its folder."""
    config: LoopConfig
    gates: bool
    """Whether the model is gated first."""
    handed: Path | None
    """Where other ranks find the model, if it is not what `task.start` gives."""

    @property
    def model(self) -> Path | None:
        return None if self.handed is None else self.handed / MODEL


@dataclass(frozen=True, eq=False)
class Part:
    """The base or a variant, in a folder of its own."""

    context: Context
    name: str
    task: AnyTask
    config: LoopConfig
    of: Mapping[str, Any]
    """What it is made from."""
    base: Path | None = None
    """The model that it starts from; None: fresh weights."""
    teacher: Path | None = None

    @classmethod
    def of_base(cls, context: Context, experiment: Experiment) -> Part:
        """The dense model that every variant starts from."""
        alone = replace(experiment.control(), training=experiment.base, healing=None)
        task = alone.make_task(context.data)
        config = task.phase(experiment.base, 2 * experiment.seed)
        return cls(context, BASE, task, config, base_fingerprint(task, config))

    @classmethod
    def of_variant(cls, context: Context, variant: Variant, base: Path | None, teacher: Path | None = None) -> Part:
        """What is made from the model in the folder `base`; `teacher`: the dense model that is learned from, where it
        is not that of this run."""
        experiment = variant.experiment
        task = experiment.make_task(context.data)
        config = task.phase(experiment.training, 2 * experiment.seed + 1)
        reference = base if experiment.reference == "base" else context.folder / DENSE / MODEL
        of = variant_fingerprint(task, config, base)
        return cls(context, variant.name, task, config, of, base, teacher or reference)

    @property
    def experiment(self) -> Experiment:
        experiment: Experiment = self.task.experiment
        return experiment

    @property
    def folder(self) -> Path:
        return self.context.folder / self.name

    def check(self) -> dict[str, Any] | None:
        """Refuse a folder that was made, or begun, from something else; its export, where it is finished."""
        for config in [self.config, *self._healing()]:
            check_share(own_ranks(), config.batch_size, config.accumulate, self.task.device)
        return check_part(self.folder, self.of)

    def make(self) -> list[Row]:
        """Train, export and evaluate a model of each size, unless that is done already; their rows of the table."""
        done = self.check()
        if done is not None and has_models(self.context.folder, done["rows"], EXPERIMENT, *self.task.beside):
            finished: list[Row] = done["rows"]
            return finished
        method = self.experiment.method
        if method.name == DENSE:
            rows = list(self._dense())
        elif isinstance(method, Svd) and self.base is not None:
            rows = list(self._one_shot(method))
        else:
            rows = list(self._along_ramp())
        write_file(self.folder / EXPORT, {"of": self.of, "rows": rows})
        if not self.config.keeps_checkpoints:
            for row in rows:
                for phase in ("", HEALING):
                    shutil.rmtree(self.context.folder / row["folder"] / phase / CHECKPOINTS, ignore_errors=True)
        return rows

    def _dense(self) -> Iterator[Row]:
        on = "" if self.base is None else " on"
        taught = " with a teacher" if self.name != BASE and self.task.distills(self.config) else ""
        self.context.watcher.phase(f"training the dense model{on}{taught}")
        outcome = self._fit(self.name, self.task.start(self.base))
        yield self._row(self.name, self.experiment, outcome.model, None, self.config.steps, outcome.record)

    def _one_shot(self, method: Svd) -> Iterator[Row]:
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
            outcome = self._fit(name, small, is_new=True)
            size, kept = SizeReport.of(outcome.model, account, budget), kept_by_shape(plan.sites, outcome.model)
            own, steps = self._of_size(budget), self.config.steps
            yield self._row(name, own, outcome.model, size, steps, outcome.record, **kept)

    def _along_ramp(self) -> Iterator[Row]:
        """A model of each size from one training with gates, each taken when the target passes its size."""
        self.context.watcher.phase(f"pruning with {self.name}")
        *further, last = self.experiment.budgets()
        if further and own_ranks().count > 1 and last.dtype is not None and last.dtype.itemsize <= 2:
            raise RankwiseError(
                f"`sizes` of {last.dtype} must be trained in one process, but there are {own_ranks().count}: what is "
                "taken on the way may change the layout of the first one's matrices. Leave out `sizes` or the dtype."
            )
        folders = {budget: self.context.folder / self._name(budget) / SNAPSHOT for budget in further}
        sizes = SizesAlongRamp(self.task, folders)
        try:
            outcome = self._fit(self.name, self.task.start(self.base), gates=True, after_step=sizes)
        except SnapshotLostError:
            shutil.rmtree(self.folder / CHECKPOINTS)
            outcome = self._fit(self.name, self.task.start(self.base), gates=True, after_step=sizes)
        assert outcome.pruner is not None
        for budget in sorted(further, key=lambda budget: budget.removed or 0):
            model, size, step = sizes.load(budget)
            kept = kept_by_shape(outcome.pruner.plan.sites, model)
            yield self._row(self._name(budget), self._of_size(budget), model, size, step, outcome.record, **kept)
        kept, size = kept_by_gates(outcome.pruner, RunFolder(outcome.folder).lines()), outcome.pruner.size()
        small, steps = outcome.pruner.compact(), self.config.steps
        yield self._row(self.name, self._of_size(last), small, size, steps, outcome.record, **kept)

    def _row(
        self,
        name: str,
        experiment: Experiment,
        model: nn.Module,
        size: SizeReport | None,
        steps: int,
        record: Mapping[str, Any],
        **more: Any,
    ) -> Row:
        """Heal a trained model where the experiment asks for it, save it and evaluate it; `record`: of its training."""
        watcher, folder = self.context.watcher, self.context.folder / name
        counted = [unit for unit in ("tokens", "examples", "seconds", SKIPPED) if unit in record]
        spent = {key: record[key] for key in counted}
        for config in self._healing():
            watcher.phase(f"healing {name}")
            outcome = self._fit(f"{name}/{HEALING}", model, config=config, is_new=True)
            model, steps = outcome.model, steps + config.steps
            spent = {key: spent[key] + outcome.record.get(key, 0) for key in counted}
        watcher.phase(f"evaluating {name}")
        self.task.save(model.eval(), folder / MODEL, size)
        write_experiment(folder, experiment, self.task.fingerprint)
        is_reference = name == BASE and size is None and experiment.reference == "base"
        return {
            "name": DENSE if is_reference else name,
            "method": experiment.method.name,
            **experiment.row(),
            "parameters": count(model) if size is None else size.exported,
            "removed": 0.0 if size is None else size.removed,
            "removed_of_prunable": 0.0 if size is None else size.removed_of_prunable,
            "nonzeros": False if size is None else size.nonzeros,
            "valid": self.task.evaluate(model, "valid"),
            "test": self.task.evaluate(model, "test"),
            "steps": steps,
            **spent,
            "folder": name,
            **more,
        }

    def _healing(self) -> list[LoopConfig]:
        """The settings of healing, where there is some."""
        healing = self.experiment.healing
        return [] if healing is None else [self.task.phase(healing, self.config.seed)]

    def _gate(self, model: nn.Module) -> Pruner:
        experiment = self.experiment
        assert experiment.budget is not None
        init = experiment.init
        method = experiment.method_for(self.config.steps)
        by_worth = experiment.starts_by_worth
        if experiment.sizes and by_worth:
            # sizes are taken while the target falls from the dense one
            ramp = max(method.anneal_steps, experiment.new_ramp())  # type: ignore[attr-defined]
            method, by_worth = replace(method, start="open", anneal_steps=ramp), False  # type: ignore[call-arg]
        found = self.task.calibration() if by_worth or init in ("whitened", "fisher") else None
        return Pruner(
            model,
            experiment.budget,
            method,
            plan=self.task.plan(model),
            init="whitened" if init == "fisher" else init,
            calibration=None if found is None else found.batches,
            loss=found.loss if found is not None and (by_worth or init == "fisher") else None,
            seed=experiment.seed,
        )

    def _fit(
        self,
        name: str,
        model: nn.Module,
        *,
        config: LoopConfig | None = None,
        gates: bool = False,
        is_new: bool = False,
        after_step: Callable[[Pruner], None] | None = None,
    ) -> Outcome:
        """One phase of training, in the folder of that name.

        Args:
            gates: whether the model is gated first.
            is_new: whether the model was made in this process, and is not what `task.start` gives.
        """
        phase = Phase(name, config or self.config, gates, self.context.folder / name / HANDED if is_new else None)
        ranks = own_ranks()
        if ranks.count > 1:
            if phase.model is not None:
                self.task.save(model.eval(), phase.model, None)
            # they read the data themselves
            told = replace(self, context=None, task=None)  # type: ignore[arg-type]
            ranks.tell((told, self.experiment, self.context.folder, phase))
        outcome = self.fit(phase, model, after_step)
        if phase.handed is not None:
            # it may be of processes that were stopped before
            shutil.rmtree(phase.handed, ignore_errors=True)
        return outcome

    def fit(self, phase: Phase, model: nn.Module, after_step: Callable[[Pruner], None] | None = None) -> Outcome:
        """Train `model` in a phase; every rank calls it."""
        config = phase.config
        return fit(
            model,
            self.task,
            config,
            self.context.folder / phase.name,
            pruner=self._gate if phase.gates else None,
            teacher=self.task.load(self.teacher) if self.teacher is not None and self.task.distills(config) else None,
            about=self.of["about"],
            trackers=self.context.trackers,
            progress=self.context.watcher,
            after_step=after_step,
        )

    def _name(self, budget: Budget) -> str:
        """The name of the row of one size."""
        return Variant(self.name, self.experiment).model(budget)

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


def kept_by_gates(pruner: Pruner, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was kept of each matrix (see `kept_by_shape`), and how the gates of the first and the last one decided.

    `lines` are the metrics of the training.
    """
    counts = pruner.controller.num_kept(pruner.limit)
    triples = list(zip(pruner.plan.sites, pruner.account.curves, counts, strict=True))
    found: dict[str, Any] = {
        "matrices": {site.name: [site.params, curve(k)] for site, curve, k in triples},
        "ranks": {site.name: [*site.shape, k, curve.num_components] for site, curve, k in triples},
    }
    lines = [line for line in lines if GATES in line]
    if lines:
        shown = dict.fromkeys((pruner.plan.sites[0].name, pruner.plan.sites[-1].name))
        histograms = {name: [line[GATES][name] for line in lines] for name in shown}
        found["gates"] = {"steps": [line["step"] for line in lines], "histograms": histograms}
    return found
