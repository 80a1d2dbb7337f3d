"""The global choice of components: how many of each matrix to keep so that a budget is filled.

Paper: section 4.4 "Inference" keeps the top values per matrix; here the choice is made once over the whole
model, so that the exported size is exact. Both functions spend at most `room` parameters, and stop only when
no step that is left fits any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rankwise.core.budget import CostCurve


def ranked_counts(scores: Sequence[Tensor], curves: Sequence[CostCurve], room: int, multiple: int = 1) -> list[int]:
    """Components kept per matrix when the best-scored of all matrices are taken first.

    A step is one component, or `multiple` of them at their mean score. Where the next best step does not fit,
    its matrix is closed and cheaper steps of other matrices fill what is left.
    """
    steps = [_steps(score, curve, multiple) for score, curve in zip(scores, curves, strict=True)]
    counts = [0] * len(steps)
    if not steps:
        return counts
    score = torch.cat([s for s, _, _ in steps])
    cost = torch.cat([c for _, c, _ in steps])
    matrix = torch.cat([torch.full_like(c, i) for i, (_, c, _) in enumerate(steps)])
    taken = torch.zeros(len(steps), dtype=torch.long)

    queue = score.argsort(descending=True, stable=True)
    while len(queue):
        fits = int((cost[queue].cumsum(0) <= room).sum())
        taken += torch.bincount(matrix[queue[:fits]], minlength=len(steps))
        room -= int(cost[queue[:fits]].sum())
        rest = queue[fits:]
        queue = rest[matrix[rest] != matrix[rest[0]]] if len(rest) else rest

    for i, (_, _, ends) in enumerate(steps):
        counts[i] = int(ends[taken[i] - 1]) if taken[i] else 0
    return counts


def _steps(score: Tensor, curve: CostCurve, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Score, cost and resulting count of each step of one matrix, best components first."""
    best_first = torch.nan_to_num(score.detach().double().cpu(), nan=-torch.inf).sort(descending=True).values
    ends = torch.arange(multiple, len(best_first) + multiple, multiple).clamp(max=len(best_first))
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
    total = torch.cat([torch.zeros(1, dtype=torch.double), best_first.cumsum(0)])
    mean = best_first if multiple == 1 else (total[ends] - total[starts]) / (ends - starts)
    spent = curve.costs(ends)
    return mean, spent.diff(prepend=torch.zeros(1, dtype=torch.long)), ends


def worth(energy_R: Tensor, curve: CostCurve) -> Tensor:
    """What each component saves per parameter, for `ranked_counts`; `energy_R` is what dropping each costs, most first.

    A component may cost less than the one before it, or nothing, so that to go on is worth more than to stop there.
    That is the slope of the least concave curve above (parameters spent, energy kept): matrices that are taken in
    its order keep the most energy in all, but for the last one taken.
    """
    spent: list[int] = curve.costs(torch.arange(len(energy_R) + 1)).tolist()
    kept: list[float] = [0.0, *energy_R.double().cumsum(0).tolist()]
    corners = [0]

    def is_below(middle: int, left: int, right: int) -> bool:
        return (kept[middle] - kept[left]) * (spent[right] - spent[left]) <= (kept[right] - kept[left]) * (
            spent[middle] - spent[left]
        )

    for k in range(1, len(kept)):
        while len(corners) > 1 and is_below(corners[-1], corners[-2], k):
            corners.pop()
        corners.append(k)
    slopes = torch.zeros(len(energy_R), dtype=torch.float64)
    for left, right in pairwise(corners):
        slopes[left:right] = (kept[right] - kept[left]) / max(spent[right] - spent[left], 1)
    return slopes


def uniform_counts(curves: Sequence[CostCurve], room: int, multiple: int = 1) -> list[int]:
    """Components kept per matrix when every matrix keeps the same fraction (FAC, AGP)."""

    def at(fraction: float) -> list[int]:
        counts = [int(fraction * curve.num_components) // multiple * multiple for curve in curves]
        # beyond the cap components are free
        return [c.num_components if c(k) == c.cap else k for c, k in zip(curves, counts, strict=True)]

    def spent(counts: Sequence[int]) -> int:
        return sum(curve(k) for curve, k in zip(curves, counts, strict=True))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(at(middle)) <= room else (low, middle)
    counts = at(low)
    room -= spent(counts)
    while True:
        steps = []
        for i, (curve, k) in enumerate(zip(curves, counts, strict=True)):
            after = min(k + multiple, curve.num_components)
            if after > k and curve(after) - curve(k) <= room:
                steps.append((after / curve.num_components, i, after))
        if not steps:
            return counts
        _, i, after = min(steps)
        room -= curves[i](after) - curves[i](counts[i])
        counts[i] = after
