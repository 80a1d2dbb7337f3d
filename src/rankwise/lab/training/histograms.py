"""Histograms of gates for lines of metrics: components of each matrix by how far they are open."""

from __future__ import annotations

from typing import Any

import torch

from rankwise.core.optim import linear
from rankwise.pruner import Pruner

GATES = "gates"
"""The key of a line of metrics under which they stand."""
BINS = 20
"""Equal parts of [0, 1]."""
POINTS = 20
"""Histograms are made at so many points of the ramp, and of the whole run for as long as gates move."""


def gate_histograms(pruner: Pruner, num_steps: int, before: int) -> dict[str, Any]:
    """Components of each matrix by how far they are open, for a line of metrics; nothing where none is due.

    Due is a function of the steps alone, so that a resumed run writes the same lines.

    Args:
        num_steps: of the whole run.
        before: the pruner's step at the last line.
    """

    def point(step: int) -> tuple[int, int]:
        # once the choice is made nothing moves
        whole = 0 if pruner.controller.is_frozen else POINTS * step // num_steps
        return int(POINTS * linear(step, pruner.controller.anneal_steps)), whole

    now = pruner.steps
    if before > 0 and point(now) == point(before):
        return {}
    opened = pruner.controller.open_fractions()
    if opened is None:
        return {}
    # together, so that the host waits once
    counts = torch.stack([torch.histc(part.float(), BINS, 0, 1) for part in opened]).long().tolist()
    for found, gate in zip(counts, pruner.controller.gates, strict=True):
        # closed components that were dropped
        found[0] += gate.most_components - gate.num_components
    return {GATES: {site.name: found for site, found in zip(pruner.plan.sites, counts, strict=True)}}
