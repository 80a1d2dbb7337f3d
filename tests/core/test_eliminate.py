"""Backward elimination: what features are worth when the others take over, against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.core.eliminate import damped, eliminate, replaced
from rankwise.core.factorize import Moments
from rankwise.core.widths import features


def problem(seed: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, second moments of correlated inputs, and weights of its outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * inputs, inputs, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    return weight, x.t() @ x / len(x), torch.rand(outputs, generator=generator, dtype=torch.float64)


def error(weight_OI: Tensor, inputs_II: Tensor, rows_O: Tensor, kept: Tensor) -> float:
    """The weighted squared error of the outputs when only `kept` columns are left, at their best."""
    rest = weight_OI.index_add(1, kept, -replaced(weight_OI, inputs_II, kept))
    return float((rows_O * ((rest @ damped(inputs_II)) * rest).sum(1)).sum())


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_the_first_to_go_is_the_one_that_is_missed_least(seed: int, outputs: int, num: int, size: int) -> None:
    weight, inputs, rows = problem(seed, outputs, num * size)
    order, energy = eliminate(weight, Moments(inputs, rows), num)
    assert sorted(order.tolist()) == list(range(num))
    missed = [
        error(weight, inputs, rows, features(torch.tensor([k for k in range(num) if k != i], dtype=torch.long), size))
        for i in range(num)
    ]
    assert missed[int(order[-1])] == pytest.approx(min(missed), rel=1e-6)
    assert float(energy[-1]) == pytest.approx(min(missed), rel=1e-6)
    assert all(a >= b for a, b in zip(energy.tolist(), energy.tolist()[1:], strict=False))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 7))
def test_the_values_say_what_is_lost_along_the_way(seed: int, num: int) -> None:
    """The error of any number of columns is at most the sum of the values of those that are gone."""
    weight, inputs, rows = problem(seed, 3, num)
    order, energy = eliminate(weight, Moments(inputs, rows), num)
    for k in range(num + 1):
        lost = error(weight, inputs, rows, order[:k].sort().values)
        assert lost <= float(energy[k:].sum()) * (1 + 1e-6) + 1e-12


def test_columns_that_are_left_are_the_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(6, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    kept = torch.tensor([0, 3, 5])
    # the noise of every feature is that of further samples, in which it is alone
    noise = torch.diag((damped(x.t() @ x / 200) - x.t() @ x / 200).diagonal().mul(200).sqrt())
    samples = torch.cat([x, noise])
    best = torch.linalg.lstsq(samples[:, kept], samples @ weight.t()).solution.t()
    torch.testing.assert_close(replaced(weight, x.t() @ x / 200, kept), best)


def test_of_two_equal_features_one_goes_first_and_the_other_stays() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x[:, [0, 1, 1, 2, 3]]
    order, energy = eliminate(torch.ones(1, 5, dtype=torch.float64), Moments(x.t() @ x / 300), 5)
    assert int(order[-1]) in (1, 2) and float(energy[-1]) < 0.1 * float(energy[-2])


def test_without_moments_the_norm_decides() -> None:
    weight = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 2.0, 0.5]])
    order, energy = eliminate(weight, Moments(), 4)
    assert order.tolist() == [1, 2, 0, 3]
    assert energy.tolist() == [9.0, 8.0, 1.0, 0.25]


def test_features_that_are_always_zero_are_worth_nothing() -> None:
    x = torch.randn(50, 3, dtype=torch.float64) * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    order, energy = eliminate(torch.ones(2, 3), Moments(x.t() @ x / 50), 3)
    assert int(order[-1]) == 1 and float(energy[-1]) < 1e-6 * float(energy[0])
    _, none = eliminate(torch.ones(2, 3), Moments(torch.zeros(3, 3)), 3)
    assert none.isfinite().all()
