"""One run, many sizes: compact models taken along the ramp, each when the target passes its size.

On its way down the target passes every size above the budget. A model that is taken as it does has gates that have
learned for that size; ranking the components of the final gates would not give as good a one. Learned gates need a
pruner with `schedule="linear"` here, so that no size is passed before they have sorted themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from rankwise.core.budget import Budget, SizeReport
from rankwise.errors import BudgetError
from rankwise.pruner import Pruner


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A compact model of one size."""

    budget: Budget
    model: nn.Module
    size: SizeReport
    step: int
    """The step of the pruner at which it was taken."""


class Snapshots:
    """Call `take()` after every `pruner.step()`, and `finish()` after training; `taken` holds the models."""

    def __init__(self, pruner: Pruner, budgets: Sequence[Budget]) -> None:
        self.pruner = pruner
        self.taken: list[Snapshot] = []
        limits = [budget.resolve(pruner.account) for budget in budgets]
        for budget, limit in zip(budgets, limits, strict=True):
            if limit < pruner.limit:
                raise BudgetError(
                    f"Sizes along the ramp must be at least the pruner's own ({pruner.limit:,} parameters), but "
                    f"{budget} is {limit:,}. Give the pruner the smallest of them."
                )
        self._waiting = sorted(zip(limits, budgets, strict=True), key=lambda pair: -pair[0])

    def take(self) -> None:
        """Take what the target has passed. The pruner's own size waits until training ends."""
        target = self.pruner.controller.target_size()
        while self._waiting and target <= self._waiting[0][0] > self.pruner.limit:
            self._take_next()

    def finish(self) -> list[Snapshot]:
        """Take what is left; all of them, the largest first."""
        while self._waiting:
            self._take_next()
        return self.taken

    def _take_next(self) -> None:
        limit, budget = self._waiting.pop(0)
        pruner = self.pruner
        size = replace(pruner.size(), budget=limit, exported=pruner.account.size(pruner.controller.num_kept(limit)))
        self.taken.append(Snapshot(budget, pruner.compact(budget), size, pruner.steps))
