"""Adam on state that lies in buffers, so that it travels with the model's checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class AdamState:
    """The two moments of Adam for one flat vector, held as the two rows of a buffer."""

    betas = (0.9, 0.999)
    eps = 1e-8

    @classmethod
    def reach(cls) -> float:
        """The longest direction there can be: by Cauchy-Schwarz |m| <= reach sqrt(v), whatever the gradients were."""
        beta1, beta2 = cls.betas
        return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))

    @staticmethod
    def zeros(size: int) -> Tensor:
        return torch.zeros(2, size)

    @classmethod
    def direction(cls, moments: Tensor, grad: Tensor, step: int) -> Tensor:
        """Take `grad` as gradient number `step` (from 1) into `moments`; the bias-corrected direction of descent."""
        beta1, beta2 = cls.betas
        moments[0].lerp_(grad, 1 - beta1)
        moments[1].lerp_(grad * grad, 1 - beta2)
        mean, square = moments[0] / (1 - beta1**step), moments[1] / (1 - beta2**step)
        return mean / (square.sqrt() + cls.eps)
