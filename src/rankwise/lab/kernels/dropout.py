"""Dropout for kernels that apply it on the way: its rate, and the number that they draw it from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Dropout(NamedTuple):
    """Dropout, drawn in a kernel."""

    rate: float
    seed: Tensor
    """One number on the device."""


def draw(rate: float, device: torch.device) -> Dropout | None:
    """By the device's own generator, which a checkpoint keeps; None where nothing is dropped."""
    if rate == 0:
        return None
    return Dropout(rate, torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device))


def seed_and_rate(dropout: Dropout | None) -> tuple[Tensor | None, float]:
    """The arguments of a kernel: its seed is None where nothing is dropped."""
    return (None, 0.0) if dropout is None else (dropout.seed, dropout.rate)
