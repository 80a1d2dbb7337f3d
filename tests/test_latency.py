"""Budgets in milliseconds: a size that was timed, or a line that says what can be reached."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.latency import meet_latency


class Wide(nn.Module):
    """Nearly all of its time is in products."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


INPUTS = {"x": torch.randn(512, 512)}


def reachable(model: nn.Module) -> tuple[float, float]:
    """Smallest and dense latency, as the refusals name them."""
    with pytest.raises(rw.BudgetError, match="`latency_ms` must be at least .*rank 16 .* but is 1e-06") as caught:
        meet_latency(model, rw.Budget(latency_ms=1e-6), INPUTS, repeats=3)
    words = str(caught.value).replace(")", " ").split()
    return float(words[words.index("least") + 1]), float(words[words.index("dense") + 1].rstrip(",;"))


def test_what_is_found_was_measured_and_is_a_size_that_compress_takes() -> None:
    torch.manual_seed(0)
    model = Wide().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smallest, dense = reachable(model)
    goal = (smallest * dense) ** 0.5
    found = meet_latency(model, rw.Budget(latency_ms=goal), INPUTS, repeats=3)
    assert found.milliseconds <= goal
    assert found.budget.params is not None
    assert found.budget.params < rw.count(model)
    small = rw.compress(model, found.budget, plan=found.plan, rank_multiple=16)
    assert rw.count(small) <= found.budget.params
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_goal_that_is_met_already_is_refused() -> None:
    with pytest.raises(rw.BudgetError, match="must be below what the dense model takes, .* but is 1e\\+06 instead"):
        meet_latency(Wide(64), rw.Budget(latency_ms=1e6), {"x": torch.randn(4, 64)}, repeats=3)


def test_another_budget_is_refused() -> None:
    with pytest.raises(rw.BudgetError, match="must name `latency_ms`, but is .*removed=0.5"):
        meet_latency(Wide(64), rw.Budget(removed=0.5), {"x": torch.randn(4, 64)})


@pytest.mark.parametrize("call", [partial(rw.Pruner, anneal_steps=1), rw.compress])
def test_a_latency_is_no_size_yet(call: object) -> None:
    model = Wide(64)
    with pytest.raises(rw.BudgetError, match=r"must be a size here, but is `latency_ms` \(5\)"):
        call(model, rw.Budget(latency_ms=5))  # type: ignore[operator]
    assert type(model.layers[0]) is nn.Linear
