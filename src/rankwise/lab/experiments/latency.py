"""A time instead of a size: the budget `latency_ms` of an experiment becomes one in parameters before any training.

The size is found once and kept in the folder, so that a run that goes on later goes on with the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from rankwise.core.budget import Budget, count
from rankwise.core.plan import Plan
from rankwise.lab.experiments.arms import AnyExperiment
from rankwise.lab.experiments.folder import read
from rankwise.latency import SLOWER, meet_latency

FILE = "latency.json"

E = TypeVar("E", bound=AnyExperiment)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """What was asked for and what was measured, in milliseconds for one answer on this machine."""

    asked: float
    measured: float
    """Of a model of `params` parameters and uniform ranks."""
    dense: float
    params: int
    left_dense: tuple[str, ...]
    """Layers that a low-rank pair would make slower."""
    of: dict[str, Any]
    """The dense model's size and the shapes that it was timed with."""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "left_dense": list(self.left_dense)}

    def applied(self, experiment: E) -> E:
        """The experiment with the size that was found in place of the time; as it is, if it asks for none."""
        if experiment.budget is None or experiment.budget.latency_ms is None:
            return experiment
        exclude = (*experiment.exclude, *self.left_dense)
        return replace(experiment, budget=Budget(params=self.params), exclude=exclude)


def find_latency(
    experiment: AnyExperiment, model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], folder: Path
) -> Latency | None:
    """The size for the experiment's time, as `folder` has it from before or newly measured on the dense `model`.

    None where the budget is a size already.
    """
    budget = experiment.budget
    if budget is None or budget.latency_ms is None:
        return None
    of = {"parameters": count(model), "inputs": {name: list(tensor.shape) for name, tensor in inputs.items()}}
    of["exclude"] = list(experiment.exclude)
    names = [field.name for field in fields(Latency)]
    before = read(folder / FILE, *names)
    if before is not None and (before["asked"], before["of"]) == (budget.latency_ms, of):
        known = {name: before[name] for name in names}
        return Latency(**{**known, "left_dense": tuple(known["left_dense"])})
    found = meet_latency(model, budget, inputs, plan=plan)
    assert found.budget.params is not None
    return Latency(
        asked=budget.latency_ms,
        measured=found.milliseconds,
        dense=found.dense_milliseconds,
        params=found.budget.params,
        left_dense=tuple(left.name for left in found.plan.left_out if left.reason == SLOWER),
        of=of,
    )
