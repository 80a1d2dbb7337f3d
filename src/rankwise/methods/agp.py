"""AGP: single weights, pruned gradually by magnitude (Zhu and Gupta 2017).  Paper: section 5 "Baselines"."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.methods.gatings import MagnitudeGates
from rankwise.methods.representations import SingleWeights


@dataclass(frozen=True, kw_only=True)
class Agp(SingleWeights, MagnitudeGates):
    name = "agp"
