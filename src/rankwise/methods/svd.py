"""One-shot SVD: components ranked by what dropping them costs, with no training at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankwise.core.budget import Account, CostCurve
from rankwise.core.choice import ranked_counts, worth
from rankwise.core.control import Controller, FixedController
from rankwise.core.gates import Gate
from rankwise.core.matrices import FactorizedMatrix, GatedMatrix
from rankwise.core.plan import Site, Source
from rankwise.methods.base import Factorizer
from rankwise.methods.representations import Factorized


@dataclass(frozen=True, kw_only=True)
class Svd(Factorized):
    name = "svd"

    def gate(self, num_components: int) -> Gate:
        return ScoredGate(num_components)

    def represent(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        assert isinstance(gate, ScoredGate)
        made = factorizer.make(site, source, gate.num_components)
        gate.scores.copy_(self.scores(site, made.energy_R, curve))
        p, q = (nn.Parameter(factor, source.requires_grad) for factor in (made.p_OR, made.q_RI))
        return FactorizedMatrix(p, q, gate, curve)

    def scores(self, site: Site, energy_R: Tensor, curve: CostCurve, *, comparable: bool = False) -> Tensor:
        """What each component is worth per parameter; `comparable` says that energies of all sites are in one unit.

        Else a component counts by the share of its layer's output, and a layer by the root of its size: counting all
        alike starves the large ones, counting by size the small ones (docs/log/).
        """
        if not comparable:
            share = energy_R / energy_R.sum().clamp(min=torch.finfo(torch.float64).tiny)
            energy_R = share * math.sqrt(math.prod(site.shape))
        return worth(energy_R, curve)

    def controller(self, matrices: Sequence[GatedMatrix], account: Account, limit: int, *, seed: int) -> Controller:
        return ScoredController(matrices, account, limit)


class ScoredGate(Gate):
    """An open gate that remembers what each component is worth, in descending order."""

    scores: Tensor

    def __init__(self, num_components: int) -> None:
        super().__init__(num_components)
        self.register_buffer("scores", torch.zeros(num_components, dtype=torch.float64))


class ScoredController(FixedController):
    """Keeps the components that are worth most per parameter."""

    def counts(self, limit: int) -> list[int]:
        scores = [gate.scores for gate in self.gates if isinstance(gate, ScoredGate)]
        return ranked_counts(scores, self.account.curves, limit - self.account.fixed)
