"""What the loop needs of a task: the loss of a model on the batch of each step. And callbacks that follow a run.

See `rankwise.lab.tasks` for the tasks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from rankwise.lab.training.config import LoopConfig
from rankwise.lab.training.ranks import own_ranks


class Objective:
    """The loss of one model, and what is carried from step to step.

    Batches are a function of the step alone; a rank takes its share of them. `tensors()` holds all that is carried, as
    one process would have it, so that a resumed run continues exactly as it would have, on any number of ranks.
    """

    unit: ClassVar[str] = "examples"
    """What a step reads `per_step` of."""
    carries: ClassVar[bool] = False
    """Whether anything is carried from step to step."""

    def __init__(self, model: nn.Module, config: LoopConfig, device: torch.device) -> None:
        self.model = model.to(device)
        self.config, self.device, self.ranks = config, device, own_ranks()
        self.share = 1.0
        """How much the loss of this rank's part of the batch counts in the mean of all ranks."""

    @property
    def per_step(self) -> int:
        return self.config.batch_size

    def batch(self, step: int) -> Sequence[Any]:
        """This rank's share of the batch of a step, in `config.accumulate` parts."""
        raise NotImplementedError

    def loss(self, part: Any, index: int) -> tuple[Tensor, Tensor, Any]:
        """The loss of a part, the loss that is reported (no gradient), and what to `carry` on."""
        raise NotImplementedError

    def carry(self, state: Any, index: int) -> None:
        """Keep what `loss` returned for the same part of the next batch; called after the backward pass."""

    def begin_step(self, step: int) -> None:
        """Called before the loss of a step."""

    # CUDA graphs

    def can_record(self, pruning: bool) -> bool:
        """Whether steps do the same work on a GPU for all batches of the same shape, so that a graph can repeat it."""
        return False

    def fixed_batch(self, step: int) -> tuple[Sequence[Any], Hashable]:
        """The batch in memory that all batches of its shape share, and a key for that memory."""
        raise NotImplementedError

    def carried_shapes(self) -> Hashable:
        """The shapes of what is carried; a graph is valid only for the same ones."""
        return None

    # checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """All that is carried, of all ranks together, for a checkpoint. Every rank must call it."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore this rank's share of what `tensors` returned, on whatever number of ranks."""

    # evaluation

    @property
    def num_targets(self) -> int | None:
        """The number of targets of an evaluation, for the record."""
        return None

    def evaluate(self, check: Callable[[], None]) -> float:
        """The mean loss on the validation data; `check` is called now and then, and may raise to stop."""
        raise NotImplementedError

    def figures(self, loss: float) -> dict[str, float]:
        """A mean loss in the measures of the task."""
        return {"loss": loss}

    def valid_figures(self, loss: float) -> dict[str, float]:
        """What `evaluate` returned in the measures of the task; override it where that is no loss of training."""
        return self.figures(loss)


class Trainable(Protocol):
    """A task as the loop sees it."""

    @property
    def fingerprint(self) -> str:
        """The same for the same data; a run resumes only with these."""

    def record(self) -> dict[str, Any]:
        """What the record of a run keeps of the data."""

    def objective(
        self, model: nn.Module, config: Any, device: torch.device, teacher: nn.Module | None = None
    ) -> Objective:
        """The loss of a model; with a teacher, what it learns from the teacher's answers is part of it."""


class Progress:
    """Called on each event of the training loop; silent: override what is of interest."""

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

    def count(self, done: int, total: int) -> None:
        """A part without training goes on: `done` of `total` of its windows, layers or batches."""
