"""The state of a run, and its moves: one step, one evaluation, one checkpoint. `loop.py` says when."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from rankwise.errors import CheckpointError, InvalidValueError, RankwiseError
from rankwise.lab.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    check_same,
    load_optimizer,
    load_random,
    optimizer_tensors,
    random_tensors,
)  # fmt: skip
from rankwise.lab.training.config import LoopConfig, autocast, binding, device_of
from rankwise.lab.training.histograms import gate_histograms
from rankwise.lab.training.interruption import Interrupted, Stop
from rankwise.lab.training.objective import Trainable
from rankwise.lab.training.ranks import check_share, own_ranks
from rankwise.lab.training.records import SKIPPED, RunFolder
from rankwise.lab.training.step import Skipped, WeightStep
from rankwise.pruner import Pruner

MakePruner: TypeAlias = Callable[[nn.Module], Pruner]

SKIPPED_IN_A_ROW = 100
"""Skipped steps one after the other that stop a run all the same."""


class DivergedError(RankwiseError):
    """The loss of a training is not a number any more."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation of a model of the size asked for."""

    step: int
    loss: float


class Run:
    """A model in training."""

    def __init__(
        self,
        model: nn.Module,
        task: Trainable,
        config: LoopConfig,
        folder: str | os.PathLike[str],
        *,
        pruner: Pruner | MakePruner | None = None,
        teacher: nn.Module | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        _check(model, config, pruner, teacher)
        self.model, self.task, self.config = model, task, config
        self.device, self.ranks = device_of(config.device), own_ranks()
        check_share(self.ranks, config.batch_size, config.accumulate, self.device)
        self.objective = task.objective(model, config, self.device, teacher)
        self.folder = RunFolder(folder)
        self.checkpoints = Checkpoints(self.folder.path / "checkpoints", config.keep)
        self.make_pruner: MakePruner | None = None if pruner is None or isinstance(pruner, Pruner) else pruner
        # as JSON gives it back: a tuple is a list there
        settings = {"training": dataclasses.asdict(config), "about": about or {}, "corpus": task.fingerprint}
        self.configuration: dict[str, Any] = json.loads(json.dumps({**settings, "prunes": pruner is not None}))
        self.step = 0
        self.pending = False
        """Whether the evaluation and the metrics of `step` are still to be done."""
        self.best: Best | None = None
        self.seconds = 0.0
        self.weights = WeightStep(self.objective, prunes=pruner is not None)
        self.has_dropped = False
        """Whether components that stay closed were dropped."""
        self.logged = 0
        """The step of the last line of metrics."""
        self.ranks.send_model(model)
        if isinstance(pruner, Pruner):
            self._join(pruner)

    @property
    def pruner(self) -> Pruner | None:
        """None before pruning begins."""
        return self.weights.pruner

    def begin_pruning(self) -> None:
        """Where the dense phase ends, gate the model; its new parameters get a new optimizer."""
        if self.make_pruner is None or self.pruner is not None:
            return
        pruner = self.make_pruner(self.model)
        if pruner.model is not self.model:
            raise RankwiseError("`pruner` must gate the model that it is called with, but gated another one.")
        self.ranks.send_model(self.model)
        self._join(pruner)

    def _join(self, pruner: Pruner) -> None:
        """Take the steps of the model's weights with those of its gates."""
        self.ranks.join_pruner(pruner)
        self.weights.optimize_anew(pruner)
        remaining = self.config.steps - self.config.dense_steps
        if pruner.steps + remaining < pruner.controller.anneal_steps:
            warnings.warn(
                f"pruning has only {remaining} steps, and its target does not reach the budget in them: no evaluation "
                "is of the size asked for. Raise `steps` or lower `anneal_steps`.",
                stacklevel=5,
            )

    def train_step(self) -> None:
        """One step of the weights and of the gates, on one batch."""
        self._drop_closed()
        self.weights.take(self.step)
        if (in_a_row := self.weights.skipped.in_a_row) >= SKIPPED_IN_A_ROW:
            raise self._diverged(f"was not in {in_a_row} steps one after the other, up to step {self.step}")
        if self.pruner is not None:
            self.pruner.step()
        self.step += 1
        self.pending = True

    def _drop_closed(self) -> None:
        """In the first step after the gates have committed, drop what stays closed, with its state of the optimizer.

        Not in the step before: what is evaluated, saved and taken along the ramp there is of the whole model.
        """
        pruner = self.pruner
        if self.has_dropped or pruner is None or not (self.config.drop_closed and pruner.controller.has_committed):
            return
        self.has_dropped = True
        if pruner.drop_closed(self.weights.optimizer):
            self.weights.record_anew()

    def training_metrics(self) -> dict[str, Any]:
        """Means since the last line, where a step was not skipped, and how large the model is."""
        self._check_finite(float(self.weights.sums.sum()))
        line: dict[str, Any] = {"lr": self.config.lr_at(self.step, pruning=self.pruner is not None)}
        if num_steps := self.step - self.logged - self.weights.skipped.unlogged:
            loss, norm = (self.weights.sums / num_steps).tolist()
            line = {**self.objective.figures(loss), **line}
            if self.config.clip is not None:
                line["gradient_norm"] = norm
        if self.config.nonfinite == "skip":
            line[SKIPPED] = self.weights.skipped.steps
        if self.pruner is not None:
            line["target_size"] = self.pruner.controller.target_size()
            line["expected_size"] = self.pruner.controller.expected_size()
            line |= gate_histograms(self.pruner, self.config.steps, self.logged - self.config.dense_steps)
        return line

    def forget_sums(self) -> None:
        """Start new means."""
        self.weights.sums.zero_()
        self.weights.skipped.unlogged = 0
        self.logged = self.step

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._diverged(f"is not any more at step {self.step}")

    def _diverged(self, what: str) -> DivergedError:
        return DivergedError(
            f"The loss must stay finite, but {what}. Lower `lr`, set `clip`, raise `warmup_steps`, or, for a batch now "
            f"and then, set `nonfinite` to skip; the checkpoints in {self.checkpoints.folder} are from before."
        )

    def evaluate(self, stop: Stop) -> float | None:
        """The loss on the validation data, of what would be exported now; None if it was stopped."""

        def evaluated() -> float | None:
            try:
                with autocast(self.config.precision, self.device):
                    loss = self.objective.evaluate(stop.check)
            except Interrupted:
                return None
            self._check_finite(loss)
            return loss

        return self.ranks.first(evaluated, lambda: stop.requested)

    def is_new_best(self, loss: float) -> bool:
        """Whether an evaluation is the best so far; it counts only once the target has reached the budget."""
        made = self.pruner
        at_size = self.make_pruner is None if made is None else made.controller.target_size() <= made.limit
        if not at_size or not (self.best is None or loss < self.best.loss):
            return False
        self.best = Best(self.step, loss)
        return True

    def save(self) -> None:
        """Write a checkpoint, the one that a single process would write, with the random numbers of every rank."""
        self._check_finite(float(self.weights.sums.sum()))
        random = random_tensors(self.device, self.ranks)
        training = {**optimizer_tensors(self.weights.optimizer), **self.objective.tensors(), **random}
        training["sums"] = self.weights.sums
        about = {
            "configuration": self.configuration,
            "pruner": self.describe_pruner(),
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "logged": self.logged,
            "seconds": self.seconds,
            "skipped": dataclasses.asdict(self.weights.skipped),
        }
        checkpoint = Checkpoint(self.step, not self.pending, dict(self.model.state_dict()), training, about)
        best = None if self.best is None else self.best.step
        self.ranks.first(lambda: self.checkpoints.save(checkpoint, best))

    def restore(self) -> bool:
        """Continue from the last checkpoint, if there is one of this very run."""
        found: list[Checkpoint] = []
        saved = self.ranks.first(lambda: self._find_checkpoint(found))
        if saved is None:
            torch.manual_seed(self.ranks.seed(self.config.seed))
            return False
        checkpoint = found[0] if found else self.checkpoints.load(*saved)
        about = checkpoint.about
        if about.get("pruner") is not None:
            with warnings.catch_warnings():
                # what was said when pruning began need not be said again
                warnings.simplefilter("ignore")
                self.begin_pruning()
        check_same({"pruner": about.get("pruner")}, {"pruner": self.describe_pruner()}, self.folder.path)
        self.load_model(checkpoint)
        with self.checkpoints.reading(*saved):
            load_optimizer(self.weights.optimizer, checkpoint.training)
            self.objective.load_tensors(checkpoint.training)
            self.weights.sums.copy_(checkpoint.training["sums"])
            self.step, self.pending = checkpoint.step, not checkpoint.evaluated
            self.logged, self.seconds = int(about["logged"]), float(about["seconds"])
            self.weights.skipped = Skipped(**about.get("skipped", {}))
            self.best = None if about["best"] is None else Best(**about["best"])
            # last: making a pruner may draw numbers
            load_random(checkpoint.training, self.device, self.ranks, self.config.seed, self.step)
        return True

    def _find_checkpoint(self, found: list[Checkpoint]) -> tuple[int, bool] | None:
        """Add the last checkpoint to `found`; its step, and whether it is evaluated."""
        self.checkpoints.sweep()
        for saved in reversed(self.checkpoints.steps()):
            checkpoint = self.checkpoints.load(*saved)
            with self.checkpoints.reading(*saved):
                begun, has_best = binding(checkpoint.about["configuration"]), self.checkpoints.has_best(checkpoint)
            check_same(begun, binding(self.configuration), self.folder.path)
            if has_best:
                found.append(checkpoint)
                return saved
            self.checkpoints.remove(*saved)
        return None

    def load_model(self, checkpoint: Checkpoint) -> None:
        """Take weights, gates and multipliers from a checkpoint."""
        try:
            self.model.load_state_dict(checkpoint.model)
        except RuntimeError as error:
            detail = " ".join(str(error).split("\n")[1:2]).strip()
            raise CheckpointError(
                f"The checkpoints in {self.folder.path} must be of this model, but are of another: {detail} "
                "Choose another folder."
            ) from error

    def describe_pruner(self) -> dict[str, Any] | None:
        """What must be the same when a run is resumed."""
        if self.pruner is None:
            return None
        method = self.pruner.method
        settings = json.loads(json.dumps(dataclasses.asdict(method)))
        return {"method": method.name, "parameters": self.pruner.limit, "settings": settings}


def _check(model: nn.Module, config: LoopConfig, pruner: Pruner | MakePruner | None, teacher: nn.Module | None) -> None:
    """Refuse arguments of `fit` that do not fit together."""
    if isinstance(pruner, Pruner) and (config.dense_steps or pruner.model is not model):
        raise InvalidValueError(
            "A `pruner` must have gated `model` already, and then `dense_steps` must be 0. "
            "Pass a function that makes the pruner instead: it is called when pruning begins."
        )
    if pruner is None and config.dense_steps:
        raise InvalidValueError(f"`dense_steps` must be 0 without a `pruner`, but is {config.dense_steps} instead.")
    if teacher is model:
        raise InvalidValueError("`teacher` must be another module than `model`, which is trained. Pass a copy of it.")
