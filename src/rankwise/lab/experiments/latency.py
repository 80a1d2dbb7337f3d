"""A time instead of a size: the budget `latency_ms` of an experiment becomes one in parameters before any training.

The size is found once and kept in the folder, so that a run that is resumed later has the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rankwise.core.budget import Budget, count
from rankwise.core.plan import Plan
from rankwise.lab.tasks.base import Experiment
from rankwise.lab.training.records import read_json
from rankwise.latency import SLOWER, meet_latency

FILE = "latency.json"
KEYS = ("asked", "measured", "dense", "params", "left_dense", "of")
"""Milliseconds for one answer on this machine: asked for, measured at `params` parameters and uniform ranks, and of the
dense model; the layers that a low-rank pair would make slower; and what was timed."""


def find_latency(
    experiment: Experiment, model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], folder: Path
) -> dict[str, Any] | None:
    """The size for the experiment's time, as `folder` has it from before or newly measured on the dense `model`.

    None where the budget is a size already.
    """
    budget = experiment.budget
    if budget is None or budget.latency_ms is None:
        return None
    shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
    of = {"parameters": count(model), "inputs": shapes, "exclude": list(experiment.exclude)}
    before = read_json(folder / FILE, *KEYS)
    if before is not None and (before["asked"], before["of"]) == (budget.latency_ms, of):
        return before
    found = meet_latency(model, budget, inputs, plan=plan)
    left_dense = [left.name for left in found.plan.left_out if left.reason == SLOWER]
    times = (budget.latency_ms, found.milliseconds, found.dense_milliseconds)
    return dict(zip(KEYS, (*times, found.budget.params, left_dense, of), strict=True))


def with_size(experiment: Experiment, latency: Mapping[str, Any] | None) -> Experiment:
    """The experiment with the size that was found in place of the time; as it is, if it asks for none."""
    if latency is None or experiment.budget is None or experiment.budget.latency_ms is None:
        return experiment
    exclude = (*experiment.exclude, *latency["left_dense"])
    return replace(experiment, budget=Budget(params=latency["params"]), exclude=exclude)
