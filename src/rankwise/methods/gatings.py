"""What opens and closes the components of a method: learned gates, magnitudes, or a choice made beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rankwise.core.budget import Account
from rankwise.core.choice import uniform_counts
from rankwise.core.control import Controller, FixedController
from rankwise.core.gates import Gate, HardConcreteGate, MagnitudeGate
from rankwise.core.lagrangian import Lagrangian, LagrangianController
from rankwise.core.magnitude import GradualPruning, MagnitudeController
from rankwise.core.matrices import GatedMatrix
from rankwise.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class LearnedGates(Method, Lagrangian):
    """Hard concrete gates, moved by the augmented Lagrangian.  Paper: sections 3 and 4.3."""

    def gate(self, num_components: int) -> Gate:
        return HardConcreteGate(num_components, self.distribution, open_probability=self.open_probability)

    def controller(self, matrices: Sequence[GatedMatrix], account: Account, limit: int, *, seed: int) -> Controller:
        return LagrangianController(matrices, account, limit, self, seed=seed)


@dataclass(frozen=True, kw_only=True)
class MagnitudeGates(Method, GradualPruning):
    """Gates set by magnitude on a cubic schedule.  Paper: the AGP baselines of section 5."""

    def gate(self, num_components: int) -> Gate:
        # a diagonal over single weights would only rename them
        return MagnitudeGate(num_components, learned=not self.counts_nonzeros)

    def controller(self, matrices: Sequence[GatedMatrix], account: Account, limit: int, *, seed: int) -> Controller:
        return MagnitudeController(matrices, account, limit, self)


@dataclass(frozen=True, kw_only=True)
class UniformRanks(Method):
    """Every matrix keeps the same fraction of its components, from the start.  Paper: FAC, section 5."""

    def allot(self, account: Account, limit: int) -> Account:
        counts = uniform_counts(account.curves, limit - account.fixed)
        curves = (replace(curve, num_components=k) for curve, k in zip(account.curves, counts, strict=True))
        return replace(account, curves=tuple(curves))

    def gate(self, num_components: int) -> Gate:
        return Gate(num_components)

    def controller(self, matrices: Sequence[GatedMatrix], account: Account, limit: int, *, seed: int) -> Controller:
        return UniformController(matrices, account, limit)


class UniformController(FixedController):
    """The same fraction of every matrix."""

    def counts(self, limit: int) -> list[int]:
        return uniform_counts(self.account.curves, limit - self.account.fixed)
