"""How a method divides a matrix into components: rank-1 matrices, input features, or single weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from rankwise.core.budget import CostCurve, SizeAccount
from rankwise.core.factorize import same_size_rank
from rankwise.core.gates import Gate
from rankwise.core.matrices import (
    FactorizedMatrix,
    GatedMatrix,
    InputGatedMatrix,
    MaskedMatrix,
    factorized_curve,
    input_gated_curve,
    masked_curve,
)
from rankwise.core.plan import Site, Source
from rankwise.core.targets import Target
from rankwise.errors import InvalidValueError
from rankwise.methods.base import Factorizer, Method, as_parameter, factor_parameters


@dataclass(frozen=True, kw_only=True)
class Factorized(Method):
    """Rank-1 components p_k q_k of W = P Q.  Paper: section 4.1."""

    layout: Literal["pair", "pivot"] = "pair"
    """How an O x I matrix of rank r is exported: as two factors, r (O + I) numbers, or as r of its rows and the
    coefficients of the others, r (O + I - r) numbers."""

    def __post_init__(self) -> None:
        # the checks of the gating, if it has any
        getattr(super(), "__post_init__", lambda: None)()
        if self.layout not in ("pair", "pivot"):
            raise InvalidValueError(f'`layout` must be "pair" or "pivot", but is {self.layout!r} instead.')

    def limit_ranks(self, account: SizeAccount, max_rank: int) -> SizeAccount:
        limited = (replace(curve, num_components=min(curve.num_components, max_rank)) for curve in account.curves)
        return replace(account, curves=tuple(limited))

    def refactors(self, trained: bool) -> bool:
        """Whether a low-rank pair of the model is factorized again instead of being used as it is."""
        return True

    def uses_pivots(self, site: Site) -> bool:
        """Whether `site` is exported in the pivot layout; a pair that is already in it keeps it."""
        return self.layout == "pivot" or site.pivot

    def overhead_bytes(self, site: Site) -> int:
        # `PivotLinear.places`
        return 4 * site.shape[1 if site.has_embedding else 0] * len(site.uses) if self.uses_pivots(site) else 0

    def cost_curve(self, site: Site, *, trained: bool) -> CostCurve:
        full = min(site.shape)
        if site.pair_rank is None:
            rank = full if trained else same_size_rank(site.shape)
        else:
            rank = min(site.pair_rank, full) if self.refactors(trained) else site.pair_rank
        return factorized_curve(site.shape, rank, pivot=self.uses_pivots(site))

    def for_target(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        curve = super().for_target(site, curve, target, rank_multiple)
        # never dense if the model holds a smaller pair, or if the pivot layout is to give the smallest size
        dense_from = target.dense_from(curve.cap) if site.pair_rank is None and not curve.pivot else None
        return replace(curve, dense_from=dense_from)

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        refactor = self.refactors(factorizer.keeps_weight)
        p, q = factor_parameters(site, source, gate.num_components, factorizer, refactor=refactor)
        return FactorizedMatrix(p, q, gate, curve)


@dataclass(frozen=True, kw_only=True)
class GatedComponents(Factorized):
    """Rank-1 components that are chosen during training."""

    refactor: bool = True
    """Whether a trained low-rank pair is factorized again before it is gated: P Q stays the same, and its components
    are sorted by energy. False: the pair is gated as it is, as in the paper."""

    def refactors(self, trained: bool) -> bool:
        return self.refactor and trained


@dataclass(frozen=True, kw_only=True)
class InputFeatures(Method):
    """Input features, the columns of W. In a low-rank pair they are the features between its two layers."""

    def skip_reason(self, site: Site) -> str | None:
        return "an embedding has no input features to prune" if site.has_embedding and site.pair_rank is None else None

    def cost_curve(self, site: Site, *, trained: bool) -> CostCurve:
        if site.pair_rank is None:
            return input_gated_curve(site.shape)
        return factorized_curve(site.shape, site.pair_rank, pivot=site.pivot)

    def overhead_bytes(self, site: Site) -> int:
        # the mask that `SelectedLinear` holds
        return site.shape[1] * len(site.uses) if site.pair_rank is None else 0

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        if site.pair_rank is None:
            return InputGatedMatrix(_weight(source), gate)
        p, q = factor_parameters(site, source, gate.num_components, factorizer)
        return FactorizedMatrix(p, q, gate, curve)


@dataclass(frozen=True, kw_only=True)
class SingleWeights(Method):
    """Single weights: unstructured pruning."""

    counts_nonzeros = True
    splits_pairs = True

    def cost_curve(self, site: Site, *, trained: bool) -> CostCurve:
        return masked_curve(site.shape)

    def for_target(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        # the shape does not change, so no rank suits one target better than another
        return replace(curve, multiple=rank_multiple or 1)

    def make_matrix(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        return MaskedMatrix(_weight(source), gate)


def _weight(source: Source) -> nn.Parameter:
    assert source.weight_OI is not None
    return as_parameter(source.weight_OI, source.requires_grad)
