"""FAC: a low-rank model whose dimensions are all reduced by the same ratio.  Paper: section 5 "Baselines"."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.methods.gatings import UniformRanks
from rankwise.methods.representations import Factorized


@dataclass(frozen=True, kw_only=True)
class Fac(Factorized, UniformRanks):
    name = "fac"
