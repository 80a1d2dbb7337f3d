"""Timings: in turn, in order, of what was asked for."""

from __future__ import annotations

import time

import pytest

from rankwise.deploy.measure import time_together


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
