"""Rows rounded to bytes and scaled back: the kernel gives what plain torch gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.kernels import int8

pytestmark = pytest.mark.skipif(not int8.can_run(torch.ones(1, 1)), reason="needs a C compiler")
sizes = st.sampled_from([0.0, 1e-39, 1e-3, 1.0, 1e30])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 70), width=st.integers(1, 600), size=sizes, threads=st.integers(1, 3))
def test_bytes_are_rounded_to_the_nearest(rows: int, width: int, size: float, threads: int) -> None:
    x_NI = size * torch.randn(rows, width + 3)[:, :width]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    bytes_NI, scale_N1 = int8.round_rows(x_NI)
    torch.set_num_threads(before)
    want_NI, want_scale_N1 = int8.round_rows_reference(x_NI)
    torch.testing.assert_close(scale_N1, want_scale_N1, rtol=1e-6, atol=0)
    # where a number lies half-way, to either side
    exact_NI = x_NI.double() / scale_N1.double() + int8.SHIFT
    assert ((bytes_NI - exact_NI).abs() <= 0.5 + 1e-4).all()
    assert (bytes_NI.int() - want_NI.int()).abs().le(1).all()


def test_what_is_no_number_is_not_rounded_away() -> None:
    x_NI = torch.randn(3, 50)
    x_NI[1, 7] = math.nan
    _, scale_N1 = int8.round_rows(x_NI)
    assert scale_N1.flatten().isnan().tolist() == [False, True, False]


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 70), width=st.integers(1, 300), biased=st.booleans())
def test_rows_are_scaled_in_place(rows: int, width: int, biased: bool) -> None:
    y_NO, scale_N1, bias_O = torch.randn(rows, width), torch.rand(rows, 1), torch.randn(width) if biased else None
    want_NO = int8.scale_rows_reference_(y_NO.clone(), scale_N1, bias_O)
    got_NO = int8.scale_rows_(y_NO, scale_N1, bias_O)
    assert got_NO is y_NO
    torch.testing.assert_close(got_NO, want_NO)
