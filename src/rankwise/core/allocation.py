"""Allocation: how many components each matrix keeps so that a budget is filled.

Paper: section 4.4 "Inference" keeps the top values per matrix; here one allocation is made for the whole model, so
that the exported size is exact. Both allocations spend at most `room` parameters, and stop only when no further step
fits. Matrices of a common width (`CostCurve.width`) are allocated as one, whose step is taken in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise

import torch
from torch import Tensor

from rankwise.core.budget import CostCurve

MAX_SCORE = 1e150
"""Scores are limited to this, so that their mean is finite."""


def global_allocation(scores: Sequence[Tensor], curves: Sequence[CostCurve], room: int) -> list[int]:
    """Components kept per matrix when the best-scored ones of all matrices are taken first.

    A step is one component, or a multiple of them at their mean score, or the change from low rank to dense. A step
    that does not fit closes its matrix, and cheaper steps of other matrices fill the rest.
    """
    groups = _groups(curves)
    steps = [_steps([scores[i] for i in group], _joint(curves, group)) for group in groups]
    if not steps:
        return []
    score = torch.cat([s for s, _, _ in steps])
    cost = torch.cat([c for _, c, _ in steps])
    matrix = torch.cat([torch.full_like(c, i) for i, (_, c, _) in enumerate(steps)])
    taken = torch.zeros(len(steps), dtype=torch.long)

    queue = score.argsort(descending=True, stable=True)
    while len(queue):
        fits = int((cost[queue].cumsum(0) <= room).sum())
        taken += torch.bincount(matrix[queue[:fits]], minlength=len(steps))
        room -= int(cost[queue[:fits]].sum())
        queue = queue[fits:]
        # of each matrix the steps before the first that costs more than is left
        place, too_large = torch.arange(len(queue)), cost[queue] > room
        first = torch.full_like(taken, len(queue))
        first.scatter_reduce_(0, matrix[queue[too_large]], place[too_large], "amin")
        queue = queue[place < first[matrix[queue]]]
    kept = [int(counts[n - 1]) if n else 0 for n, (_, _, counts) in zip(taken.tolist(), steps, strict=True)]
    return _each(groups, kept)


def blended_allocation(scores: Sequence[Tensor], curves: Sequence[CostCurve], room: int) -> list[int]:
    """Components kept per matrix in proportion to the geometric mean of the global and the uniform allocation."""
    both = zip(global_allocation(scores, curves, room), uniform_allocation(curves, room), strict=True)
    shares = [math.sqrt(max(one, 1) * max(other, 1)) for one, other in both]
    # component j of a matrix with share s is taken before those of lower s / j, so that all keep j in proportion to s
    wanted = [
        share / torch.arange(1, curve.num_components + 1, dtype=torch.double)
        for share, curve in zip(shares, curves, strict=True)
    ]
    return global_allocation(wanted, curves, room)


def _groups(curves: Sequence[CostCurve]) -> list[list[int]]:
    """The matrices that keep the same number of components."""
    groups: dict[str | int, list[int]] = {}
    for i, curve in enumerate(curves):
        groups.setdefault(curve.width or i, []).append(i)
    return list(groups.values())


def _joint(curves: Sequence[CostCurve], group: Sequence[int]) -> CostCurve:
    """What a number of components costs in all matrices of a group."""
    curve, n = curves[group[0]], len(group)
    if n == 1:
        return curve
    assert all(curves[i] == curve for i in group) and not curve.pivot and curve.dense_from is None
    return replace(curve, per_component=n * curve.per_component, cap=n * curve.cap)


def _each(groups: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
    """The count of each matrix, from that of its group."""
    found = {i: k for group, k in zip(groups, counts, strict=True) for i in group}
    return [found[i] for i in range(len(found))]


def _steps(scores: Sequence[Tensor], curve: CostCurve) -> tuple[Tensor, Tensor, Tensor]:
    """Score, cost and resulting number of components of each step of one group, best components first."""
    best_first = _best_first(scores[0])
    if len(scores) > 1:
        best_first = torch.stack([_best_first(score).clamp(-MAX_SCORE, MAX_SCORE) for score in scores]).mean(0)
    counts = curve.allowed_counts()
    zero = torch.zeros(1, dtype=torch.long)
    cost = curve.costs(counts).diff(prepend=zero)
    score = _step_scores(best_first, counts)
    if curve.width:
        # before anything else: there is no width of zero
        score = score.index_fill(0, zero, torch.inf)
    return score, cost, counts


def _best_first(score: Tensor) -> Tensor:
    return torch.nan_to_num(score.detach().double().cpu(), nan=-torch.inf).sort(descending=True).values


def _step_scores(best_first: Tensor, counts: Tensor) -> Tensor:
    """The mean score of the components of each step."""
    if len(counts) == len(best_first):
        return best_first
    sizes = counts.diff(prepend=torch.zeros(1, dtype=torch.long))
    step = torch.arange(len(counts)).repeat_interleave(sizes)
    limited = best_first.clamp(-MAX_SCORE, MAX_SCORE)
    mean = torch.zeros(len(counts), dtype=torch.double).index_add_(0, step, limited) / sizes
    # rounding must not put a step before the one that leads to it
    return mean.cummin(0).values


def value_per_parameter(energy_R: Tensor, curve: CostCurve) -> Tensor:
    """The score of each component for `global_allocation`: the energy that it keeps per parameter.

    `energy_R` is the error that dropping each component adds, largest first. A component may cost less than the one
    before it, or nothing, so that two together are worth more than the first alone. Hence the score is the slope of
    the concave hull of (parameters spent, energy kept): matrices that are taken in this order keep the most energy in
    total, except for the last one.
    """
    counts: list[int] = [0, *curve.allowed_counts().tolist()]
    spent: list[int] = curve.costs(torch.tensor(counts)).tolist()
    total: list[float] = [0.0, *energy_R.double().cumsum(0).tolist()]
    kept = [total[k] for k in counts]

    def is_below_hull(middle: int, left: int, right: int) -> bool:
        run, full_run = spent[middle] - spent[left], spent[right] - spent[left]
        return (kept[middle] - kept[left]) * full_run <= (kept[right] - kept[left]) * run

    hull = [0]
    for i in range(1, len(kept)):
        while len(hull) > 1 and is_below_hull(hull[-1], hull[-2], i):
            hull.pop()
        hull.append(i)
    slopes = torch.zeros(len(energy_R), dtype=torch.float64)
    for left, right in pairwise(hull):
        slopes[counts[left] : counts[right]] = (kept[right] - kept[left]) / max(spent[right] - spent[left], 1)
    return slopes


def uniform_allocation(curves: Sequence[CostCurve], room: int) -> list[int]:
    """Components kept per matrix when every matrix keeps the same fraction (FAC, AGP)."""
    groups = _groups(curves)
    return _each(groups, _uniform([_joint(curves, group) for group in groups], room))


def _uniform(curves: Sequence[CostCurve], room: int) -> list[int]:
    def at(fraction: float) -> list[int]:
        counts = [_at_most(curve, int(fraction * curve.num_components)) for curve in curves]
        # a dense matrix keeps all components
        return [c.num_components if c(k) == c.cap else k for c, k in zip(curves, counts, strict=True)]

    def spent(counts: Sequence[int]) -> int:
        return sum(curve(k) for curve, k in zip(curves, counts, strict=True))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(at(middle)) <= room else (low, middle)
    counts = at(low)
    room -= spent(counts)
    steps: list[tuple[float, int, int]] = []

    def offer(i: int) -> None:
        curve, k = curves[i], counts[i]
        if (after := curve.next_count(k)) > k:
            heappush(steps, (min(k + curve.multiple, after) / curve.num_components, i, after))

    for i in range(len(curves)):
        offer(i)
    while steps:
        _, i, after = heappop(steps)
        cost = curves[i](after) - curves[i](counts[i])
        # what does not fit now never will
        if cost <= room:
            room -= cost
            counts[i] = after
            offer(i)
    return counts


def _at_most(curve: CostCurve, k: int) -> int:
    """The largest allowed count up to `k`, but never fewer components than must be kept."""
    if not curve.width:
        return k // curve.multiple * curve.multiple
    return max((count for count in curve.allowed_counts().tolist() if count <= k), default=curve.least_count)
