"""Dense: nothing is pruned. The control of equal training that every loss is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.core.plan import Site
from rankwise.methods.gatings import UniformRanks
from rankwise.methods.representations import Factorized


@dataclass(frozen=True, kw_only=True)
class Dense(Factorized, UniformRanks):
    name = "dense"
    prunes = False

    def refuses(self, site: Site) -> str | None:
        return "the dense method prunes nothing"
