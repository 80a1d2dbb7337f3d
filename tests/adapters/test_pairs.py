"""A `LowRankLinear` is one matrix; an `nn.Sequential` of two layers, which code may take apart, is two."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.modules import LowRankLinear
from tests.adapters.plan_toys import assert_trains_and_exports, kinds


def pair(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(nn.Linear(16, 4, bias=False), nn.Linear(4, 16))


class OnePair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = pair()


class TakenApart(nn.Module):
    """Calls the layers of its pair one by one, with something between."""

    def __init__(this) -> None:  # noqa: N805
        super().__init__()
        this.pair = pair()

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return this.pair[1](torch.tanh(this.pair[0](x)))


class Unpacked(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        down, up = self.pair
        return up(torch.tanh(down(x)))


class Iterated(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.pair):
            x = layer(torch.tanh(x) if i else x)
        return x


class Iterator(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        layers = iter(self.pair)
        x = torch.tanh(next(layers)(x))
        return next(layers)(x)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(OrderedDict(down=nn.Linear(16, 4, bias=False), up=nn.Linear(4, 16)))

    def forward(self, x: Tensor) -> Tensor:
        return self.pair.up(torch.tanh(self.pair.down(x)))


class NamedByText(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("pair.1")(torch.tanh(getattr(self.pair, "0")(x)))


class Children(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        for child in self.pair.children():
            x = torch.tanh(child(x))
        return x


class ByAnotherName(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        layers = self.pair
        return layers[1](torch.tanh(layers[0](x)))


def run(layers: nn.Sequential, x: Tensor) -> Tensor:
    return layers[1](torch.tanh(layers[0](x)))


class HandedOn(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        return run(self.pair, x)


class ByItsParent(nn.Module):
    """The module that holds the pair has no code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = OnePair()

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.block.pair
        return up(torch.tanh(down(x)))


class ListOfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([pair(), pair()])

    def forward(self, x: Tensor) -> Tensor:
        for down, up in self.pairs:
            x = up(torch.tanh(down(x)))
        return x


class GivenAway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Sequential(pair(), pair())

    def layers(self) -> nn.Module:
        return self.pairs

    def forward(self, x: Tensor) -> Tensor:
        for down, up in self.layers():
            x = up(torch.tanh(down(x)))
        return x


class CalledToo(OnePair):
    def forward(self, x: Tensor) -> Tensor:
        down, up = self.pair
        return self.pair(x) + up(torch.tanh(down(x)))


APART = [
    *(TakenApart, Unpacked, Iterated, Iterator, Named, NamedByText, Children, ByAnotherName, HandedOn),
    *(ByItsParent, ListOfPairs, GivenAway, CalledToo),
]


@pytest.mark.parametrize("build", APART)
def test_a_pair_that_is_taken_apart_is_two_layers(build: Any) -> None:
    model, x = build(), torch.randn(3, 16)
    assert set(kinds(find_plan(model)).values()) == {"linear"}
    whole = rw.compress(model, rw.Budget(params=rw.count(model)))
    torch.testing.assert_close(whole(x), model(x))
    assert_trains_and_exports(model, x)


class Called(nn.Module):
    """Calls pairs, in all the ways in which a model may call a layer."""

    def __init__(self, kind: type[nn.Sequential]) -> None:
        super().__init__()
        self.alone, self.renamed, self.by_name, self.maybe, self.asked = (pair(kind) for _ in range(5))
        self.sequence = nn.Sequential(nn.Sequential(pair(kind), nn.Tanh()), pair(kind))
        self.listed = nn.ModuleList([pair(kind), pair(kind)])
        self.split = nn.ModuleList([pair(kind), pair(kind)])
        self.keyed = nn.ModuleDict({"a": pair(kind), "b": pair(kind)})
        self.numbered = nn.ModuleList([nn.ModuleDict({"proj": pair(kind)})])

    def get_output_layer(self) -> nn.Module:
        return self.alone

    def forward(self, x: Tensor) -> Tensor:
        layer = self.renamed
        x = self.sequence(self.alone(x)) + layer(x) + getattr(self, "by_name")(x)  # noqa: B009
        if self.maybe is not None:
            x = self.maybe.forward(x)
        x = self.asked(x.to(self.asked.weight.dtype) if hasattr(self.asked, "weight") else x)
        for i, (each, scale) in enumerate(zip(self.listed, (0.5, 2.0), strict=True)):
            x = scale * each(x) + i
        first, *others = self.split
        x = sum((other(x) for other in others), first(x))
        for _, each in self.keyed.items():
            x = each(x)
        return self.numbered[0]["proj"](x)


@pytest.mark.parametrize("kind, found", [(LowRankLinear, "linear-pair"), (nn.Sequential, "linear")])
def test_a_pair_that_is_called_is_one_matrix_if_its_class_says_so(kind: Any, found: str) -> None:
    model, x = Called(kind), torch.randn(3, 16)
    assert set(kinds(find_plan(model)).values()) == {found}
    assert_trains_and_exports(model, x, example=x)


def test_a_pair_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="must have no bias and as many outputs as the second has inputs"):
        LowRankLinear(nn.Linear(4, 2), nn.Linear(2, 4))


HIDDEN = """
class Hidden(OnePair):
    def forward(self, x):
        return self.pair[1](torch.tanh(self.pair[0](x)))
"""


def test_a_pair_of_code_without_a_source_is_two_layers() -> None:
    exec(HIDDEN, globals())
    model, x = globals()["Hidden"](), torch.randn(3, 16)
    whole = rw.compress(model, rw.Budget(params=rw.count(model)))
    torch.testing.assert_close(whole(x), model(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(9, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_the_pairs_of_a_compact_model_are_one_matrix_each(layout: Any) -> None:
    model = Plain()
    small = rw.compress(model, rw.Budget(removed=0.6), embeddings=True, layout=layout)
    expected = {"words": "embedding-pair", "layers.0": "linear-pair", "layers.1": "linear-pair"}
    assert kinds(find_plan(small)) == expected
