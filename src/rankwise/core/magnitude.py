"""Automated gradual pruning (AGP): gates are set by magnitude, on a schedule.

Paper: the baselines AGP (one gate per weight) and FLOP-AGP (a learned diagonal between P and Q, with l1).
As in the released code, every matrix loses the same fraction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankwise.core.allocation import uniform_allocation
from rankwise.core.budget import SizeAccount
from rankwise.core.controller import Controller
from rankwise.core.gates import MagnitudeGate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.optim import AdamState, cubic
from rankwise.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class GradualPruning:
    """The settings of gradual magnitude pruning."""

    anneal_steps: int
    """m: the target size is reached after this many steps, on a cubic schedule."""
    mask_every: int = 100
    """The number of steps between two masks while the target moves."""
    diagonal_lr: float = 1e-3
    """Adam's learning rate for the learned diagonal."""
    l1: float = 0.0
    """The weight of the l1 norm of the learned diagonal while the target moves."""

    def __post_init__(self) -> None:
        for name, least in (("anneal_steps", 0), ("mask_every", 1), ("diagonal_lr", 0), ("l1", 0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise InvalidValueError(f"`{name}` must be at least {least} and finite, but is {value} instead.")
            if name.endswith(("steps", "every")) and not isinstance(value, int):
                raise InvalidValueError(f"`{name}` must be a whole number, but is {value} instead.")


class MagnitudeController(Controller):
    """Closes the components of smallest magnitude, a few more every `mask_every` steps."""

    moments: Tensor

    def __init__(
        self,
        matrices: Sequence[GatedMatrix],
        account: SizeAccount,
        limit: int,
        settings: GradualPruning,
    ) -> None:
        super().__init__(matrices, account, limit, settings.anneal_steps, cubic)
        self.settings = settings
        learned = sum(gate.num_components for gate in self.gates if gate.learned)
        self.register_buffer("moments", AdamState.zeros(learned))

    @property
    def gates(self) -> list[MagnitudeGate]:  # type: ignore[override]
        return [matrix.gate for matrix in self.matrices]  # type: ignore[misc]

    @property
    def has_committed(self) -> bool:
        return self.step >= self.anneal_steps

    def expected_size(self) -> float:
        return self.account.size([int(gate.kept.sum()) for gate in self.gates])

    def num_kept(self, limit: int) -> list[int]:
        return uniform_allocation(self.account.curves, limit - self.account.fixed)

    def best_first(self, i: int) -> Tensor:
        return self._magnitudes(i).argsort(descending=True)

    def export_values(self, i: int) -> Tensor | None:
        gate = self.gates[i]
        return gate.diagonal if gate.learned else None

    def open_fractions(self) -> list[Tensor] | None:
        if not all(gate.learned for gate in self.gates):
            return None
        return [(gate.diagonal.abs() * gate.kept).clamp(max=1) for gate in self.gates]

    def draw_masks(self) -> None:
        if self._is_mask_due():
            for i, kept in enumerate(self.kept_components(self.target_size())):
                self.gates[i].kept.fill_(False)[kept] = True
        if self.moments.shape[1]:
            self.set_masks(torch.cat([gate.diagonal * gate.kept for gate in self.gates]))

    @property
    def uses_gradient(self) -> bool:
        return bool(self.moments.shape[1])

    def update(self, grad: Tensor) -> None:
        kept = torch.cat([gate.kept for gate in self.gates])
        diagonal = torch.cat([gate.diagonal for gate in self.gates])
        if self.step < self.anneal_steps:
            grad = grad + self.settings.l1 * diagonal.sign()
        direction = AdamState.direction(self.moments, grad * kept, self.step + 1)
        # a closed component does not move, whatever its momentum
        diagonal -= self.settings.diagonal_lr * direction * kept
        self.layout.scatter(diagonal, [gate.diagonal for gate in self.gates])

    def _is_mask_due(self) -> bool:
        """Whether this step gets a new mask: every `mask_every` steps along the ramp, and at its end."""
        end = self.anneal_steps
        return self.step == end or (0 < self.step < end and self.step % self.settings.mask_every == 0)

    def _magnitudes(self, i: int) -> Tensor:
        """The magnitudes of components; closed ones, which are no longer trained, come after all open ones."""
        gate, magnitudes = self.gates[i], self.matrices[i].magnitudes()
        if gate.learned:
            magnitudes = magnitudes * gate.diagonal.abs()
        if not len(magnitudes):
            return magnitudes
        magnitudes = torch.nan_to_num(magnitudes, nan=0.0, posinf=torch.finfo(magnitudes.dtype).max / 4)
        return torch.where(gate.kept, magnitudes, magnitudes - magnitudes.max() - 1)
