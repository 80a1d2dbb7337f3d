"""FLOP-AGP: rank-1 components, pruned gradually by a learned diagonal.  Paper: section 5 "Baselines"."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.methods.gatings import MagnitudeGates
from rankwise.methods.representations import GatedComponents


@dataclass(frozen=True, kw_only=True)
class FlopAgp(GatedComponents, MagnitudeGates):
    name = "flop-agp"
