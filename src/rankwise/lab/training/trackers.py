"""Trackers: programs outside of the run's folder that are sent its metrics, TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rankwise.errors import RankwiseError, nearest


class TensorBoard:
    """Event files in the folder `trackers` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what was written of later steps, before the run was stopped, is dropped
        self.writer = SummaryWriter(str(folder / "trackers"), purge_step=step + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of the project `rankwise`, named like the folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        import wandb  # type: ignore[import-not-found]

        self.run = wandb.init(project="rankwise", name=folder.name, dir=str(folder), config=dict(settings))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""Trackers by name, which is also that of the package that each needs."""


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
        """Send the numbers of a line of metrics."""
        figures = {
            name: value for name, value in line.items() if name != "step" and isinstance(value, bool | int | float)
        }
        for tracker in self.opened:
            tracker.log(figures, line["step"])

    def close(self) -> None:
        for tracker in self.opened:
            tracker.close()
