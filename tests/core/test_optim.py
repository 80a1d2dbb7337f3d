"""Adam in buffers, and the schedules of the target size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.core.optim import SCHEDULES, AdamState, cubic, linear

lengths = st.integers(1, 10_000)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@every_schedule
@given(num_steps=lengths, after=st.integers(0, 10_000))
def test_a_schedule_goes_from_zero_to_one_and_stays(schedule: Any, num_steps: int, after: int) -> None:
    assert schedule(0, num_steps) == 0
    assert schedule(num_steps, num_steps) == schedule(num_steps + after, num_steps) == 1


@every_schedule
@given(num_steps=lengths, step=st.integers(0, 20_000))
def test_a_schedule_never_goes_back(schedule: Any, num_steps: int, step: int) -> None:
    now, then = schedule(step, num_steps), schedule(step + 1, num_steps)
    assert 0 <= now <= then <= 1
    assert now < then or step >= num_steps


@given(num_steps=lengths, step=st.integers(0, 10_000))
def test_linear_is_the_fraction_of_steps(num_steps: int, step: int) -> None:
    assert linear(step, num_steps) == min(step, num_steps) / num_steps


@given(num_steps=lengths, step=st.integers(0, 10_000))
def test_cubic_leaves_the_cube_of_what_linear_leaves(num_steps: int, step: int) -> None:
    """Zhu and Gupta (2017): s_t = s_f + (s_0 - s_f) (1 - t / n)^3."""
    assert 1 - cubic(step, num_steps) == pytest.approx((1 - linear(step, num_steps)) ** 3)
    assert cubic(step, num_steps) >= linear(step, num_steps)


@every_schedule
def test_no_ramp_is_at_its_end_at_once(schedule: Any) -> None:
    assert schedule(0, 0) == schedule(7, 0) == 1


def test_adam_moves_no_further_than_its_longest_direction() -> None:
    """The worst there is: gradients that grow as fast as the first moment forgets less than the second."""
    beta1, beta2 = AdamState.betas
    moments = AdamState.zeros(1)
    for step in range(1, 400):
        direction = AdamState.direction(moments, torch.tensor([(beta2 / beta1) ** step]), step)
        assert direction.abs() <= AdamState.max_direction()
    unbiased = moments[0] / moments[1].sqrt()
    assert unbiased > 0.99 * AdamState.max_direction()
