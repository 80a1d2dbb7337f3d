"""What a training loop of one process may get wrong, and the sentence that its owner gets (docs/reliability.md).

Mistakes with several processes: tests/core/test_distributed.py and test_sharded_runs.py.
"""

from __future__ import annotations

import copy
import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.core.optimizer_checks import UnchangedWeightsCheck
from tests.loop_toys import adamw, build, gate, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


def made(**settings: Any) -> rw.Pruner:
    torch.manual_seed(0)
    return gate(build(), **settings)


def train(pruner: rw.Pruner, steps: int = 2, optimizer: Any = None, model: nn.Module | None = None) -> Any:
    optimizer = optimizer or adamw(pruner.weight_parameters())
    for step in range(steps):
        loss_of(model or pruner.model, step).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    return optimizer


def never_stepped() -> None:
    pruner = made()
    loss_of(pruner.model, 0).backward()
    pruner.compact()


def stepped_twice() -> None:
    pruner = made()
    loss_of(pruner.model, 0).backward()
    pruner.step()
    pruner.step()


def stepped_before_backward() -> None:
    pruner = made()
    loss = loss_of(pruner.model, 0)
    pruner.step()
    loss.backward()


def stepped_within_a_batch() -> None:
    pruner = made()
    for part in range(2):
        loss_of(pruner.model, part).backward()
        pruner.step()


def left_in_evaluation_mode() -> None:
    pruner = made()
    train(pruner)
    pruner.model.eval()
    train(pruner)


def left_a_layer_in_evaluation_mode() -> None:
    pruner = made()
    pruner.model[1].eval()
    train(pruner)


def trained_a_copy() -> None:
    pruner = made()
    model = copy.deepcopy(pruner.model)
    train(pruner, optimizer=adamw(model.parameters()), model=model)


def took_parameters_by_their_names() -> None:
    pruner = made()
    named = [weight for name, weight in pruner.model.named_parameters() if name.endswith("bias")]
    train(pruner, UnchangedWeightsCheck.STEPS + 1, adamw(named))


def scaled_losses_later() -> None:
    pruner = made(steps=50)
    optimizer, scaler = train(pruner, 1), torch.amp.GradScaler("cpu", init_scale=1_024.0)
    scaler.scale(loss_of(pruner.model, 1)).backward()
    scaler.step(optimizer)
    pruner.step()


def loaded_a_dense_model() -> None:
    made().model.load_state_dict(build().state_dict(), strict=False)


def loaded_weights_alone() -> None:
    pruner = made()
    pruner.model.load_state_dict(dict(pruner.model.named_parameters()), strict=False)


def loaded_with_another_seed() -> None:
    made(seed=1).load_state_dict(made().state_dict())


def loaded_with_another_ramp() -> None:
    made(steps=60).load_state_dict(made().state_dict())


def wrote_into_a_weight() -> None:
    nn.init.zeros_(made().model[1].weight)


def wrote_into_the_data_of_a_weight() -> None:
    made().model[1].weight.data.normal_()


def froze_a_weight() -> None:
    made().model[1].weight.requires_grad = False


def tied_a_weight() -> None:
    model = made().model
    model[3].weight = model[0].weight


def gated_in_inference_mode() -> None:
    model = build()
    with torch.inference_mode():
        gate(model)


def built_in_inference_mode() -> None:
    with torch.inference_mode():
        model = build()
    gate(model)


def stepped_in_inference_mode() -> None:
    pruner = made()
    loss_of(pruner.model, 0).backward()
    with torch.inference_mode():
        pruner.step()


def diverged() -> None:
    pruner = made()
    train(pruner)
    with torch.no_grad():
        next(iter(pruner.weight_parameters())).fill_(float("nan"))
    pruner.compact(rw.Budget(removed=0.01))


def dropped_without_the_optimizer() -> None:
    pruner = made(steps=3)
    optimizer = train(pruner, 5)
    pruner.drop_closed()
    optimizer.step()


MISTAKES: dict[Callable[[], None], str] = {
    never_stepped: r"`compact\(\)` needs gates that have learned something, but no `pruner.step\(\)` was taken",
    stepped_twice: r"needs the gradient of the loss, but no gate has one. Call `loss.backward\(\)` before it",
    stepped_before_backward: r"no gate has one. Call `loss.backward\(\)` before it",
    stepped_within_a_batch: "must be called where `optimizer.step\\(\\)` is, but the gradients .* were not cleared",
    left_in_evaluation_mode: "no gate has one. .* with the model in training mode",
    left_a_layer_in_evaluation_mode: r"these layers are in evaluation mode: 1. .* Call `model.train\(\)`",
    trained_a_copy: "no gate has one",
    took_parameters_by_their_names: r"No weight of a gated layer has changed in 32 steps. .* `pruner.weight_parameters",
    scaled_losses_later: "a GradScaler scales them by 1024. Call `pruner.step",
    loaded_a_dense_model: "it holds 0.weight of the dense model. Load it before the Pruner is made",
    loaded_weights_alone: "of 0.matrix it holds the weights alone. Save the whole `state_dict",
    loaded_with_another_seed: r"made with other arguments: seed \(0 there, 1 here\)",
    loaded_with_another_ramp: r"other arguments: anneal_steps \(6 there, 60 here\)",
    wrote_into_a_weight: "`layer.weight` cannot be changed .* but `zero_` was called",
    wrote_into_the_data_of_a_weight: "but `normal_` was called on it. Change it before the Pruner",
    froze_a_weight: r"to freeze it, call `layer.requires_grad_\(False\)`",
    tied_a_weight: "which cannot be set. Set or tie weights before the Pruner",
    gated_in_inference_mode: "gated outside of `torch.inference_mode`",
    built_in_inference_mode: "whose tensors cannot be trained, but 0.weight, .* were made in it",
    stepped_in_inference_mode: "this is within it. Use `torch.no_grad`",
    diverged: r"must have finite weights, but 0.matrix.\w+ hold NaN or infinity: training has diverged",
    dropped_without_the_optimizer: r"one that has taken steps was not passed \(AdamW\)",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_gets_a_sentence(mistake: Callable[[], None]) -> None:
    with pytest.raises((rw.RankwiseError, UserWarning, RuntimeError), match=MISTAKES[mistake]):
        mistake()


@pytest.mark.parametrize("mistake", [left_a_layer_in_evaluation_mode, took_parameters_by_their_names, diverged])
def test_a_warning_shows_the_line_of_the_loop(mistake: Callable[[], None]) -> None:
    with pytest.warns(UserWarning, match=MISTAKES[mistake]) as told:
        mistake()
    (one,) = (each for each in told if re.search(MISTAKES[mistake], str(each.message)))
    assert "pruner." in linecache.getline(one.filename, one.lineno)


def test_what_looks_like_a_mistake_and_is_none() -> None:
    """A checkpoint from before arguments were kept; an export within inference mode that is trained on; reading."""
    pruner = made()
    train(pruner, 8)
    state = {name: value for name, value in pruner.state_dict().items() if not name.endswith("made_with")}
    again = made()
    again.model.load_state_dict(state, strict=False)
    assert again.steps == 8
    again.load_state_dict(pruner.state_dict())
    with torch.inference_mode():
        small = pruner.compact()
    loss_of(small, 0).backward()
    weight = pruner.model[1].weight
    assert torch.equal(weight.data, weight.detach()) and not weight.data.requires_grad
    assert torch.equal(weight.data + 1, weight.detach() + 1)
