"""How a method cuts a matrix into components: rank-1 matrices, input features, or single weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from rankwise.core.budget import CostCurve
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
from rankwise.methods.base import Factorizer, Method, as_parameter, factors


@dataclass(frozen=True, kw_only=True)
class Factorized(Method):
    """Rank-1 components p_k q_k of W = P Q.  Paper: section 4.1."""

    layout: Literal["pair", "pivot"] = "pair"
    """How rank r of an O x I matrix is exported: as two factors of r (O + I) numbers, or as r of its rows and the
    coefficients of the others, r (O + I - r) numbers (`rankwise.core.pivot`)."""

    def __post_init__(self) -> None:
        # the gating's own checks, where it has some
        getattr(super(), "__post_init__", lambda: None)()
        if self.layout not in ("pair", "pivot"):
            raise InvalidValueError(f'`layout` must be "pair" or "pivot", but is {self.layout!r} instead.')

    def refactors(self, trained: bool) -> bool:
        """Whether a low-rank pair of the model is factorized anew, rather than taken as it stands."""
        return True

    def pivots(self, site: Site) -> bool:
        """Whether `site` is exported in the pivot layout; a pair that the model holds in it keeps it."""
        return self.layout == "pivot" or site.pivot

    def overhead_bytes(self, site: Site) -> int:
        # the places of `PivotLinear`
        if not self.pivots(site):
            return 0
        return 4 * site.shape[1 if site.has_embedding else 0] * len(site.uses)

    def curve(self, site: Site, *, trained: bool) -> CostCurve:
        full = min(site.shape)
        if site.pair_rank is None:
            rank = full if trained else same_size_rank(site.shape)
        else:
            rank = min(site.pair_rank, full) if self.refactors(trained) else site.pair_rank
        return factorized_curve(site.shape, rank, pivot=self.pivots(site))

    def aimed(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        curve = super().aimed(site, curve, target, rank_multiple)
        # dense is no way out for a pair that the model holds: it has more parameters; nor where the smallest is wanted
        dense_from = target.dense_from(curve.cap) if site.pair_rank is None and not curve.pivot else None
        return replace(curve, dense_from=dense_from)

    def represent(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        p, q = factors(site, source, gate.num_components, factorizer, anew=self.refactors(factorizer.keeps))
        return FactorizedMatrix(p, q, gate, curve)


@dataclass(frozen=True, kw_only=True)
class GatedComponents(Factorized):
    """Components of which some are chosen in training."""

    refactor: bool = True
    """Whether a trained low-rank pair is factorized anew before it is gated: P Q stays, and its components come by what
    they carry. False: gated as it stands, as in the paper."""

    def refactors(self, trained: bool) -> bool:
        return self.refactor and trained


@dataclass(frozen=True, kw_only=True)
class InputFeatures(Method):
    """Input features: the columns of W. In a low-rank pair, the features between its two layers."""

    def refuses(self, site: Site) -> str | None:
        return "an embedding has no input features to prune" if site.has_embedding and site.pair_rank is None else None

    def curve(self, site: Site, *, trained: bool) -> CostCurve:
        if site.pair_rank is None:
            return input_gated_curve(site.shape)
        return factorized_curve(site.shape, site.pair_rank, pivot=site.pivot)

    def overhead_bytes(self, site: Site) -> int:
        # the mask of `SelectedLinear`
        return site.shape[1] * len(site.uses) if site.pair_rank is None else 0

    def represent(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        if site.pair_rank is None:
            return InputGatedMatrix(_weight(source), gate)
        p, q = factors(site, source, gate.num_components, factorizer)
        return FactorizedMatrix(p, q, gate, curve)


@dataclass(frozen=True, kw_only=True)
class SingleWeights(Method):
    """Every weight for itself: unstructured."""

    counts_nonzeros = True
    splits_pairs = True

    def curve(self, site: Site, *, trained: bool) -> CostCurve:
        return masked_curve(site.shape)

    def aimed(self, site: Site, curve: CostCurve, target: Target, rank_multiple: int | None) -> CostCurve:
        # the shape stays, so that it is the same everywhere
        return replace(curve, multiple=rank_multiple or 1)

    def represent(
        self, site: Site, source: Source, gate: Gate, curve: CostCurve, factorizer: Factorizer
    ) -> GatedMatrix:
        return MaskedMatrix(_weight(source), gate)


def _weight(source: Source) -> nn.Parameter:
    assert source.weight_OI is not None
    return as_parameter(source.weight_OI, source.requires_grad)
