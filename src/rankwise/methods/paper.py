"""The six methods of the paper's tables.  Paper: section 4 (FLOP-L0) and section 5 "Baselines" (the others)."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.core.plan import Site
from rankwise.methods.gatings import LearnedGates, MagnitudeGates, UniformRanks
from rankwise.methods.representations import Factorized, GatedComponents, InputFeatures, SingleWeights


@dataclass(frozen=True, kw_only=True)
class FlopL0(GatedComponents, LearnedGates):
    """Rank-1 components behind learned gates."""

    name = "flop-l0"


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
