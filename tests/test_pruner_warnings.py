"""What a user learns before a run is wasted: a changed model, an early export, layers left out."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from tests.loop_toys import BUDGET, WORDS, adamw, build, gate, train

# runs of a few steps, in which no gate can decide
pytestmark = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


# a model that is changed after it was gated


def add(model: Any) -> None:
    model.append(nn.Linear(WORDS, 900))


def remove(model: Any) -> None:
    del model[3]


def replace(model: Any) -> None:
    model[1] = nn.Linear(16, 24)


def wrap(model: Any) -> None:
    model[1] = nn.Sequential(model[1], nn.Linear(24, 24, bias=False))


def duplicate(model: Any) -> None:
    model[1] = copy.deepcopy(model[1])


def register(model: Any) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (add, r"parameters instead of .*; added: 4\)"),
    (remove, r"parameters instead of .*; removed: 3\)"),
    (replace, r"parameters instead of .*; replaced: 1\)"),
    (wrap, r"parameters instead of .*; replaced: 1\)"),
    (duplicate, r"changed since \(replaced: 1\)"),
    (register, r"parameters instead of .*; replaced: \(model\)\)"),
]


@pytest.mark.parametrize("change, names", CHANGES)
def test_a_model_changed_after_training_has_no_export(change: Callable[[Any], None], names: str) -> None:
    model = build()
    pruner = gate(model)
    train(pruner, adamw(pruner.weight_parameters()).step, 7)
    change(model)
    with pytest.raises(rw.RankwiseError, match=rf"`compact\(\)` needs the model as the pruner gated it, .*{names}"):
        pruner.compact()


@pytest.mark.parametrize("change, names", [pair for pair in CHANGES if pair[0] in (remove, replace, duplicate)])
def test_gated_layers_that_are_gone_are_missed_in_the_first_step(change: Callable[[Any], None], names: str) -> None:
    model = build()
    pruner = gate(model)
    change(model)
    model(torch.zeros(3, dtype=torch.long)).sum().backward()
    with pytest.raises(rw.RankwiseError, match=rf"`pruner.step\(\)` needs the model as .*{names}"):
        pruner.step()
    assert pruner.steps == 0


def test_layers_that_only_training_needs_can_be_taken_away_again() -> None:
    model = build()
    pruner = gate(model)
    model.add_module("auxiliary", nn.Linear(WORDS, WORDS))
    with pytest.warns(UserWarning, match=r"`compact\(\)` needs .*; added: auxiliary\)") as told:
        train(pruner, adamw(pruner.weight_parameters()).step, 7)
    assert len(told) == 1 and told[0].filename == train.__code__.co_filename
    with pytest.raises(rw.RankwiseError, match="added: auxiliary"):
        pruner.compact()
    del model.auxiliary
    assert rw.count(pruner.compact()) <= pruner.limit


def test_layers_without_parameters_may_come_and_go() -> None:
    model = build()
    pruner = gate(model)
    model.append(nn.Dropout(0.1))
    train(pruner, adamw(pruner.weight_parameters()).step, 7)
    assert rw.count(pruner.compact()) <= pruner.limit


def test_a_changed_model_is_refused_without_assertions_too() -> None:
    program = """
import torch, rankwise as rw
assert False, "assertions are on"
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
pruner = rw.Pruner(model, rw.Budget(removed=0.5), "fac")
model.append(torch.nn.Linear(8, 800))
try:
    pruner.compact()
except rw.RankwiseError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True)
    assert "added: 1" in run.stdout


# an export before the ramp has ended


@pytest.mark.parametrize("method", ["flop-l0", "flop-agp", "agp"])
def test_an_export_below_the_target_warns(method: str) -> None:
    pruner = gate(build(), method)
    optimizer = adamw(pruner.weight_parameters())
    train(pruner, optimizer.step, 3)
    target = pruner.controller.target_size()
    assert target > pruner.limit
    message = rf"after 3 of 6 steps the target size is {target:,} parameters, .* at most {pruner.limit:,}, "
    with pytest.warns(UserWarning, match=message) as told:
        pruner.compact()
    assert told[0].filename == __file__
    for params in (target, target + 10):
        pruner.compact(rw.Budget(params=params))
    train(pruner, optimizer.step, 3)
    pruner.compact()
    pruner.compact(rw.Budget(params=pruner.limit - 50))


# what is left out, and what is left


class Recurrent(nn.Module):
    """Half of it can be pruned, and half of it stands in LSTMs."""

    def __init__(self, layers: int = 1, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.LSTM(8, 8, proj_size=4) for _ in range(layers))
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


def share_of(model: Recurrent) -> float:
    return rw.count(model.inner) / rw.count(model)


@pytest.mark.parametrize("layers, names", [(1, "inner.0"), (6, "inner.0, inner.1, inner.2 and 3 more")])
def test_layers_left_out_are_named_with_their_share(layers: int, names: str) -> None:
    model = Recurrent(layers)
    said = rf"leaves out {share_of(model):.1%} of the parameters: {names} \(its state is projected \(`proj_size`\)\)"
    with pytest.warns(UserWarning, match=said) as told:
        rw.Pruner(model, rw.Budget(removed=0.01), "fac")
    assert len(told) == 1 and told[0].filename == __file__
    model = Recurrent(layers)
    rw.Pruner(model, rw.Budget(removed=0.01), "fac", rw.find_plan(model))


def test_little_things_left_out_are_not_named() -> None:
    model = Recurrent(width=128)
    assert 0.01 < share_of(model) < 0.05
    rw.Pruner(model, rw.Budget(removed=0.5), "fac")
    rw.Pruner(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), rw.Budget(removed=0.2), "fac")


def test_of_a_model_with_a_matrix_of_its_own_only_that_is_left_out() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 16))
            self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)

    model = Positions()
    with pytest.warns(UserWarning, match=rf"leaves out {8 * 16 / rw.count(model):.1%} of the parameters: \(model\)"):
        rw.Pruner(model, rw.Budget(removed=0.1), "fac")


def test_weights_that_two_layers_left_out_share_count_once() -> None:
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 9, bias=False))
    model[2].weight = model[0].weight
    with pytest.warns(UserWarning, match=rf"leaves out {72 / (72 + 72):.1%} of the parameters: 0 \("):
        rw.Pruner(model, rw.Budget(removed=0.1), "fac")


def test_a_budget_that_leaves_next_to_nothing_warns() -> None:
    def shrink(removed: float, **how: Any) -> None:
        rw.Pruner(nn.Linear(64, 64, bias=False), rw.Budget(removed=removed, **how), "fac")

    shrink(0.94)
    shrink(0.97, of="prunable")
    with pytest.warns(UserWarning, match=r"^97.0% of the prunable parameters must go to reach the budget\."):
        shrink(0.97)


@pytest.mark.parametrize("planned", [True, False])
def test_a_budget_out_of_reach_names_what_is_left_out(planned: bool) -> None:
    model = Recurrent()
    said = rf"The budget must be at least .* Left out are {share_of(model):.1%} of the parameters: inner.0 \(its state"
    plan = rw.find_plan(model) if planned else None
    with pytest.raises(rw.BudgetError, match=said):
        rw.Pruner(model, rw.Budget(removed=0.9), "fac", plan)
    with pytest.raises(rw.BudgetError, match=said):
        rw.compress(model, rw.Budget(removed=0.9))


# repr


def test_a_pruner_shows_method_size_and_step() -> None:
    model = build()
    dense = rw.count(model)
    pruner = gate(model)
    optimizer = adamw(pruner.weight_parameters())
    train(pruner, optimizer.step, 2)
    target = pruner.controller.target_size()
    assert repr(pruner) == (
        f"Pruner(flop-l0: {dense:,} -> {pruner.limit:,} parameters (50.0% removed), step 2 of 6, "
        f"target size {target:,})"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(pruner, optimizer.step, 5)
    assert repr(pruner) == f"Pruner(flop-l0: {dense:,} -> {pruner.limit:,} parameters (50.0% removed), step 7)"
    fixed = rw.Pruner(build(), BUDGET, "fac")
    assert repr(fixed) == f"Pruner(fac: {dense:,} -> {fixed.limit:,} parameters (50.0% removed), step 0)"
