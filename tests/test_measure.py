"""Timings: in turn, in order, of what was asked for."""

from __future__ import annotations

import time

import pytest

from rankwise.measure import slower_than_dense, time_together


def test_calls_take_turns_and_the_slower_one_is_slower() -> None:
    seen: list[str] = []

    def slow() -> None:
        seen.append("slow")
        time.sleep(0.02)

    timings = time_together({"fast": lambda: seen.append("fast"), "slow": slow}, repeats=3)
    assert seen == ["fast"] * 2 + ["slow"] * 2 + ["fast", "slow"] * 3
    assert timings["slow"].p20 >= 20
    assert timings["fast"].median < timings["slow"].median
    for timing in timings.values():
        assert timing.p20 <= timing.median <= timing.p80
        assert timing.repeats == 3


def test_one_repeat_has_no_spread() -> None:
    with pytest.raises(ValueError, match="`repeats` must be at least 2, but is 1"):
        time_together({"a": lambda: None}, repeats=1)


@pytest.mark.parametrize(
    "milliseconds, is_said", [(5.0, False), (10.0, False), (10.3, False), (10.31, True), (20.0, True)]
)
def test_slower_than_dense_is_said_beyond_three_percent(milliseconds: float, is_said: bool) -> None:
    line = slower_than_dense("small", milliseconds, 10.0)
    assert (line is not None) == is_said


def test_the_line_says_what_is_slower_how_much_where_and_why() -> None:
    assert slower_than_dense("small in int8", 20.0, 10.0, where="batch 1", reason="its matrices are no smaller") == (
        "small in int8 is slower than dense of the same precision (0.50x; batch 1): 20.00 against 10.00 ms (its "
        "matrices are no smaller)."
    )
    assert slower_than_dense("small", 20.0, 10.0) == (
        "small is slower than dense of the same precision (0.50x): 20.00 against 10.00 ms."
    )
