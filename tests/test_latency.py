"""Budgets in milliseconds: a size that was timed, or a line that says what can be reached."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

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


CALLS = {"pruner": partial(rw.Pruner, anneal_steps=1), "compress": rw.compress}


@pytest.mark.parametrize("call", CALLS)
def test_a_time_needs_inputs(call: str) -> None:
    model = Wide(64)
    with pytest.raises(rw.BudgetError, match=r"in milliseconds \(5\) needs inputs .* Pass `example`"):
        CALLS[call](model, rw.Budget(latency_ms=5))
    assert type(model.layers[0]) is nn.Linear


class Paced(Wide):
    """A call takes a microsecond for each parameter, whatever else the machine does."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(1e-6 * rw.count(self))
        return self.layers(x)


X = torch.randn(4, 128)


@pytest.mark.parametrize("inputs", [{"x": X}, X, (X,)], ids=["mapping", "tensor", "tuple"])
@pytest.mark.parametrize("call", CALLS)
def test_the_pruner_and_compress_find_the_size_for_a_time(call: str, inputs: Any) -> None:
    model = Paced(128)
    made = CALLS[call](model, rw.Budget(latency_ms=22), example=inputs)
    size = rw.count(made) if call == "compress" else made.limit
    assert 8_000 < size <= 22_000 < rw.count(Paced(128))


def test_compress_takes_a_batch_of_calibration_to_time_the_model() -> None:
    assert rw.count(rw.compress(Paced(128), rw.Budget(latency_ms=22), [X])) <= 22_000


def test_an_export_of_another_size_takes_no_time() -> None:
    pruner = rw.Pruner(Wide(64), rw.Budget(removed=0.5), "fac")
    with pytest.raises(rw.BudgetError, match=r"must be a size here, but is `latency_ms` \(5\)"):
        pruner.compact(rw.Budget(latency_ms=5))
