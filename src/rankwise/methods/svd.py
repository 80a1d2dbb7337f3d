"""One-shot SVD: components are ranked by the error that dropping them adds, without training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankwise.core.allocation import global_allocation, value_per_parameter
from rankwise.core.budget import CostCurve, SizeAccount
from rankwise.core.controller import Controller, FixedController
from rankwise.core.gates import Gate
from rankwise.core.matrices import FactorizedMatrix, GatedMatrix
from rankwise.core.plan import Site, Source
from rankwise.methods.base import Factorizer
from rankwise.methods.representations import Factorized


@dataclass(frozen=True, kw_only=True)
class Svd(Factorized):
    """Rank-1 components of the SVD, the best of the whole model."""

    name = "svd"

    def make_gate(self, num_components: int) -> Gate:
        return ScoredGate(num_components)

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        assert isinstance(gate, ScoredGate)
        made = factorizer.make(site, source, gate.num_components)
        gate.scores.copy_(self.scores(site, made.energy_R, curve))
        p, q = (nn.Parameter(factor, source.requires_grad) for factor in (made.p_OR, made.q_RI))
        return FactorizedMatrix(p, q, gate, curve)

    def scores(self, site: Site, energy_R: Tensor, curve: CostCurve, *, comparable: bool = False) -> Tensor:
        """The value per parameter of each component; `comparable` if the energies of all sites have the same unit.

        Otherwise a component is valued by its share of the layer's output, times the square root of the layer's size:
        equal values would starve the large layers, values by size the small ones (docs/log/).
        """
        if not comparable:
            share = energy_R / energy_R.sum().clamp(min=torch.finfo(torch.float64).tiny)
            energy_R = share * math.sqrt(math.prod(site.shape))
        return value_per_parameter(energy_R, curve)

    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        return ScoredController(matrices, account, limit)


class ScoredGate(Gate):
    """An open gate with a score for each component, in descending order."""

    scores: Tensor

    def __init__(self, num_components: int) -> None:
        super().__init__(num_components)
        self.register_buffer("scores", torch.zeros(num_components, dtype=torch.float64))


class ScoredController(FixedController):
    """Keeps the components of highest score in the whole model."""

    def num_kept(self, limit: int) -> list[int]:
        scores = [gate.scores for gate in self.gates if isinstance(gate, ScoredGate)]
        return global_allocation(scores, self.account.curves, limit - self.account.fixed)
