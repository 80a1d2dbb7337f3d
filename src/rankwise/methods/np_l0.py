"""NP-L0: input features behind learned gates, without factorization.  Paper: section 5 "Baselines"."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.methods.gatings import LearnedGates
from rankwise.methods.representations import InputFeatures


@dataclass(frozen=True, kw_only=True)
class NpL0(InputFeatures, LearnedGates):
    name = "np-l0"
