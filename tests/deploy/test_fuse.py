"""Layers that read the same input: one product, the same outputs, nothing stored twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.export.fuse import LINEAR
from rankwise.deploy.export.program import Captured, capture
from rankwise.modules import PivotLinear


class Attention(nn.Module):
    """q, k and v read the same tensor, `out` another."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = layer(8, 6), layer(8, 6), layer(8, 10), layer(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).mT, -1)
        return x + self.out(weights @ self.v(x))


def dense(bias: bool) -> Callable[[int, int], nn.Module]:
    return lambda inputs, outputs: nn.Linear(inputs, outputs, bias=bias)


def pair(bias: bool) -> Callable[[int, int], nn.Module]:
    return lambda inputs, outputs: nn.Sequential(
        nn.Linear(inputs, outputs // 2, bias=False), nn.Linear(outputs // 2, outputs, bias=bias)
    )


def pivot(bias: bool) -> Callable[[int, int], nn.Module]:
    def layer(inputs: int, outputs: int) -> nn.Module:
        rank = outputs // 2
        coefficients = nn.Parameter(torch.randn(outputs - rank, rank))
        shift = nn.Parameter(torch.randn(outputs)) if bias else None
        return nn.Sequential(
            nn.Linear(inputs, rank, bias=False), PivotLinear(coefficients, torch.randperm(outputs), shift)
        )

    return layer


def mixed(bias: bool) -> Callable[[int, int], nn.Module]:
    """A dense q, a pair as k, a pivot layer as v."""
    kinds = iter((dense, pair, pivot, dense))
    return lambda inputs, outputs: next(kinds)(bias)(inputs, outputs)


def captured(model: nn.Module, name: str = "x") -> Captured:
    return capture(model.eval(), {name: torch.randn(3, 5, 8)})


def num_products(made: Captured) -> int:
    return sum(node.target is LINEAR for node in made.program.graph.nodes)


def num_stored(made: Captured) -> int:
    return sum(tensor.numel() for tensor in made.program.state_dict.values() if tensor.is_floating_point())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind, products", [(dense, 2), (pair, 6), (pivot, 6), (mixed, 4)])
def test_layers_of_the_same_input_become_one_product(kind: Any, products: int, bias: bool) -> None:
    model = Attention(kind(bias))
    made = captured(model)
    assert num_products(made) == products
    for size, length in ((3, 5), (1, 2)):
        x = torch.randn(size, length, 8)
        with torch.no_grad():
            (found,) = made.program.module()({"x": x})
            torch.testing.assert_close(found, model(x))
    # a bias of zeros stands beside those that there are
    zeros = 3 + 5 if kind is mixed and bias else 0
    assert num_stored(made) == rw.count(model) + zeros


def test_the_model_keeps_its_own_weights() -> None:
    model = Attention(dense(True))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_layers_of_different_inputs_are_left_alone() -> None:
    made = captured(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), "input")
    assert num_products(made) == 3
    assert num_stored(made) == 3 * (8 * 8 + 8)


class Shared(Attention):
    """k has the matrix of a layer that reads another tensor."""

    def __init__(self) -> None:
        super().__init__(dense(False))
        self.back = nn.Linear(8, 6, bias=False)
        self.back.weight = self.k.weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.back(super().forward(x))


def test_a_matrix_that_others_read_too_is_left_alone() -> None:
    model = Shared()
    made = captured(model)
    # q and v in one; k, out and back
    assert num_products(made) == 4
    # tied, so named twice and stored once
    assert len({tensor.data_ptr() for tensor in made.program.state_dict.values()}) == 3
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(made.program.module()({"x": x})[0], model(x))


class Changing(Attention):
    """q and k read a tensor, v the same tensor changed in place through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        weights = torch.softmax(self.q(x) @ self.k(x).mT, -1)
        x[:, 0] = 0
        return self.out(weights @ self.v(x))


def test_a_tensor_that_changed_in_place_is_another_one() -> None:
    model = Changing(dense(True))
    made = captured(model)
    # q and k in one; v and out
    assert num_products(made) == 3
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(made.program.module()({"x": x})[0], model(x))
