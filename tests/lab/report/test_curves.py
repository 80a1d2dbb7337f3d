"""Curves keep what a reader looks for, however few points are left of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rankwise.lab.report.curves import medians, read_metrics, thinned

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400).map(lambda found: np.asarray(found))


@given(values=values, limit=st.integers(2, 60))
def test_a_thinned_curve_keeps_its_ends_and_extremes(values: NDArray[np.float64], limit: int) -> None:
    steps = np.arange(len(values)) * 7
    kept_steps, kept = thinned(steps, values, limit)
    assert kept_steps[0] == steps[0] and kept_steps[-1] == steps[-1]
    assert kept.min() == values.min() and kept.max() == values.max()
    assert len(kept) <= max(limit + 2, 2)
    assert (np.diff(kept_steps) > 0).all()
    # every point is one of the curve
    assert (values[kept_steps // 7] == kept).all()


@given(values=values, limit=st.integers(2, 60))
def test_a_running_median_keeps_the_ends_and_makes_no_value_up(values: NDArray[np.float64], limit: int) -> None:
    steps = np.arange(len(values)) * 7
    kept_steps, found = medians(steps, values, limit)
    assert kept_steps[0] == steps[0] and kept_steps[-1] == steps[-1]
    assert len(found) == min(limit, len(values))
    assert set(found) <= set(values)


def test_one_slow_moment_is_not_seen_in_the_speed() -> None:
    values = np.full(400, 100.0)
    values[200] = 1.0
    assert (medians(np.arange(400), values, 400)[1] == 100.0).all()


def test_lines_that_are_damaged_are_counted_and_one_that_is_still_written_is_not(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in range(1, 6)]
    lines[2] = lines[2][:-4]
    lines.insert(1, '{"no": "step"}')
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(lines) + "\n" + '{"step": 6, "lo')
    found = read_metrics(file, 100)
    assert found.broken == 2
    assert found.curves["loss"][0].tolist() == [1, 2, 4, 5]


def test_numbers_that_no_chart_can_draw_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.0}\n{"step": 3, "loss": "high"}\n')
    assert read_metrics(file, 100).curves["loss"][1].tolist() == [3.0]
