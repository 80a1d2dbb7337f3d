"""FLOP-L0 from end to end: the gates find the components that the data need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw


@pytest.mark.parametrize("recipe", ["committed", "published"])
def test_the_components_that_matter_are_found(recipe: Any) -> None:
    """A matrix of k components that the data need and n - k larger ones that the data never touch.

    What a component weighs says the opposite of what it is worth, so only the loss can tell which to keep.
    """
    n, k = 16, 4
    left, right = (torch.linalg.qr(torch.randn(n, n)).Q for _ in range(2))
    values = torch.full((n,), 5.0)
    values[:k] = 1.0
    model = nn.Linear(n, n, bias=False)
    with torch.no_grad():
        model.weight.copy_(left * values @ right.t())
    teacher = model.weight.detach().clone()
    budget = rw.Budget(params=k * 2 * n)
    x = torch.randn(64, n) @ right[:, :k] @ right[:, :k].t()
    wrong = rw.compress(model, budget)
    assert (wrong(x) - x @ teacher.t()).square().mean() > 0.5 * (x @ teacher.t()).square().mean()

    lr = {} if recipe == "committed" else {"multiplier_lr": 1.0}
    pruner = rw.Pruner(model, budget, anneal_steps=150, recipe=recipe, **lr)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-3)
    for _ in range(250):
        optimizer.zero_grad()
        (20 * (model(x) - x @ teacher.t()).square().mean()).backward()
        optimizer.step()
        pruner.step()
    small = pruner.compact()
    assert rw.count(small) == k * 2 * n
    assert (small(x) - x @ teacher.t()).square().mean() < 0.01 * (x @ teacher.t()).square().mean()


def test_a_low_rank_teacher_is_learned_from_scratch_within_its_budget() -> None:
    n, k = 16, 3
    teacher = torch.randn(n, k) @ torch.randn(k, n) / n**0.5
    model = nn.Linear(n, n, bias=False)
    pruner = rw.Pruner(model, rw.Budget(params=k * 2 * n), anneal_steps=150)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=2e-2)
    for step in range(500):
        x = torch.randn(64, n, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x @ teacher.t()).square().mean().backward()
        optimizer.step()
        pruner.step()
    small = pruner.compact()
    assert rw.count(small) == k * 2 * n == pruner.size().expected
    x = torch.randn(256, n)
    assert (small(x) - x @ teacher.t()).square().mean() < 0.01 * (x @ teacher.t()).square().mean()
