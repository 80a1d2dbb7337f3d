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

MOST = 1e150
"""Scores beyond it count as it, so that a mean of them is a number."""


def ranked_counts(scores: Sequence[Tensor], curves: Sequence[CostCurve], room: int) -> list[int]:
    """Components kept per matrix when the best-scored of all matrices are taken first.

    A step is one component, or a multiple of the matrix's own at their mean score, or from low rank to dense. Where
    the next best step does not fit, its matrix is closed and cheaper steps of other matrices fill what is left.
    """
    steps = [_steps(score, curve) for score, curve in zip(scores, curves, strict=True)]
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


def _steps(score: Tensor, curve: CostCurve) -> tuple[Tensor, Tensor, Tensor]:
    """Score, cost and resulting count of each step of one matrix, best components first."""
    best_first = torch.nan_to_num(score.detach().double().cpu(), nan=-torch.inf).sort(descending=True).values
    ends = curve.stops()
    nothing = torch.zeros(1, dtype=torch.long)
    cost = curve.costs(ends).diff(prepend=nothing)
    sizes = ends.diff(prepend=nothing)
    if len(ends) == len(best_first):
        return best_first, cost, ends
    step = torch.arange(len(ends)).repeat_interleave(sizes)
    mean = torch.zeros(len(ends), dtype=torch.double).index_add_(0, step, best_first.clamp(-MOST, MOST)) / sizes
    # rounding must not put a step before the one that leads to it
    return mean.cummin(0).values, cost, ends


def worth(energy_R: Tensor, curve: CostCurve) -> Tensor:
    """What each component saves per parameter, for `ranked_counts`; `energy_R` is what dropping each costs, most first.

    A component may cost less than the one before it, or nothing, so that to go on is worth more than to stop there.
    That is the slope of the least concave curve above (parameters spent, energy kept): matrices that are taken in
    its order keep the most energy in all, but for the last one taken.
    """
    stops: list[int] = [0, *curve.stops().tolist()]
    spent: list[int] = curve.costs(torch.tensor(stops)).tolist()
    total: list[float] = [0.0, *energy_R.double().cumsum(0).tolist()]
    kept = [total[k] for k in stops]
    corners = [0]

    def is_below(middle: int, left: int, right: int) -> bool:
        return (kept[middle] - kept[left]) * (spent[right] - spent[left]) <= (kept[right] - kept[left]) * (
            spent[middle] - spent[left]
        )

    for i in range(1, len(kept)):
        while len(corners) > 1 and is_below(corners[-1], corners[-2], i):
            corners.pop()
        corners.append(i)
    slopes = torch.zeros(len(energy_R), dtype=torch.float64)
    for left, right in pairwise(corners):
        slopes[stops[left] : stops[right]] = (kept[right] - kept[left]) / max(spent[right] - spent[left], 1)
    return slopes


def uniform_counts(curves: Sequence[CostCurve], room: int) -> list[int]:
    """Components kept per matrix when every matrix keeps the same fraction (FAC, AGP)."""

    def at(fraction: float) -> list[int]:
        counts = [int(fraction * curve.num_components) // curve.multiple * curve.multiple for curve in curves]
        # all components of a dense matrix are kept
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
            after = curve.next_stop(k)
            if after > k and curve(after) - curve(k) <= room:
                steps.append((min(k + curve.multiple, after) / curve.num_components, i, after))
        if not steps:
            return counts
        _, i, after = min(steps)
        room -= curves[i](after) - curves[i](counts[i])
        counts[i] = after
