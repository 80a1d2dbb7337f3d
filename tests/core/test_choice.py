"""The global choice of components: it fits, it is full, and it takes the best first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.core.budget import CostCurve
from rankwise.core.choice import ranked_counts, uniform_counts, worth

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=6)
Shape = tuple[int, int, bool]
"""Outputs, inputs, and whether it is exported in the pivot layout."""
multiples = st.sampled_from([1, 1, 2, 3])


def curves_of(shapes: list[Shape]) -> list[CostCurve]:
    return [CostCurve(min(out, into), out + into, out * into, pivot) for out, into, pivot in shapes]


def cost(curves: list[CostCurve], counts: list[int]) -> int:
    return sum(curve(k) for curve, k in zip(curves, counts, strict=True))


def assert_full(curves: list[CostCurve], counts: list[int], room: int, multiple: int) -> None:
    """Nothing that is left would still fit."""
    spent = cost(curves, counts)
    assert spent <= room
    for curve, k in zip(curves, counts, strict=True):
        if k < curve.num_components:
            after = min(k + multiple, curve.num_components)
            assert spent + curve(after) - curve(k) > room


@given(shapes, st.integers(0, 300), multiples, st.integers(0, 10**6))
def test_ranked_choice_fits_and_is_full(shapes: list[Shape], room: int, multiple: int, seed: int) -> None:
    curves = curves_of(shapes)
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(curve.num_components, generator=generator) for curve in curves]
    assert_full(curves, ranked_counts(scores, curves, room, multiple), room, multiple)


@given(shapes, st.integers(0, 300), multiples)
def test_uniform_choice_fits_and_is_full(shapes: list[Shape], room: int, multiple: int) -> None:
    curves = curves_of(shapes)
    assert_full(curves, uniform_counts(curves, room, multiple), room, multiple)


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
    assert ranked_counts(scores, curves, room) == counts


@given(shapes, st.integers(0, 300))
def test_scores_that_are_not_numbers_come_last(shapes: list[Shape], room: int) -> None:
    curves = curves_of(shapes)
    scores = [torch.full((curve.num_components,), float("nan")) for curve in curves]
    assert_full(curves, ranked_counts(scores, curves, room), room, 1)


def test_equal_matrices_share_equally() -> None:
    curves = [CostCurve(10, 1, 10)] * 4
    assert uniform_counts(curves, 20) == [5, 5, 5, 5]
    assert sorted(uniform_counts(curves, 22)) == [5, 5, 6, 6]


def test_an_export_may_keep_nothing() -> None:
    curves = [CostCurve(3, 4, 12)]
    assert ranked_counts([torch.ones(3)], curves, 3) == uniform_counts(curves, 3) == [0]


def test_no_matrix_is_a_choice_too() -> None:
    assert ranked_counts([], [], 10) == uniform_counts([], 10) == []


def energies(curves: list[CostCurve], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(curve.num_components, generator=generator, dtype=torch.float64) for curve in curves)
    return [energy.sort(descending=True).values for energy in drawn]


@given(shapes, st.integers(0, 10**6))
def test_worth_never_rises_and_spends_all_energy(shapes: list[Shape], seed: int) -> None:
    for curve, energy in zip(curves_of(shapes), energies(curves_of(shapes), seed), strict=True):
        slopes = worth(energy, curve)
        assert (slopes.diff() <= 1e-12).all()
        steps = curve.costs(torch.arange(curve.num_components + 1)).diff()
        assert float((slopes * steps).sum()) == pytest.approx(float(energy.sum()))


@given(st.lists(shapes.map(lambda found: found[0]), min_size=2, max_size=3), st.integers(0, 10**6), st.data())
def test_no_choice_keeps_more_than_the_one_by_worth(shapes: list[Shape], seed: int, data: st.DataObject) -> None:
    """The oracle: every choice there is, at the sizes where the last matrix is taken whole steps of worth."""
    curves = curves_of(shapes)
    energy = energies(curves, seed)
    scores = [worth(e, c) for e, c in zip(energy, curves, strict=True)]
    threshold = data.draw(st.sampled_from(torch.cat(scores).tolist()))
    whole = [int((score >= threshold).sum()) for score in scores]
    room = cost(curves, whole)

    def kept(counts: Sequence[int]) -> float:
        return sum(float(e[:k].sum()) for e, k in zip(energy, counts, strict=True))

    every = itertools.product(*(range(curve.num_components + 1) for curve in curves))
    best = max(kept(counts) for counts in every if cost(curves, list(counts)) <= room)
    assert kept(ranked_counts(scores, curves, room)) == pytest.approx(best)
