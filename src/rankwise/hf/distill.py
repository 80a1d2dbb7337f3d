"""Distillation: while it is pruned, a model learns to answer, and to think, as the dense one does.

Low-rank pruning keeps every width, so the hidden states of the two models match one to one.
Shapes: L = layers, B = batch, T = tokens, D = width, C = classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What the loss is made of: labels * L + logits * T^2 KL(teacher | student) + hidden * (hidden states)."""

    labels: float = 0.5
    """Weight of the model's own loss on the labels."""
    logits: float = 1.0
    """Weight of the difference of answers: KL divergence, or squared error of a regression."""
    hidden: float = 1.0
    """Weight of the squared error of all hidden states, relative to their size."""
    temperature: float = 2.0
    """T: answers are compared softer by so much."""

    def __post_init__(self) -> None:
        for name in ("labels", "logits", "hidden"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0 and finite, but is {value} instead.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"`temperature` must be positive and finite, but is {self.temperature} instead.")
        if not self.labels + self.logits + self.hidden:
            raise ValueError("One of `labels`, `logits` and `hidden` must be above 0, but all are 0.")


def distillation_loss(
    teacher: nn.Module, config: Distillation | None = None
) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """The loss of a student on a batch with labels, for a model of transformers with a head for classification.

    The teacher is set to evaluation mode; keep it on the student's device. Copy it before its twin is gated.
    """
    settings = config or Distillation()
    teacher.eval().requires_grad_(False)
    states = bool(settings.hidden)

    def loss(student: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        with torch.no_grad():
            wanted = teacher(**inputs, output_hidden_states=states)
        given = student(**batch, output_hidden_states=states)
        value: Tensor = settings.labels * given.loss.float()
        value = value + settings.logits * answer_difference(given.logits, wanted.logits, settings.temperature)
        if states:
            mask = batch.get("attention_mask")
            value = value + settings.hidden * hidden_difference(given.hidden_states, wanted.hidden_states, mask)
        return value

    return loss


def answer_difference(given_BC: Tensor, wanted_BC: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(wanted / T) | softmax(given / T)); the mean squared error where there is one output."""
    given_BC, wanted_BC = given_BC.float(), wanted_BC.float()
    if given_BC.shape[1] == 1:
        return F.mse_loss(given_BC, wanted_BC)
    log_p, log_q = (torch.log_softmax(x / temperature, 1) for x in (wanted_BC, given_BC))
    return temperature**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def hidden_difference(given: Any, wanted: Any, mask_BT: Tensor | None) -> Tensor:
    """The mean over layers of |given - wanted|^2 / |wanted|^2, over tokens that are no padding."""
    given_LBTD, wanted_LBTD = (torch.stack(tuple(states)).float() for states in (given, wanted))
    squares_LBT = (given_LBTD - wanted_LBTD).square().sum(-1)
    sizes_LBT = wanted_LBTD.square().sum(-1)
    if mask_BT is not None:
        squares_LBT, sizes_LBT = squares_LBT * mask_BT, sizes_LBT * mask_BT
    return (squares_LBT.sum((1, 2)) / sizes_LBT.sum((1, 2))).mean()
