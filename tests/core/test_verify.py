"""The check of pruned layers against stock ones: what it finds, and that it leaves no trace."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.verify import Batch, verify_layers
from rankwise.modules import LowRankLinear


def low_rank(width: int = 8, rank: int = 2) -> LowRankLinear:
    return LowRankLinear(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))


class TakesApart(nn.Module):
    """Puts something between the layers of one of its two pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.apart = low_rank(), low_rank()

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x)
        if isinstance(self.apart, nn.Linear):
            return self.apart(x)
        first, second = self.apart
        return second(torch.tanh(first(x)))


def test_the_layer_that_makes_the_difference_is_named() -> None:
    with pytest.raises(rw.RankwiseError, match=r"stock layers of the same weights, but does not: apart\. "):
        verify_layers(TakesApart(), Batch(torch.randn(4, 8)))


def test_without_a_batch_or_with_one_that_no_layer_can_take_nothing_is_said() -> None:
    verify_layers(TakesApart(), Batch())
    verify_layers(TakesApart(), Batch(torch.randn(4, 7)))


class InFloat32(nn.Module):
    """Gives single precision, whatever its layer computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).float()
        return y


def test_under_autocast_the_rounding_of_half_precision_is_no_difference() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        pruner = rw.Pruner(InFloat32(), rw.Budget(removed=0.5), anneal_steps=9, example=torch.randn(16, 32))
    assert pruner.plan.sites


class Counts(nn.Module):
    """Keeps what it computed, counts its calls and draws random numbers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = low_rank(), torch.zeros(8)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.state = self.layer(x + self.state).mean(0) + torch.randn(8)
        return self.state


@pytest.mark.parametrize("training", [True, False])
def test_a_model_and_random_numbers_are_as_before(training: bool) -> None:
    model, x = Counts().train(training), torch.randn(4, 8)
    model(x)
    state, random = model.state, torch.get_rng_state()
    verify_layers(model, Batch(x))
    assert (model.calls, model.seen, model.state is state) == (1, 1, True)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training is model.layer.training is training
    assert isinstance(model.layer, LowRankLinear)


def test_the_first_call_of_a_gated_model_is_noted_once_and_without_its_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    rw.Pruner(model, rw.Budget(removed=0.4), "fac")
    batch = Batch()
    batch.note(model)
    x = torch.randn(4, 8, requires_grad=True) * 2
    model(x)
    model(torch.zeros(1, 8))
    assert batch.inputs is not None
    ((noted,), _) = batch.inputs
    assert torch.equal(noted, x) and not noted.requires_grad
    batch.stop()


def test_a_model_that_waits_for_its_first_call_is_copied_and_pickled() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), "fac")
    copied = copy.deepcopy(model)
    copied(x)
    pickle.dumps(model)
    assert pruner._batch.inputs is None
    model(x)
    assert pruner._batch.inputs is not None
    small = pruner.compact()
    assert not small._forward_pre_hooks


def test_any_batch_that_calibration_takes_is_an_example() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"y": self.layer(x) * scale}

    x = torch.randn(4, 8)
    for example in (x, (x, 2.0), {"x": x, "scale": 3.0}):
        rw.Pruner(Two(), rw.Budget(removed=0.4), "fac", example=example)
