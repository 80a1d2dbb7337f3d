"""Trackers: the numbers and histograms of every line of metrics, sent to TensorBoard, Weights & Biases or Trackio."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rankwise.errors import RankwiseError, nearest
from rankwise.lab.training.histograms import GATES

PROJECT, FOLDER = "rankwise", "trackers"
"""The project that hosted trackers show runs under, and the folder of a run that trackers write to."""

Figures = Mapping[str, float]
Histograms = Mapping[str, Sequence[int]]
"""Counts by name, in equal parts of [0, 1]."""


class TensorBoard:
    """Event files in the folder `trackers` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what was written of later steps, before the run was stopped, is dropped
        self.writer = SummaryWriter(str(folder / FOLDER), purge_step=step + 1)

    def log(self, figures: Figures, histograms: Histograms, step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        for name, counts in histograms.items():
            edges = _edges(counts)
            # what a component adds to the sums is known up to the width of a bin
            middles, number = (edges[1:] + edges[:-1]) / 2, np.asarray(counts)
            sums = {"sum": float(middles @ number), "sum_squares": float(middles**2 @ number)}
            self.writer.add_histogram_raw(
                name, 0.0, 1.0, int(number.sum()), **sums,
                bucket_limits=edges[1:].tolist(), bucket_counts=list(counts), global_step=step,
            )  # fmt: skip
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project `rankwise`, named like the folder and the one above; a resumed run goes on there."""

    package = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        self.module = import_module(self.package)
        place = folder.resolve()
        about = {"name": f"{place.parent.name}-{place.name}", "group": place.parent.name, "config": dict(settings)}
        self.run = self.module.init(project=PROJECT, **about, **self.identity(folder, step))

    def identity(self, folder: Path, step: int) -> dict[str, Any]:
        """How the service knows a run again."""
        file = folder / FOLDER / "wandb-id"
        if step == 0 or not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        return {"id": file.read_text(encoding="utf-8"), "resume": "allow", "dir": str(folder)}

    def log(self, figures: Figures, histograms: Histograms, step: int) -> None:
        drawn = {
            name: self.module.Histogram(np_histogram=(np.asarray(counts), _edges(counts)))
            for name, counts in histograms.items()
        }
        self.run.log({**figures, **drawn}, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio(WeightsAndBiases):
    """The same in Trackio, which knows a run by its name and keeps it on this machine."""

    package = "trackio"

    def identity(self, folder: Path, step: int) -> dict[str, Any]:
        return {"resume": "allow" if step else "never"}


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
"""Trackers by name, which is also that of the package that each needs."""


def _edges(counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.linspace(0.0, 1.0, len(counts) + 1)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not known or whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise RankwiseError(
                f"A tracker must be one of {', '.join(TRACKERS)}, but is {name!r} instead.{nearest(name, TRACKERS)}"
            )
        if find_spec(name) is None:
            raise RankwiseError(
                f"The tracker {name} needs its package, which is not installed. Install it: pip install {name}."
            )


class Trackers:
    """The trackers of one run."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], step: int) -> None:
        self.opened = [TRACKERS[name](folder, settings, step) for name in names]

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers and histograms of a line of metrics."""
        figures = {
            name: value for name, value in line.items() if name != "step" and isinstance(value, bool | int | float)
        }
        histograms = {f"{GATES}/{name}": counts for name, counts in line.get(GATES, {}).items()}
        for tracker in self.opened:
            tracker.log(figures, histograms, line["step"])

    def close(self) -> None:
        for tracker in self.opened:
            tracker.close()
