"""What code gets that reads the weight of a compact layer: the product, made when it is needed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rankwise as rw
from rankwise.modules import LowRankEmbedding, LowRankHead, LowRankLinear, PivotLinear, SelectedLinear


class Asks(nn.Module):
    """Casts to the dtype of one layer, and multiplies by the weight of another itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.read, self.both = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.items = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.asked.weight, Tensor) and x.dtype != self.asked.weight.dtype:
            x = x.to(self.asked.weight.dtype)
        x = x.to(self.items[0].weight.device)
        x = F.linear(x.to(self.both.weight.dtype), self.both.weight)
        return self.items[0](self.asked(x)) @ self.read.weight


def test_a_compact_layer_answers_for_its_weight() -> None:
    model = Asks()
    pruner = rw.Pruner(model, rw.Budget(removed=0.3), "fac")
    small: Any = pruner.compact()
    x = torch.randn(3, 8)
    assert isinstance(small.asked, LowRankLinear)
    assert small.asked.weight.shape == (8, 8)
    assert small.state_dict().keys() == {
        *(f"{name}.{i}.weight" for name in ("asked", "items.0", "read", "both") for i in (0, 1)),
        *(f"{name}.1.bias" for name in ("asked", "items.0", "read", "both")),
    }
    torch.testing.assert_close(small(x), model.eval()(x))
    small.double()
    assert small(x).dtype == torch.float64


def test_asking_for_a_dtype_multiplies_nothing_out() -> None:
    layer = LowRankLinear(nn.Linear(8, 2, bias=False), nn.Linear(2, 8))
    with FlopCounterMode(display=False) as flops:
        weight = layer.weight
        assert (weight.dtype, weight.device, weight.shape) == (torch.float32, layer[0].weight.device, (8, 8))
        assert isinstance(weight, Tensor) and weight.requires_grad
    assert flops.get_total_flops() == 0
    torch.testing.assert_close(weight + 0, layer[1].weight @ layer[0].weight)


def test_gradients_go_through_a_weight_that_is_read() -> None:
    layer, x = LowRankLinear(nn.Linear(8, 2, bias=False), nn.Linear(2, 8)), torch.randn(3, 8)
    layer(x).square().sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    F.linear(x, layer.weight, layer.bias).square().sum().backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], expected)


def test_every_compact_layer_offers_the_matrix_that_it_multiplies_by() -> None:
    x, words = torch.randn(3, 8), torch.arange(9)
    pair = LowRankLinear(nn.Linear(8, 2, bias=False), nn.Linear(2, 9))
    coefficients, places = nn.Parameter(torch.randn(7, 2)), torch.randperm(9).int()
    pivots = LowRankLinear(nn.Linear(8, 2, bias=False), PivotLinear(coefficients, places))
    selected = SelectedLinear(nn.Parameter(torch.randn(9, 3)), torch.arange(8) % 3 == 0, nn.Parameter(torch.randn(9)))
    table = LowRankEmbedding(nn.Embedding(9, 2), nn.Linear(2, 8, bias=False))
    head = LowRankHead(table[0], table[1], nn.Parameter(torch.randn(9)))
    for layer in (pair, pivots, selected, head):
        assert (layer.in_features, layer.out_features, layer.weight.shape) == (8, 9, (9, 8))
        torch.testing.assert_close(F.linear(x, layer.weight, layer.bias), layer(x))
    assert (table.num_embeddings, table.embedding_dim, table.padding_idx) == (9, 8, None)
    torch.testing.assert_close(F.embedding(words, table.weight), table(words))
    torch.testing.assert_close(table.weight.detach(), head.weight.detach())
