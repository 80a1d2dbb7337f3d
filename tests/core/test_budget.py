"""Budgets: exactly one unit, resolved to parameters, refused where it cannot be met."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise import Budget, BudgetError, SizeReport, count
from rankwise.core.budget import CostCurve, SizeAccount, Storage

ACCOUNT = SizeAccount(dense=1000, prunable=900, curves=(CostCurve(10, 90, 900),), storage=Storage(overhead=8))


@given(st.integers(1, 10**12), st.integers(1, 9999))
def test_removed_is_exact_decimal_arithmetic(dense: int, basis_points: int) -> None:
    account = SizeAccount(dense=dense, prunable=dense, curves=())
    limit = Budget(removed=basis_points / 10_000).resolve(account)
    assert limit == dense * (10_000 - basis_points) // 10_000


def test_each_unit_resolves_to_parameters() -> None:
    assert Budget(params=640).resolve(ACCOUNT) == 640
    assert Budget(params=64e1).resolve(ACCOUNT) == 640
    assert Budget(removed=0.8).resolve(ACCOUNT) == 200
    assert Budget(removed=0.8, of="prunable").resolve(ACCOUNT) == 280
    assert Budget(megabytes=0.002).resolve(ACCOUNT) == (2000 - 8) // 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "exactly one of .* but got none"),
        ({"params": 5, "removed": 0.5}, "exactly one of .* but got `params` and `removed`"),
        ({"removed": 0.0}, r"`removed` must be a fraction in \(0, 1\), but is 0.0"),
        ({"removed": 1.0}, r"`removed` must be a fraction in \(0, 1\), but is 1.0"),
        ({"removed": 80}, r"but is 80 instead. Did you mean removed=0.8\?"),
        ({"removed": float("nan")}, r"`removed` must be a fraction in \(0, 1\), but is nan"),
        ({"params": 0}, "`params` must be positive and finite, but is 0"),
        ({"params": 10.5}, "`params` must be a whole number, but is 10.5"),
        ({"latency_ms": 5, "removed": 0.5}, "exactly one of .* but got `removed` and `latency_ms`"),
        ({"latency_ms": 0}, "`latency_ms` must be positive and finite, but is 0"),
        ({"megabytes": -1}, "`megabytes` must be positive and finite, but is -1"),
        ({"params": 5, "of": "prunable"}, '`of="prunable"` goes with `removed`'),
        ({"removed": 0.5, "of": "layers"}, "`of` must be .* but is 'layers'"),
        ({"removed": 0.5, "dtype": torch.float16}, "`dtype` .* goes with `megabytes`"),
    ],
)
def test_a_malformed_budget_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget(**arguments)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, Fraction])
def test_numbers_of_other_libraries_are_numbers(kind: type) -> None:
    assert Budget(params=kind(640)).resolve(ACCOUNT) == 640
    if kind is not np.int64:
        assert Budget(removed=kind(0.5)).resolve(ACCOUNT) == 500
        assert Budget(megabytes=kind(0.5)).resolve(ACCOUNT) == (500_000 - 8) // 4


def test_a_budget_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="`removed` must be a number, but is '0.8'"):
        Budget(removed="0.8")


def test_an_unreachable_budget_names_the_smallest_size() -> None:
    with pytest.raises(BudgetError, match=r"at least 100 parameters .* asks for 99 .* at most 0.9 of the model"):
        Budget(params=99).resolve(ACCOUNT)
    with pytest.raises(BudgetError, match="The smallest size is megabytes=0.000408"):
        Budget(megabytes=0.0004).resolve(ACCOUNT)
    assert Budget(params=100).resolve(ACCOUNT) == 100


def test_count_takes_tied_weights_once() -> None:
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    b.weight = a.weight
    assert count(torch.nn.Sequential(a, b, a)) == 9 + 3 + 3


def test_a_report_says_what_was_asked_and_what_came() -> None:
    report = SizeReport(dense=1000, budget=200, expected=210.4, exported=199, prunable=900)
    assert report.removed == pytest.approx(0.801)
    assert report.removed_of_prunable == pytest.approx(0.89)
    assert "budget                200   80.00% removed" in str(report)
    assert "non-zero" in str(SizeReport(1000, 200, 200, 200, 900, nonzeros=True))
