"""The global choice of components: it fits, it is full, and it takes the best first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rankwise.core.allocation import global_allocation, uniform_allocation, value_per_parameter
from rankwise.core.budget import CostCurve

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=6)
Shape = tuple[int, int, bool]
"""Outputs, inputs, and whether it is exported in the pivot layout."""


@st.composite
def aimed(draw: st.DrawFn, largest: int = 9) -> CostCurve:
    """A matrix, or a pair of lower rank, with a multiple of its own, and a share from which it is dense."""
    out, into = draw(st.integers(1, largest)), draw(st.integers(1, largest))
    pivot, rank = draw(st.booleans()), draw(st.integers(0, min(out, into)))
    share = draw(st.sampled_from([None, 0.3, 0.5, 0.8, 0.9]))
    dense_from = None if share is None else max(1, int(share * out * into))
    return CostCurve(rank, out + into, out * into, pivot, draw(st.integers(1, 4)), dense_from)


def curves_of(shapes: list[Shape]) -> list[CostCurve]:
    return [CostCurve(min(out, into), out + into, out * into, pivot) for out, into, pivot in shapes]


def low_rank(curve: CostCurve, k: int) -> int:
    """Parameters of k components that are not multiplied out."""
    k = min(k, curve.per_component // 2) if curve.pivot else k
    return k * (curve.per_component - k * curve.pivot)


def allowed(curve: CostCurve) -> list[int]:
    """The numbers of components that an export may keep: of those that cost the same, as a dense matrix does, all."""
    n = curve.num_components
    kept = [k for k in range(n + 1) if k % curve.multiple == 0 or k == n]
    return [k for k in kept if k in (0, n) or curve(k) < curve.cap]


def cost(curves: list[CostCurve], counts: list[int]) -> int:
    return sum(curve(k) for curve, k in zip(curves, counts, strict=True))


def assert_full(curves: list[CostCurve], counts: list[int], room: int) -> None:
    """Every matrix keeps what it may, and nothing that is left would still fit."""
    spent = cost(curves, counts)
    assert spent <= room
    for curve, k in zip(curves, counts, strict=True):
        assert k in allowed(curve)
        assert all(spent + curve(more) - curve(k) > room for more in allowed(curve) if more > k)


def scores_of(curves: list[CostCurve], seed: int) -> list[torch.Tensor]:
    """Some alike, as those of gates at a bound are, and some no numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(curve.num_components, generator=generator) for curve in curves]
    alike = [torch.where(score > 0.5, torch.tensor(0.1), score) for score in drawn]
    return [torch.where(score < -1.5, torch.tensor(torch.nan), score) for score in alike]


aimed_curves = st.lists(aimed(), min_size=1, max_size=6)


@given(aimed_curves, st.integers(0, 300), st.integers(0, 10**6))
def test_ranked_choice_fits_and_is_full(curves: list[CostCurve], room: int, seed: int) -> None:
    assert_full(curves, global_allocation(scores_of(curves, seed), curves, room), room)


@given(aimed_curves, st.integers(0, 300))
def test_uniform_choice_fits_and_is_full(curves: list[CostCurve], room: int) -> None:
    assert_full(curves, uniform_allocation(curves, room), room)


@given(st.lists(aimed(largest=6), min_size=1, max_size=3), st.integers(0, 60), st.integers(0, 10**6))
def test_of_every_choice_that_fits_none_keeps_all_of_this_one_and_more(
    curves: list[CostCurve], room: int, seed: int
) -> None:
    """The oracle: every choice there is."""
    every = [c for c in itertools.product(*map(allowed, curves)) if cost(curves, list(c)) <= room]
    for counts in (global_allocation(scores_of(curves, seed), curves, room), uniform_allocation(curves, room)):
        assert [c for c in every if all(a >= b for a, b in zip(c, counts, strict=True))] == [tuple(counts)]


@given(aimed())
def test_the_cost_of_a_rank_is_that_of_low_rank_or_dense_where_that_does_not_pay(curve: CostCurve) -> None:
    ranks = range(curve.num_components + 1)
    for k in ranks:
        pays = low_rank(curve, k) < (curve.cap if curve.dense_from is None else curve.dense_from)
        assert curve(k) == (low_rank(curve, k) if pays else curve.cap)
    assert curve.costs(torch.tensor(ranks)).tolist() == [curve(k) for k in ranks]
    for room in range(curve.cap + 2):
        assert curve.largest_count(room) == max(k for k in allowed(curve) if curve(k) <= room)


@given(st.lists(aimed(), min_size=1, max_size=4), st.integers(0, 300), st.integers(0, 10**6))
def test_a_step_is_worth_the_mean_of_what_it_buys(curves: list[CostCurve], room: int, seed: int) -> None:
    """The oracle: walk down the ranking of all steps, take what fits; those that cost nothing come along."""
    scores = [score.nan_to_num(-9.0).double() for score in scores_of(curves, seed)]
    queue = []
    for i, (score, curve) in enumerate(zip(scores, curves, strict=True)):
        best = score.sort(descending=True).values
        n, start, lowest = curve.num_components, 0, float("inf")
        multiples = [k for k in range(1, n + 1) if k % curve.multiple == 0 or k == n]
        # the step to dense buys as many components as would cost that much, and those beyond are free
        for end in [k for k in multiples if curve(k) < curve.cap or low_rank(curve, k) >= curve.cap or k == n]:
            lowest = min(lowest, float(best[start:end].mean()))
            queue.append((-round(lowest, 9), i, end))
            start = end
    counts = [0] * len(curves)
    closed = set()
    for _, i, end in sorted(queue):
        if i not in closed and cost(curves, counts) + curves[i](end) - curves[i](counts[i]) <= room:
            counts[i] = end
        else:
            closed.add(i)
    assert global_allocation([s.round(decimals=9) for s in scores], curves, room) == counts


@given(shapes, st.integers(0, 300), st.integers(0, 10**6))
def test_ranked_choice_is_the_greedy_one(shapes: list[Shape], room: int, seed: int) -> None:
    """The oracle: walk down the ranking one component at a time, take what fits."""
    curves = curves_of(shapes)
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(curve.num_components, generator=generator) for curve in curves]
    ranking = sorted(((float(s), i) for i, score in enumerate(scores) for s in score), reverse=True)
    counts = [0] * len(curves)
    for _, i in ranking:
        step = curves[i](counts[i] + 1) - curves[i](counts[i])
        if cost(curves, counts) + step <= room:
            counts[i] += 1
    assert global_allocation(scores, curves, room) == counts


@given(shapes, st.integers(0, 300))
def test_scores_that_are_not_numbers_come_last(shapes: list[Shape], room: int) -> None:
    curves = curves_of(shapes)
    scores = [torch.full((curve.num_components,), float("nan")) for curve in curves]
    assert_full(curves, global_allocation(scores, curves, room), room)


def test_equal_matrices_share_equally() -> None:
    curves = [CostCurve(10, 1, 10)] * 4
    assert uniform_allocation(curves, 20) == [5, 5, 5, 5]
    assert sorted(uniform_allocation(curves, 22)) == [5, 5, 6, 6]


def test_an_export_may_keep_nothing() -> None:
    curves = [CostCurve(3, 4, 12)]
    assert global_allocation([torch.ones(3)], curves, 3) == uniform_allocation(curves, 3) == [0]


def test_no_matrix_is_a_choice_too() -> None:
    assert global_allocation([], [], 10) == uniform_allocation([], 10) == []


def energies(curves: list[CostCurve], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(curve.num_components, generator=generator, dtype=torch.float64) for curve in curves)
    return [energy.sort(descending=True).values for energy in drawn]


@given(aimed_curves, st.integers(0, 10**6))
def test_worth_never_rises_and_spends_all_energy(curves: list[CostCurve], seed: int) -> None:
    for curve, energy in zip(curves, energies(curves, seed), strict=True):
        slopes = value_per_parameter(energy, curve)
        assert (slopes.diff() <= 1e-12).all()
        steps = [
            (curve(end) - curve(start), end) for start, end in itertools.pairwise([0, *curve.allowed_counts().tolist()])
        ]
        assert sum(cost * float(slopes[end - 1]) for cost, end in steps) == pytest.approx(float(energy.sum()))


@given(st.lists(aimed(), min_size=2, max_size=3), st.integers(0, 10**6), st.data())
def test_no_choice_keeps_more_than_the_one_by_worth(curves: list[CostCurve], seed: int, data: st.DataObject) -> None:
    """The oracle: every choice there is, at the sizes where the last matrix is taken whole steps of worth."""
    energy = energies(curves, seed)
    scores = [value_per_parameter(e, c) for e, c in zip(energy, curves, strict=True)]
    assume(any(len(score) for score in scores))
    threshold = data.draw(st.sampled_from(torch.cat(scores).tolist()))
    whole = [int((score >= threshold).sum()) for score in scores]
    room = cost(curves, whole)

    def kept(counts: Sequence[int]) -> float:
        return sum(float(e[:k].sum()) for e, k in zip(energy, counts, strict=True))

    every = itertools.product(*map(allowed, curves))
    best = max(kept(counts) for counts in every if cost(curves, list(counts)) <= room)
    assert kept(global_allocation(scores, curves, room)) == pytest.approx(best)


widths = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 50), st.sampled_from([1, 2, 4]), st.booleans()),
    min_size=1,
    max_size=3,
)
"""Of each width: how many matrices, components, parameters of one, multiple, and whether only some counts are taken."""


@given(widths, st.floats(0, 1.2), st.booleans(), st.integers(0, 99))
def test_matrices_of_one_width_keep_the_same_number(
    specs: list[tuple[int, int, int, int, bool]], share: float, by_score: bool, seed: int
) -> None:
    """Never more than the room, never no component, and no further step of any width fits."""
    curves = []
    for i, (matrices, num, cost, multiple, some) in enumerate(specs):
        counts = (*(n for n in (1, 2, 4, 8) if n < num), num) if some else ()
        curve = CostCurve(num, cost, num * cost, multiple=1 if some else multiple, width=f"width {i}", counts=counts)
        curves += [curve] * matrices
    least = sum(curve(curve.least_count) for curve in curves)
    room = max(least, int(share * sum(curve.full for curve in curves)))
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(curve.num_components, generator=generator) for curve in curves]
    found = global_allocation(scores, curves, room) if by_score else uniform_allocation(curves, room)
    assert len(set(zip((curve.width for curve in curves), found, strict=True))) == len(specs)
    kept = list(zip(curves, found, strict=True))
    assert all(k in curve.allowed_counts().tolist() for curve, k in kept)
    spent = sum(curve(k) for curve, k in kept)
    assert spent <= room
    for width in {curve.width for curve in curves}:
        step = sum(curve(curve.next_count(k)) - curve(k) for curve, k in kept if curve.width == width)
        assert step == 0 or spent + step > room
