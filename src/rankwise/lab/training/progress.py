"""What happens in a run, for those who want to show it. The base classes are silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Progress:
    """Called on each event of the training loop; override what is of interest."""

    def begin(self, step: int, num_steps: int) -> None:
        """Training starts, or continues after `step`."""

    def advance(self, step: int) -> None:
        """A step was taken. Called often: return at once."""

    def report(self, line: Mapping[str, Any]) -> None:
        """A line of metrics was written."""

    def end(self) -> None:
        """Training is over, or was interrupted."""


class Watcher(Progress):
    """Called on each event of an experiment; override what is of interest."""

    def phase(self, title: str) -> None:
        """Another part begins: training, evaluating, timing."""

    def read(self, what: str, done: int, total: int | None) -> None:
        """Data is being downloaded or prepared: `done` of `total` bytes."""
