"""A small model of words and the training loop of a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankwise as rw

WORDS = 20
BUDGET = rw.Budget(removed=0.5)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, WORDS))


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, WORDS, (8, 5), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def gate(model: nn.Module, method: str = "flop-l0", steps: int = 6, **settings: Any) -> rw.Pruner:
    if method == "flop-l0":
        settings["gate_lr"] = 5.0
    return rw.Pruner(model, BUDGET, method, anneal_steps=steps, **settings)


def train(pruner: rw.Pruner, move: Callable[[], Any], steps: int) -> None:
    for step in range(steps):
        loss_of(pruner.model, step).backward()
        move()
        pruner.step()
        pruner.model.zero_grad()


def adamw(parameters: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)
