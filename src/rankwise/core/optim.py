"""Adam for gates and multipliers, and the schedules of the target size.

Paper: section 4.3 (linear schedule) and the AGP baseline (cubic schedule, Zhu and Gupta 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


class AdamState:
    """The two moments of Adam for one flat vector, as the two rows of a buffer that is saved with the model."""

    betas = (0.9, 0.999)
    eps = 1e-8

    @classmethod
    def max_direction(cls) -> float:
        """The longest direction: by Cauchy-Schwarz |m| <= max_direction sqrt(v), whatever the gradients were."""
        beta1, beta2 = cls.betas
        return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))

    @staticmethod
    def zeros(size: int) -> Tensor:
        return torch.zeros(2, size)

    @classmethod
    def direction(cls, moments: Tensor, grad: Tensor, step: int) -> Tensor:
        """Update `moments` with `grad`, the gradient of step number `step` (from 1), and return Adam's direction."""
        beta1, beta2 = cls.betas
        moments[0].lerp_(grad, 1 - beta1)
        moments[1].lerp_(grad * grad, 1 - beta2)
        mean, square = moments[0] / (1 - beta1**step), moments[1] / (1 - beta2**step)
        return mean / (square.sqrt() + cls.eps)


def linear(step: int, num_steps: int) -> float:
    """The share of the ramp that is done after k of m steps: min(1, k / m)."""
    return min(1.0, step / num_steps) if num_steps else 1.0


def cubic(step: int, num_steps: int) -> float:
    """1 - (1 - k / m)^3: fast while there is much to prune, slow at the end."""
    return 1 - (1 - linear(step, num_steps)) ** 3


SCHEDULES: dict[str, Callable[[int, int], float]] = {"cubic": cubic, "linear": linear}
