"""The augmented Lagrangian: multipliers that hold the expected size at its target.

Paper: section 4.3 and appendix "Optimization details".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rankwise.core.budget import Account
from rankwise.core.choice import ranked_counts
from rankwise.core.control import Controller
from rankwise.core.gates import HardConcrete, HardConcreteGate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.optim import AdamState
from rankwise.core.schedules import linear


@dataclass(frozen=True, kw_only=True)
class Lagrangian:
    """Settings of learned gates."""

    anneal_steps: int
    """m: the target is reached after this many steps, at a linear rate."""
    settle_steps: int | None = None
    gate_lr: float = 3e-2
    multiplier_lr: float = 1e-2
    temperature: float = 2 / 3
    stretch: float = 0.1
    open_probability: float | None = None
    recipe: Literal["commit", "published"] = "commit"

    @property
    def distribution(self) -> HardConcrete:
        return HardConcrete(temperature=self.temperature, stretch=self.stretch)

    def start(self, *, trained: bool) -> float:
        if self.open_probability is not None:
            return self.open_probability
        return 0.999 if trained else 0.9

    @property
    def commit_step(self) -> int:
        settle = self.anneal_steps // 2 if self.settle_steps is None else self.settle_steps
        return self.anneal_steps + settle


class LagrangianController(Controller):
    moments: Tensor
    multipliers: Tensor
    multiplier_moments: Tensor

    def __init__(
        self,
        matrices: Sequence[GatedMatrix],
        account: Account,
        limit: int,
        settings: Lagrangian,
        *,
        seed: int,
        rank_multiple: int = 1,
    ) -> None:
        progress = partial(linear, num_steps=settings.anneal_steps)
        super().__init__(matrices, account, limit, progress, rank_multiple=rank_multiple)
        self.settings = settings
        self.seed = seed
        self.distribution = settings.distribution
        total = sum(gate.num_components for gate in self.gates)
        self.register_buffer("moments", AdamState.zeros(total))
        self.register_buffer("multipliers", torch.zeros(2))
        self.register_buffer("multiplier_moments", AdamState.zeros(2))

    @property
    def gates(self) -> list[HardConcreteGate]:  # type: ignore[override]
        return [matrix.gate for matrix in self.matrices]  # type: ignore[misc]

    @property
    def committed(self) -> bool:
        return self.settings.recipe == "commit" and self.step >= self.settings.commit_step

    def alpha(self) -> Tensor:
        return torch.cat([gate.alpha for gate in self.gates])

    def size_of(self, alpha: Tensor) -> Tensor:
        open_probability = self.distribution.open_probability(alpha)
        total = open_probability.new_zeros(())
        for part, curve in zip(open_probability.split([g.num_components for g in self.gates]), self.account.curves):
            cost = part.sum() * curve.per_component
            total = total + cost + (cost.clamp(max=curve.cap) - cost).detach()
        return total / self.account.prunable

    def expected_size(self) -> float:
        if self.committed:
            return self.account.size(self.counts(self.limit))
        return self.account.fixed + self.account.prunable * float(self.size_of(self.alpha()))

    def counts(self, limit: int) -> list[int]:
        return ranked_counts([g.alpha for g in self.gates], self.account.curves, limit - self.account.fixed, self.rank_multiple)

    def order(self, i: int) -> Tensor:
        by_magnitude = self.matrices[i].magnitudes().argsort(descending=True, stable=True)
        return by_magnitude[self.gates[i].alpha[by_magnitude].argsort(descending=True, stable=True)]

    def values(self, i: int) -> Tensor | None:
        return self.distribution.expected(self.gates[i].alpha)

    def draw(self) -> None:
        alpha = self.alpha()
        if self.committed:
            z = torch.zeros_like(alpha)
            start = 0
            for i, kept in enumerate(self.choose(self.limit)):
                values = self.values(i)
                z[start + kept] = values[kept]
                start += self.gates[i].num_components
            self.fill(z)
            return
        generator = torch.Generator(alpha.device).manual_seed(self.seed * 1_000_003 + self.step)
        noise = torch.rand(alpha.shape, generator=generator, device=alpha.device)
        with torch.enable_grad():
            self._alpha = alpha.requires_grad_()
            self._z = self.distribution.sample(self._alpha, noise)
        self.fill(self._z.detach())

    def update(self, grad_scale: float) -> None:
        if self.committed:
            return
        grad_z = self.gradient(grad_scale)
        (grad,) = torch.autograd.grad(self._z, self._alpha, grad_z)
        target = (self.target() - self.account.fixed) / self.account.prunable
        with torch.enable_grad():
            alpha = self._alpha.detach().requires_grad_()
            gap = self.size_of(alpha) - target
            rho = 10.0 * 1000 ** self.progress(self.step)
            penalty = self.multipliers[0] * gap + (self.multipliers[1] if self.settings.recipe == "published" else rho) * gap**2
            (g2,) = torch.autograd.grad(penalty, alpha)
        with torch.no_grad():
            gap = gap.detach()
            new = self._alpha - self.settings.gate_lr * AdamState.direction(self.moments, grad + g2, self.step + 1)
            self.multipliers += self.settings.multiplier_lr * AdamState.direction(self.multiplier_moments, torch.stack([gap, gap**2]), self.step + 1)
            torch._foreach_copy_([g.alpha for g in self.gates], list(new.split([g.num_components for g in self.gates])))
