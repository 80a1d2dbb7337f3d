"""Whole neurons and attention heads, of which all layers keep the same number.

What is left is an ordinary smaller model of the same family, with nothing of rankwise in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankwise.core.allocation import value_per_parameter
from rankwise.core.budget import Budget, CostCurve, SizeAccount
from rankwise.core.controller import Controller
from rankwise.core.eliminate import eliminate
from rankwise.core.factorize import Moments
from rankwise.core.gates import Gate
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import Site, Source
from rankwise.core.targets import Target
from rankwise.core.widths import WidthMatrix, WidthSite, width_curve
from rankwise.errors import BudgetError
from rankwise.methods.base import Factorizer, Method, as_parameter
from rankwise.methods.paper import LearnedGates
from rankwise.methods.svd import ScoredController, ScoredGate


@dataclass(frozen=True, kw_only=True)
class Widths(Method):
    """Neurons of feed-forward blocks, and heads of attention blocks by key-value group."""

    prunes_widths = True

    heads: bool = True
    """Whether heads are pruned, or neurons alone."""

    def check_budget(self, budget: Budget) -> None:
        if budget.latency_ms is not None:
            raise BudgetError(
                f"A budget must be a size for {self.name}, but is `latency_ms`, which is for low rank. Ask for "
                "`removed`, `params` or `megabytes`."
            )

    def cost_curve(self, site: Site, *, trained: bool) -> CostCurve:
        assert isinstance(site, WidthSite)
        return width_curve(site)

    def for_target(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        # a head is a multiple of what is fast already
        assert isinstance(site, WidthSite)
        is_single = site.shape[1] == site.num_components
        multiple = (rank_multiple or target.rank_multiple(site.num_components)) if is_single else 1
        return replace(curve, multiple=multiple)

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        assert source.weight_OI is not None
        return WidthMatrix(as_parameter(source.weight_OI, source.requires_grad), gate, curve)


@dataclass(frozen=True, kw_only=True)
class WidthL0(Widths, LearnedGates):
    """Neurons and heads behind learned gates."""

    name = "width-l0"


@dataclass(frozen=True, kw_only=True)
class Width(Widths):
    """The neurons and heads whose absence the others can make up for least, chosen at once."""

    name = "width"

    def make_gate(self, num_components: int) -> Gate:
        return OrderedGate(num_components)

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        assert isinstance(gate, OrderedGate) and source.weight_OI is not None
        order, scores = self.ranking(source.weight_OI, factorizer.moments.get(site.name), curve)
        gate.order.copy_(order)
        gate.scores.copy_(scores)
        return super().make_matrix(site, source, gate, curve, factorizer)

    def ranking(
        self, weight_OI: Tensor, moments: Moments | None, curve: CostCurve, *, comparable: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The components, best first, and their values per parameter; `comparable` as in `Svd.scores`."""
        order, energy_R = eliminate(weight_OI, moments or Moments(), curve.num_components)
        if not comparable:
            share = energy_R / energy_R.sum().clamp(min=torch.finfo(torch.float64).tiny)
            energy_R = share * math.sqrt(curve.cap)
        return order, value_per_parameter(energy_R, curve)

    def make_controller(
        self, matrices: Sequence[GatedMatrix], account: SizeAccount, limit: int, *, seed: int
    ) -> Controller:
        return OrderedController(matrices, account, limit)


class OrderedGate(ScoredGate):
    """An open gate with an order of its components; the scores are in that order."""

    order: Tensor

    def __init__(self, num_components: int) -> None:
        super().__init__(num_components)
        self.register_buffer("order", torch.arange(num_components))


class OrderedController(ScoredController):
    """Keeps the first components of each matrix in the order of its gate."""

    def best_first(self, i: int) -> Tensor:
        gate = self.gates[i]
        assert isinstance(gate, OrderedGate)
        return gate.order
