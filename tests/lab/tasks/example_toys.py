"""Examples of one's own as a task for the loop: a loss of a model on batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.lab.tasks.examples import ExampleObjective, Examples
from rankwise.lab.training import Outcome, TuningConfig, fit

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class Tuned:
    """What the loop needs of a task."""

    examples: Examples
    loss: Loss
    fingerprint: str = "toy"

    def record(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint}

    def objective(
        self, model: nn.Module, config: Any, device: torch.device, teacher: nn.Module | None = None
    ) -> ExampleObjective:
        return ExampleObjective(model, self.examples, config, device, self.loss)


def tune(
    model: nn.Module,
    examples: Examples,
    settings: TuningConfig,
    loss: Loss,
    folder: Path,
    *,
    seed: int = 0,
    **more: Any,
) -> Outcome:
    """A few epochs over examples, on a GPU where there is one and `device` is "auto"."""
    device, precision = more.pop("device", "cpu"), more.pop("precision", "no")
    config = settings.counted(len(examples), precision=precision, device=device, seed=seed)
    return fit(model, Tuned(examples, loss), config, folder, **more)
