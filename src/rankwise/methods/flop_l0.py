"""FLOP-L0: rank-1 components behind learned gates.  Paper: section 4."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.methods.gatings import LearnedGates
from rankwise.methods.representations import GatedComponents


@dataclass(frozen=True, kw_only=True)
class FlopL0(GatedComponents, LearnedGates):
    name = "flop-l0"
