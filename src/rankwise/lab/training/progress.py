"""What a training loop tells while it runs. The base class keeps silent; a command line shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Progress:
    """Told of each event; override what is of interest."""

    def begin(self, step: int, num_steps: int) -> None:
        """Training is about to go on after `step`."""

    def advance(self, step: int) -> None:
        """A step was taken. Called often: return at once."""

    def report(self, line: Mapping[str, Any]) -> None:
        """A line of metrics was written."""

    def end(self) -> None:
        """Training is over, or was interrupted."""
