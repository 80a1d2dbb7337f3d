"""The default plan: what it leaves out and why, and layers whose weight or type the model's code asks for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.modules import LowRankHead, LowRankLinear, linear
from tests.adapters.plan_toys import assert_trains_and_exports, kinds, names, reasons, weights
from tests.models import Conv1D, Spec


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Reader(nn.Module):
    """Multiplies by the weight of its layer, without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.called = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.layer.weight))


class Keeper(nn.Module):
    """Holds the weight of its layer as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.same = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.same


@pytest.mark.parametrize(
    "module, name, reason",
    [
        (Doubled(4, 4), "", "Doubled has a forward of its own"),
        (nn.Embedding(5, 4, max_norm=1.0), "", "an embedding with `max_norm` or `sparse`"),
        (nn.Embedding(5, 4, sparse=True), "", "an embedding with `max_norm` or `sparse`"),
        (nn.Embedding(5, 4, scale_grad_by_freq=True), "", "`scale_grad_by_freq`"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "", "it adds keys and values of its own"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), "", "it adds keys and values of its own"),
        (nn.LSTM(4, 4, proj_size=2), "", "its state is projected (`proj_size`)"),
        (nn.RNN(4, 4), "", "RNN is not a linear layer or an embedding"),
        (nn.Conv1d(4, 4, 3), "", "it is a convolution of a longer kernel, of groups or of strides"),
        (nn.Conv1d(4, 4, 1, groups=2), "", "it is a convolution of a longer kernel, of groups or of strides"),
        (nn.Conv1d(4, 4, 1, padding=1), "", "it is a convolution that pads its input"),
        (nn.Bilinear(4, 4, 4), "", "Bilinear is not a linear layer or an embedding"),
        (nn.Conv2d(4, 4, 1), "", "Conv2d is not a linear layer or an embedding"),
        (Keeper(), "layer", "tied to part, which is left out"),
        (linear(nn.Parameter(torch.zeros(4, 0)), None), "", "it is empty"),
    ],
)
def test_what_cannot_be_gated_safely_is_left_out_with_a_word(module: nn.Module, name: str, reason: str) -> None:
    plan = find_plan(nn.ModuleDict({"part": module, "plain": nn.Linear(4, 4)}))
    path = f"part.{name}" if name else "part"
    assert reason in reasons(plan)[path]
    assert path not in names(plan)
    assert "plain" in names(plan)


REWRITTEN = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "hooked spectral_norm": spectral_norm,
    "hooked pruning mask": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("rewrite", REWRITTEN)
def test_a_layer_whose_weight_is_made_from_other_parameters_is_left_out(rewrite: str) -> None:
    layer = REWRITTEN[rewrite](nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4))
    plan = find_plan(model)
    assert names(plan) == {"2"}
    assert "0" in {name.split(".")[0] for name in reasons(plan)}
    assert_trains_and_exports(model, torch.randn(3, 4))


def test_a_parametrized_layer_is_named_with_its_reason() -> None:
    plan = find_plan(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)))
    assert reasons(plan).get("0") == "its weight is parametrized"


class Alias(nn.Module):
    """Reads the weights of some layers under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.called = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        layer, called = self.layer, self.called
        x = called(F.linear(x, layer.weight))
        for each in self.layers:
            x = F.linear(x, each.weight)
        return x


def multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight) + layer.bias[: layer.out_features] * x.shape[-1] / layer.in_features


class Hands(nn.Module):
    """Hands its layer to a function that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(self.layer, x)


class Indexed(nn.Module):
    """Reads the weights of layers by index, and of one only the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = F.linear(x, self.layers[i].weight)
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.filterwarnings("ignore:.* of the gates had not decided")
@pytest.mark.parametrize("method", ["flop-l0", "flop-agp", "np-l0", "agp", "fac"])
@pytest.mark.parametrize("build", [Reader, Alias, Hands, Indexed])
def test_a_layer_whose_weight_is_read_is_pruned_and_gives_the_right_weight(build: Any, method: str) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(3, 4)
    plan = find_plan(model)
    assert plan.left_out == ()
    expected = model(x)
    ramp = {} if method == "fac" else {"anneal_steps": 2}
    pruner = rw.Pruner(model, rw.Budget(removed=0.3, of="prunable"), method, plan, example=x, **ramp)
    if method != "fac":
        # a learned gate starts almost open
        torch.testing.assert_close(model.eval()(x), expected, rtol=0.05, atol=0.01)
    for _ in range(3):
        model.train()(x).square().mean().backward()
        pruner.step()
        model.zero_grad()
    for gate in pruner.controller.gates:
        assert gate.z is None or not gate.z.isnan().any()
    small = pruner.compact()
    torch.testing.assert_close(small.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [nn.Embedding(5, 4, sparse=True), Doubled(4, 5)])
def test_a_layer_tied_to_something_left_out_is_left_out_too(module: nn.Module) -> None:
    head = nn.Linear(4, 5)
    head.weight = module.weight
    plan = find_plan(nn.ModuleDict({"front": module, "head": head, "plain": nn.Linear(4, 4)}))
    assert names(plan) == {"plain"}
    assert reasons(plan)["head"] == f"tied to front, which is left out: {reasons(plan)['front']}"


def test_a_layer_tied_to_an_excluded_one_is_left_out_too() -> None:
    plan = find_plan(Spec(back="tied").build(), exclude=["head"])
    assert reasons(plan) == {"head": "in `exclude`", "front": "tied to head, which is left out: in `exclude`"}


def test_a_pair_tied_to_an_excluded_head_is_left_out_too() -> None:
    plan = find_plan(Spec(back="low-rank", parts=()).build(), exclude=["head"])
    why = "tied to head.embedding, which is left out: in `exclude`"
    assert reasons(plan) == {"head": "in `exclude`", "front": why}


def test_a_conv1d_tied_to_an_embedding_is_left_out() -> None:
    front, head = nn.Embedding(5, 5), Conv1D(5, 5)
    head.weight = front.weight
    plan = find_plan(nn.ModuleDict({"front": front, "head": head}))
    assert reasons(plan) == dict.fromkeys(["front", "head"], "tied to a layer that stores the weight transposed")


def test_a_low_rank_head_without_its_pair_is_left_out() -> None:
    plan = find_plan(nn.Sequential(LowRankHead(nn.Embedding(5, 2), nn.Linear(2, 4, bias=False)), nn.Linear(5, 5)))
    assert names(plan) == {"1"}
    assert reasons(plan) == {"0": "its embedding is not part of a pair in the model"}


def test_tying_in_init_does_not_exclude() -> None:
    """Only code that runs after the model is built reads weights behind a layer's back."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9)
            self.head.weight = self.emb.weight
            self.tie_weights()
            self._init_weights()

        def tie_weights(self) -> None:
            self.head.weight = self.emb.weight

        def _init_weights(self) -> None:
            nn.init.zeros_(self.head.bias)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.emb(tokens))

    model = Tied()
    plan = find_plan(model)
    assert names(plan) == {"emb", "head"}
    assert plan.left_out == ()
    assert_trains_and_exports(model, torch.randint(0, 9, (3, 5)))


def test_a_linear_with_parameters_of_its_own_keeps_them() -> None:
    """Gating replaces weight and bias; whatever else a subclass holds must not vanish."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

    model = nn.Sequential(Scaled(), nn.Tanh(), nn.Linear(4, 4))
    assert_trains_and_exports(model, torch.randn(3, 4))


def test_a_layer_whose_own_forward_was_replaced_is_left_out() -> None:
    """As libraries do that wrap single layers, to move or quantize them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain = model[0].forward
    model[0].forward = lambda x: 2 * plain(x)
    assert names(find_plan(model)) == {"2"}
    assert "0" in reasons(find_plan(model))


class Mixed(nn.Module):
    """Does one thing with an `nn.Linear` and another with other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)])


class InLoop(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x if isinstance(layer, nn.Linear) else layer(x)
        return x


class OfSequences(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x if isinstance(layer, (nn.Sequential, nn.Conv1d)) else layer(x)
        return x


class InMethod(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) + x if type(layer) is nn.Linear else layer(x)


def run(layer: nn.Module, x: Tensor) -> Tensor:
    match layer:
        case nn.Linear():
            return layer(x) + x
        case _:
            return layer(x)


class InFunction(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = run(layer, x)
        return x


BY_TYPE = {InLoop: True, InFunction: True, InMethod: False, OfSequences: True}
"""Whether a gated layer is what the code asks for."""


@pytest.mark.parametrize("build", BY_TYPE)
def test_code_that_asks_for_the_type_of_a_layer_gets_the_right_output_or_an_error(build: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(build(), nn.Linear(8, 8)), torch.randn(3, 8)
    assert names(find_plan(model)) == {"0.layers.0", "0.layers.2", "1"}
    expected = model(x)
    whole = rw.compress(model, rw.Budget(params=rw.count(model)), example=x)
    torch.testing.assert_close(whole(x), expected)
    wrong = "stock layers of the same weights, but does not: 0.layers.0, 0.layers.2. Its code may ask for their type"
    with pytest.raises(rw.RankwiseError, match=wrong):
        rw.compress(model, rw.Budget(removed=0.5), example=x)
    budget = rw.Budget(removed=0.5)
    if not BY_TYPE[build]:
        with pytest.raises(rw.RankwiseError, match=wrong):
            rw.Pruner(copy.deepcopy(model), budget, "flop-agp", anneal_steps=1, example=x)
    # without an example, the first call is one
    pruner = rw.Pruner(model, budget, "flop-agp", anneal_steps=1)
    model(x).square().mean().backward()
    if not BY_TYPE[build]:
        with pytest.raises(rw.RankwiseError, match=wrong):
            pruner.step()
        return
    torch.testing.assert_close(model.eval()(x), expected)
    pruner.step()
    with pytest.raises(rw.RankwiseError, match=wrong):
        pruner.compact()


def test_what_is_left_out_by_that_advice_is_right() -> None:
    model, x = nn.Sequential(InMethod(), nn.Linear(8, 8)), torch.randn(3, 8)
    plan = find_plan(model, exclude=["layers"])
    assert_trains_and_exports(model, x, plan=plan, example=x)


class SharedHalf(nn.Module):
    """Two pairs that begin with the same layer."""

    def __init__(self) -> None:
        super().__init__()
        down = nn.Linear(16, 4, bias=False)
        self.a = LowRankLinear(down, nn.Linear(4, 16))
        self.b = LowRankLinear(down, nn.Linear(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class HalfAlone(nn.Module):
    """A pair whose first layer is also used without its second."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 4, bias=False)
        self.pair = LowRankLinear(self.down, nn.Linear(4, 16))
        self.other = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x) + self.other(self.down(x))


@pytest.mark.parametrize("build", [SharedHalf, HalfAlone])
def test_half_a_pair_that_is_used_elsewhere_is_counted_once_and_exported_right(build: Any) -> None:
    model = build()
    plan = find_plan(model)
    distinct = {id(w): w for name, kind in kinds(plan).items() for w in weights(model.get_submodule(name), kind)}
    assert plan.params == sum(w.numel() for w in distinct.values()) <= rw.count(model)
    model.extra = nn.Linear(16, 16)
    x = torch.randn(3, 16)
    pruner = rw.Pruner(model, rw.Budget(removed=0.2, of="prunable"), "flop-agp", anneal_steps=1)
    model(x).square().mean().backward()
    pruner.step()
    small = pruner.compact()
    torch.testing.assert_close(small.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert rw.count(small) <= pruner.limit
