"""Copies of models: what modules have computed is copied without its history, and hooks go with those they hang on."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.swap import copied


class Keeper(nn.Module):
    """Keeps what it computes, in one form or another."""

    kept: Any

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        around: list[Any] = [y]
        around.append(around)
        self.kept = {"itself": y, "tuple": (1, y), "dict": {"h": [y]}, "cycle": around}[self.form]
        return y


def tensor_in(kept: Any) -> Tensor:
    while not isinstance(kept, Tensor):
        kept = kept["h"] if isinstance(kept, dict) else kept[-1] if isinstance(kept, tuple) else kept[0]
    return kept


@pytest.mark.parametrize("form", ["itself", "tuple", "dict", "cycle"])
def test_what_a_module_computed_is_copied_without_its_history(form: str) -> None:
    model = Keeper(form)
    y = model(torch.ones(2, 3))
    copy = copied(model)
    assert type(copy.kept) is type(model.kept)
    torch.testing.assert_close(tensor_in(copy.kept), y.detach(), rtol=0, atol=0)
    assert not tensor_in(copy.kept).requires_grad
    assert tensor_in(model.kept) is y
    y.sum().backward()
    assert model.layer.weight.grad is not None
    assert copy.layer.weight.grad is None


def test_modules_given_instead_get_the_hooks_and_a_method_is_that_of_the_copy() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.calls = 0
            self.layer.register_forward_hook(self.count)

        def count(self, *_: object) -> None:
            self.calls += 1

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y

    model, other = Counting(), nn.Linear(2, 2)
    copy = copied(model, instead={model.layer: other})
    assert copy.layer is other
    copy(torch.ones(1, 2))
    assert (model.calls, copy.calls) == (0, 1)


def mixed(module: nn.Module) -> None:
    """As Accelerate prepares a model for training in bf16."""
    module._original_forward = module.forward  # type: ignore[assignment]
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    module.forward = MethodType(autocast(module.forward.__func__), module)  # type: ignore[attr-defined]


@pytest.mark.parametrize("runs", [1, 2])
def test_mixed_precision_of_training_stays_with_the_model(runs: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    y = model(x)
    for _ in range(runs):
        mixed(model)
        mixed(model[1])
    assert torch.equal(copied(model)(x), y)
    assert model(x).dtype == torch.bfloat16


def test_a_forward_of_ones_own_is_copied_without_mixed_precision() -> None:
    def twice(self: nn.Linear, x: Tensor) -> Tensor:
        return 2 * nn.Linear.forward(self, x)

    model = nn.Linear(3, 3)
    model.forward = MethodType(twice, model)  # type: ignore[method-assign]
    x = torch.randn(2, 3)
    y = model(x)
    mixed(model)
    copy = copied(model)
    assert torch.equal(copy(x), y)
    nn.init.zeros_(model.weight)
    assert torch.equal(copy(x), y)
