"""Learning rate schedules: pure functions of the step, as a factor on the peak.

k = 1, 2, ... is the step, w the number of warm-up steps, n that of all steps. A resumed run needs no state of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def inverse_sqrt(step: int, warmup_steps: int, num_steps: int) -> float:
    """min(k^-1/2, k w^-3/2) w^1/2: up to 1 at k = w, then down with the root.  Paper: appendix (Noam)."""
    w = max(warmup_steps, 1)
    return min(step / w, math.sqrt(w / step))


def cosine(step: int, warmup_steps: int, num_steps: int) -> float:
    """k / w, then (1 + cos(pi (k - w) / (n - w))) / 2: down to 0 at the last step."""
    if step <= warmup_steps:
        return step / warmup_steps
    return (1 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps))) / 2


def constant(step: int, warmup_steps: int, num_steps: int) -> float:
    """min(1, k / w)."""
    return min(1.0, step / max(warmup_steps, 1))


def linear(step: int, warmup_steps: int, num_steps: int) -> float:
    """k / w, then (n - k) / (n - w): down to 0 at the last step."""
    if step <= warmup_steps:
        return step / warmup_steps
    return (num_steps - step) / (num_steps - warmup_steps)


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "inverse-sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": constant,
    "linear": linear,
}
