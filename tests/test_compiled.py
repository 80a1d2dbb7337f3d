"""Gated models under `torch.compile`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import rankwise as rw
from tests.methods.rows import METHODS
from tests.models import Spec, batch

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")

SPEC = Spec(width=12, num_words=20, back="tied", parts=("linear", "nested"))


def compiled(model: nn.Module) -> tuple[Any, CompileCounterWithBackend]:
    """The model as one graph, or an error; and what counts its graphs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
    tokens = batch(SPEC, seed=seed)
    return F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())


def train(model: Any, pruner: rw.Pruner, steps: int = 9) -> list[float]:
    """Losses in training and in evaluation after each step."""
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        model.train()
        loss = loss_of(model, seed=step)
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), loss_of(model).item()]
    return losses


@pytest.mark.parametrize("method", ["fac", "np-l0", "agp", "flop-agp", "flop-l0"])
def test_a_compiled_model_is_trained_as_any_other(method: str) -> None:
    dense = SPEC.build()
    plain = rw.Pruner(copy.deepcopy(dense), rw.Budget(removed=0.3), method, **METHODS[method])
    pruner = rw.Pruner(dense, rw.Budget(removed=0.3), method, **METHODS[method])
    model, counter = compiled(dense)
    torch.testing.assert_close(train(model, pruner), train(plain.model, plain), rtol=1e-4, atol=1e-5)
    # one for training and one for evaluation, and both again for what is chosen at the end of the ramp
    assert counter.frame_count <= 4


def test_a_compiled_model_takes_up_what_is_loaded_into_it() -> None:
    dense = SPEC.build()
    pruner = rw.Pruner(dense, rw.Budget(removed=0.4), "flop-l0", **METHODS["flop-l0"])
    model, _ = compiled(dense)
    start = copy.deepcopy(dense.state_dict())
    train(model, pruner, steps=3)
    for mode in (True, False):
        model.train(mode)
        loss_of(model)
        dense.load_state_dict(start)
        torch.testing.assert_close(loss_of(model), loss_of(dense))


def test_a_compiled_average_of_a_gated_model_is_evaluated_with_its_own_masks() -> None:
    dense = SPEC.build()
    pruner = rw.Pruner(dense, rw.Budget(removed=0.4), "flop-l0", **METHODS["flop-l0"])
    average = torch.optim.swa_utils.AveragedModel(dense, avg_fn=lambda ours, theirs, number: theirs)
    model, _ = compiled(average)
    for _ in range(3):
        train(dense, pruner, steps=3)
        average.update_parameters(dense)
        model.eval()
        torch.testing.assert_close(loss_of(model), loss_of(dense.eval()))
