"""What runs in an experiment: arms that start from a shared base. Each kind of experiment has its own pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rankwise.errors import RankwiseError
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.training import Progress

if TYPE_CHECKING:
    from rankwise.lab.experiments.glue.config import GlueExperiment

AnyExperiment: TypeAlias = "Experiment | GlueExperiment"

E = TypeVar("E")

FORMAT, VERSION = "rankwise-experiment", 1
SWEEP = "rankwise-sweep"
"""Format of a record of many."""
"""Of a record."""


def check_seed(seed: int) -> None:
    """Refuse a seed that random numbers cannot be drawn from."""
    if not 0 <= seed < 2**63:
        raise RankwiseError(f"`seed` must be a whole number from 0 to 2^63 - 1, but is {seed} instead.")


class Watcher(Progress):
    """Told what happens in an experiment; override what is of interest."""

    def phase(self, title: str) -> None:
        """Something new begins: training, evaluating, timing."""

    def read(self, what: str, done: int, total: int | None) -> None:
        """Data is being downloaded or prepared: `done` of `total` bytes."""


@dataclass(frozen=True)
class Arm(Generic[E]):
    """One method from the shared base."""

    name: str
    experiment: E


def run(
    experiment: AnyExperiment,
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, prune, export, evaluate and time; the record, which is also in `record.json`."""
    names = dict.fromkeys((experiment.method.name, *experiment.compare))
    own: Any = experiment
    if own.budget is None and (others := [name for name in names if name != own.method.name]):
        raise RankwiseError(
            f"`compare` must be empty with the method dense, which has no size, but is {','.join(others)} instead. "
            f"Example: --method {others[0]} --compare dense --budget.removed 0.8."
        )
    arms = [Arm(name, own if name == own.method.name else own.with_method(name)) for name in names]
    return run_arms(experiment, arms, folder, watcher=watcher, trackers=trackers)


def run_arms(
    experiment: AnyExperiment,
    arms: Sequence[Arm[Any]],
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Several methods from the base of one experiment, by the pipeline of its kind."""
    if isinstance(experiment, Experiment):
        from rankwise.lab.experiments import pipeline

        return pipeline.run_arms(experiment, arms, folder, watcher=watcher, trackers=trackers)
    from rankwise.lab.experiments.glue import pipeline as glue

    return glue.run_arms(experiment, arms, folder, watcher=watcher, trackers=trackers)
