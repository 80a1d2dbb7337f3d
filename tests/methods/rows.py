"""The tests' table of methods: a new row gets every test of what all methods promise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rankwise as rw
from tests.models import Spec, TinyModel, batch

# the name of a method, a word that tells it from other rows of that method, and the settings of a short run
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "fac": {},
    "np-l0": {"anneal_steps": 6, "gate_lr": 5.0},
    "agp": {"anneal_steps": 6, "mask_every": 2},
    "flop-agp": {"anneal_steps": 6, "mask_every": 2, "l1": 1e-3},
    "flop-l0": {"anneal_steps": 6, "gate_lr": 5.0},
    "flop-l0 paper": {"anneal_steps": 6, "recipe": "published", "gate_lr": 5.0, "refactor": False},
    "svd": {},
    "fac pivot": {"layout": "pivot"},
    "flop-agp pivot": {"anneal_steps": 6, "mask_every": 2, "layout": "pivot"},
    "flop-l0 pivot": {"anneal_steps": 6, "gate_lr": 5.0, "layout": "pivot"},
    "svd pivot": {"layout": "pivot"},
}
WIDTHS: dict[str, dict[str, Any]] = {
    "width": {},
    "width-l0": {"anneal_steps": 6, "gate_lr": 5.0},
    "width-l0 paper": {"anneal_steps": 6, "recipe": "published", "gate_lr": 5.0},
    "width-l0 neurons": {"anneal_steps": 6, "gate_lr": 5.0, "heads": False},
}
"""Methods that need whole blocks of a decoder: their promises are in tests/hf/test_widths.py."""
PRUNING = [name for name in METHODS if name != "dense"]
LEARNED = [name for name, settings in METHODS.items() if "anneal_steps" in settings]


def train(model: nn.Module, pruner: rw.Pruner, spec: Spec, steps: int, start: int = 0) -> None:
    """A short run on random tokens, as a user would write it."""
    model.train()
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    for step in range(start, start + steps):
        tokens = batch(spec, seed=step)
        loss = F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def pruned(spec: Spec, method: str, budget: rw.Budget, steps: int = 10, **extra: Any) -> tuple[TinyModel, rw.Pruner]:
    model = spec.build()
    pruner = rw.Pruner(model, budget, method.split()[0], **METHODS[method], **extra)
    train(model, pruner, spec, steps)
    return model, pruner


def nonzeros(model: nn.Module, pruner: rw.Pruner) -> int:
    """Parameters of a model whose planned matrices keep their shape: their non-zeros, and all of the rest."""
    planned = {use.name for site in pruner.plan.sites for use in site.uses}
    masked = {p for name, module in model.named_modules() if name in planned for p in [module.weight]}
    return sum(int(p.count_nonzero()) if p in masked else p.numel() for p in model.parameters())
