"""How far along a target is after k of m annealing steps, from 0 to 1.

Paper: section 4.3 (linear) and the AGP baseline (cubic, Zhu and Gupta 2017).
"""

from __future__ import annotations

from collections.abc import Callable


def linear(step: int, num_steps: int) -> float:
    """min(1, k / m)."""
    return min(1.0, step / num_steps) if num_steps else 1.0


def cubic(step: int, num_steps: int) -> float:
    """1 - (1 - k / m)^3: fast while there is much to prune, slow at the end."""
    return 1 - (1 - linear(step, num_steps)) ** 3


SCHEDULES: dict[str, Callable[[int, int], float]] = {"cubic": cubic, "linear": linear}
