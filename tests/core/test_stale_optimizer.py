"""An optimizer that was built before the pruner is found before a run is wasted."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import rankwise as rw
from tests.loop_toys import adamw, build, gate, loss_of, train

# runs of a few steps, in which no gate can decide
pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("method", ["flop-l0", "flop-agp"])
def test_an_optimizer_made_before_the_pruner_is_refused_in_the_first_step(method: str, clears: bool) -> None:
    model = build()
    optimizer = adamw(model.parameters())
    pruner = gate(model, method)
    message = (
        r"holds 3 that the pruner replaced \(0.weight, 1.weight, 3.weight\).* Build the optimizer after the Pruner"
    )
    gates = [gate.state_dict() for gate in copy.deepcopy(pruner.controller.gates)]
    for _ in range(2):
        loss_of(model, 1).backward()
        optimizer.step()
        if clears:
            model.zero_grad()
        with pytest.raises(rw.RankwiseError, match=message):
            pruner.step()
    assert pruner.steps == 0
    for before, after in zip(gates, pruner.controller.gates, strict=True):
        assert all(torch.equal(before[name], value) for name, value in after.state_dict().items())
    # what the message says to do helps
    train(pruner, adamw(pruner.weight_parameters()).step, 3)


def test_an_optimizer_of_another_model_says_nothing() -> None:
    model, other = build(), build()
    optimizer, others = adamw(model.parameters()), adamw(other.parameters())
    pruner = gate(model)
    train(pruner, others.step, 2)
    with pytest.raises(rw.RankwiseError, match="holds 3 that the pruner replaced"):
        train(pruner, optimizer.step, 1)


@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_an_optimizer_made_after_the_pruner_passes_beside_one_of_before(lr: float) -> None:
    """The dense model's optimizer may live on, and a warm-up may begin at a learning rate of zero."""
    model = build()
    before = adamw(model.parameters())
    loss_of(model, 0).backward()
    before.step()
    before.zero_grad()
    pruner = gate(model)
    after = adamw(pruner.weight_parameters(), lr)
    train(pruner, lambda: (before.step(), after.step()), 4)
    assert pruner.steps == 4


@pytest.mark.parametrize("method", ["np-l0", "agp"])
def test_methods_that_keep_the_weights_keep_their_optimizer(method: str) -> None:
    model = build()
    optimizer = adamw(model.parameters())
    pruner = gate(model, method)
    train(pruner, optimizer.step, 4)
    assert pruner.steps == 4


def test_skipped_steps_are_no_sign_of_it() -> None:
    """As a gradient scaler skips the first ones, whose scale is too high."""
    model = build()
    before = adamw(model.parameters())
    pruner = gate(model)
    optimizer = adamw(pruner.weight_parameters())
    train(pruner, lambda: None, 4)
    train(pruner, optimizer.step, 2)
    assert before.param_groups and pruner.steps == 6


@pytest.mark.parametrize("master", [True, False])
def test_updates_of_data_are_seen(master: bool) -> None:
    """By hand, or from master weights: `.data` tells no one, and no optimizer holds the model's weights."""
    model = build()
    before = adamw(model.parameters())
    pruner = gate(model)
    weights = list(pruner.weight_parameters())
    masters = [nn.Parameter(p.detach().double()) for p in weights]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def move() -> None:
        for weight, own in zip(weights, masters, strict=True):
            own.grad = weight.grad.double()
        optimizer.step()
        for weight, own in zip(weights, masters, strict=True):
            if master:
                weight.data.copy_(own.data)
            else:
                weight.data -= 0.1 * weight.grad

    train(pruner, move, 4)
    assert before.param_groups and pruner.steps == 4


def test_gates_can_be_trained_alone() -> None:
    """Of frozen weights, whatever holds them; or without any optimizer."""
    model = build()
    optimizer = adamw(model.parameters())
    pruner = gate(model)
    for matrix in pruner.controller.matrices:
        matrix.requires_grad_(False)
    train(pruner, optimizer.step, 4)
    alone = gate(build())
    train(alone, lambda: None, 4)
    assert pruner.steps == alone.steps == 4


def test_an_optimizer_that_nobody_holds_any_more_does_not_count() -> None:
    model = build()
    before = adamw(model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(before, 0.9)
    pruner = gate(model)
    gc.disable()
    try:
        # a cycle, which only the collector frees
        before.cycle = before  # type: ignore[attr-defined]
        del before
        train(pruner, lambda: None, 3)
    finally:
        gc.enable()
    assert pruner.steps == 3


def test_a_pruner_can_be_copied_and_pickled() -> None:
    model = build()
    pruner = gate(model)
    for twin in (copy.deepcopy(pruner), pickle.loads(pickle.dumps(pruner))):
        train(twin, adamw(twin.weight_parameters()).step, 7)
        assert rw.count(twin.compact()) <= twin.limit
