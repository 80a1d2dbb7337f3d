"""The six methods of the paper's tables.  Paper: section 4 (FLOP-L0) and section 5 "Baselines" (the others).

Each is a representation (`rankwise.methods.representations`) and a gating: what opens and closes its components, which
is learned, set by magnitude, or fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from rankwise.core.allocation import uniform_allocation, value_per_parameter
from rankwise.core.budget import CostCurve, SizeAccount
from rankwise.core.calibrate import Loss
from rankwise.core.controller import Controller, FixedController
from rankwise.core.factorize import dropping_errors
from rankwise.core.gates import Gate, HardConcreteGate, MagnitudeGate
from rankwise.core.lagrangian import Lagrangian, LagrangianController
from rankwise.core.magnitude import GradualPruning, MagnitudeController
from rankwise.core.matrices import FactorizedMatrix, GatedMatrix
from rankwise.core.plan import Site, Source
from rankwise.errors import InvalidValueError
from rankwise.methods.base import Factorizer, Method
from rankwise.methods.representations import Factorized, GatedComponents, InputFeatures, SingleWeights


@dataclass(frozen=True, kw_only=True)
class LearnedGates(Method, Lagrangian):
    """Hard concrete gates, moved by the augmented Lagrangian.  Paper: sections 3 and 4.3."""

    def make_gate(self, num_components: int) -> Gate:
        return HardConcreteGate(num_components, self.distribution, open_probability=self.open_probability)

    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        return LagrangianController(matrices, account, limit, self, seed=seed)


@dataclass(frozen=True, kw_only=True)
class MagnitudeGates(Method, GradualPruning):
    """Gates that are set by magnitude on a cubic schedule.  Paper: the AGP baselines of section 5."""

    def make_gate(self, num_components: int) -> Gate:
        # a diagonal over single weights would only duplicate them
        return MagnitudeGate(num_components, learned=not self.counts_nonzeros)

    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        return MagnitudeController(matrices, account, limit, self)


@dataclass(frozen=True, kw_only=True)
class UniformRanks(Method):
    """From the start, every matrix keeps the same fraction of its components.  Paper: FAC, section 5."""

    def fix_ranks(self, account: SizeAccount, limit: int) -> SizeAccount:
        counts = uniform_allocation(account.curves, limit - account.fixed)
        curves = (replace(curve, num_components=k) for curve, k in zip(account.curves, counts, strict=True))
        return replace(account, curves=tuple(curves))

    def make_gate(self, num_components: int) -> Gate:
        return Gate(num_components)

    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        return UniformController(matrices, account, limit)


class UniformController(FixedController):
    """Keeps the same fraction of every matrix."""

    def num_kept(self, limit: int) -> list[int]:
        return uniform_allocation(self.account.curves, limit - self.account.fixed)


NOTHING = 1e-100
"""What components are worth of a matrix on which the loss does not depend, as a factor of the error."""


@dataclass(frozen=True, kw_only=True)
class FlopL0(GatedComponents, LearnedGates):
    """Rank-1 components behind learned gates."""

    name = "flop-l0"
    start: Literal["open", "worth"] | None = None
    """How gates start: all "open", while the target falls from the dense size; or by what components are "worth" to the
    loss, at the final size, between even ranks and those of one-shot compression. Then a twentieth of the steps is
    enough for `anneal_steps`. Default: "worth" with `Pruner(loss=...)`, by which it is known, and "open" without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start not in (None, "open", "worth"):
            raise InvalidValueError(f'`start` must be "open" or "worth", but is {self.start!r} instead.')

    @property
    def can_start_by_worth(self) -> bool:
        return self.start != "open"

    def check_loss(self, loss: Loss | None) -> None:
        if self.start == "worth" and loss is None:
            raise InvalidValueError(
                '`start` must be "open" where nothing says what components are worth, but is "worth" instead. Pass '
                "`calibration` and `loss`."
            )

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        if self.start == "open" or factorizer.weighed is None:
            return super().make_matrix(site, source, gate, curve, factorizer)
        assert isinstance(gate, HardConcreteGate)
        made = factorizer.make(site, source, gate.num_components)
        errors_R, best_first = dropping_errors(made, factorizer.moments[site.name]).sort(descending=True, stable=True)
        gate.worth = value_per_parameter(errors_R, curve).to(errors_R.device)
        if site.name not in factorizer.weighed:
            # its errors are in no unit of the loss, which does not depend on it: others come first
            gate.worth *= NOTHING
        p_OR, q_RI = made.p_OR[:, best_first].contiguous(), made.q_RI[best_first].contiguous()
        p, q = (nn.Parameter(factor, source.requires_grad) for factor in (p_OR, q_RI))
        return FactorizedMatrix(p, q, gate, curve)

    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        controller = LagrangianController(matrices, account, limit, self, seed=seed)
        worths = [gate.worth for gate in controller.gates if gate.worth is not None]
        if worths:
            controller.start_by_worth(worths)
        return controller


@dataclass(frozen=True, kw_only=True)
class FlopAgp(GatedComponents, MagnitudeGates):
    """Rank-1 components, pruned gradually by a learned diagonal."""

    name = "flop-agp"


@dataclass(frozen=True, kw_only=True)
class NpL0(InputFeatures, LearnedGates):
    """Input features behind learned gates, without factorization."""

    name = "np-l0"


@dataclass(frozen=True, kw_only=True)
class Agp(SingleWeights, MagnitudeGates):
    """Single weights, pruned gradually by magnitude (Zhu and Gupta 2017)."""

    name = "agp"


@dataclass(frozen=True, kw_only=True)
class Fac(Factorized, UniformRanks):
    """A low-rank model in which every matrix keeps the same fraction of its rank."""

    name = "fac"


@dataclass(frozen=True, kw_only=True)
class Dense(Factorized, UniformRanks):
    """Nothing is pruned: the control with equal training that the other methods are compared with."""

    name = "dense"
    prunes = False

    def skip_reason(self, site: Site) -> str | None:
        return "the dense method prunes nothing"
