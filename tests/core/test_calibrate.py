"""Calibration: moments against activations computed by hand, a model left as it was, and what the moments are for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.adapters.plans import find_plan
from rankwise.core.calibrate import second_moments
from rankwise.modules import LowRankLinear
from tests.models import Conv1D, Spec, batch


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.pair = LowRankLinear(nn.Linear(10, 3, bias=False), nn.Linear(3, 8))
        self.last = Conv1D(6, 8)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return self.last(torch.tanh(self.pair(torch.tanh(self.first(x * scale)))))


def inputs_of(model: Perceptron, x: Tensor) -> dict[str, Tensor]:
    """What reaches each layer, by hand."""
    first, (down, up) = model.first, model.pair
    h = torch.tanh(x @ first.weight.t() + first.bias)
    return {"first": x, "pair": h, "last": torch.tanh(h @ down.weight.t() @ up.weight.t() + up.bias)}


def moments_of(model: nn.Module, batches: Any) -> Any:
    return second_moments(model, find_plan(model), batches)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def second_moment(x: Tensor) -> Tensor:
    x = x.detach().double().flatten(0, -2)
    return sum(torch.outer(row, row) for row in x) / len(x)


# moments


def test_moments_are_those_of_the_activations() -> None:
    model, x = Perceptron(), torch.randn(20, 6)
    moments = moments_of(model, [x[:3], x[3:]])
    assert moments.keys() == {"first", "pair", "last"}
    for name, inputs in inputs_of(model, x).items():
        torch.testing.assert_close(moments[name].inputs_II, second_moment(inputs), rtol=1e-5, atol=1e-7)
        assert moments[name].rows_O is None


def test_a_tied_embedding_knows_its_words_and_what_reaches_the_head() -> None:
    spec = Spec(back="tied", parts=("linear",))
    model, tokens = spec.build(), batch(spec)
    (moment,) = [m for name, m in moments_of(model, [tokens[:4], tokens[4:]]).items() if name == "front"]
    counts = torch.bincount(tokens.flatten(), minlength=spec.num_words)
    torch.testing.assert_close(moment.rows_O, counts.double() / tokens.numel())
    h = model.front(tokens)
    h = h + torch.tanh(model.body[0](h))
    torch.testing.assert_close(moment.inputs_II, second_moment(h), rtol=1e-5, atol=1e-7)


def test_a_low_rank_head_is_calibrated_with_its_pair() -> None:
    spec = Spec(back="low-rank", parts=())
    model, tokens = spec.build(), batch(spec)
    moment = moments_of(model, [tokens])["front"]
    counts = torch.bincount(tokens.flatten(), minlength=spec.num_words)
    torch.testing.assert_close(moment.rows_O, counts.double() / tokens.numel())
    torch.testing.assert_close(moment.inputs_II, second_moment(model.front(tokens)), rtol=1e-5, atol=1e-7)


def test_a_layer_that_is_used_twice_counts_both() -> None:
    layer = nn.Linear(5, 5)
    model, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(9, 5)
    both = torch.cat([x, torch.tanh(layer(x))])
    torch.testing.assert_close(moments_of(model, [x])["0"].inputs_II, second_moment(both), rtol=1e-5, atol=1e-7)


def test_a_layer_that_the_data_never_reach_has_no_moments() -> None:
    class Idle(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(6, 6)

    moment = moments_of(Idle(), [torch.randn(3, 6)])["idle"]
    assert moment.inputs_II is None
    assert moment.rows_O is None


def test_a_layer_that_is_called_without_a_row_has_no_moments() -> None:
    """As an expert is that no word has chosen."""
    for model, x in ((nn.Linear(6, 6), torch.randn(0, 6)), (nn.Embedding(6, 6), torch.zeros(0, dtype=torch.long))):
        (moment,) = moments_of(model, [x]).values()
        assert moment.inputs_II is None
        assert moment.rows_O is None


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "generator"])
def test_batches_come_in_every_form(form: str) -> None:
    model, x, scale = Perceptron(), torch.randn(20, 6), torch.tensor(2.0)
    batches: Any = {
        "tensor": [2 * x],
        "tuple": [(x, scale)],
        "list": [[x, scale]],
        "dict": [{"scale": scale, "x": x}],
        "generator": (part for part in (2 * x).split(7)),
    }[form]
    moments = moments_of(model, batches)
    torch.testing.assert_close(moments["first"].inputs_II, second_moment(2 * x), rtol=1e-5, atol=1e-7)


def test_a_batch_may_be_a_single_vector() -> None:
    """As `nn.Linear` itself allows."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(6)
    torch.testing.assert_close(moments_of(model, [x])["0"].inputs_II, torch.outer(x, x).double())


def test_a_layer_may_be_called_by_keyword() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    x = torch.randn(3, 4)
    torch.testing.assert_close(moments_of(ByName(), [x])["layer"].inputs_II, second_moment(x), rtol=1e-5, atol=1e-7)


def test_half_precision_sums_do_not_overflow() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    x = torch.full((64, 4), 300.0, dtype=torch.bfloat16)
    moment = moments_of(model, [x])["0"].inputs_II
    assert moment.dtype == torch.float64
    torch.testing.assert_close(moment, second_moment(x))


# the model is left as it was


def test_dropout_is_off_while_calibrating_and_the_mode_restored() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.randn(50, 4)
    for training in (True, False):
        model.train(training)
        moments = moments_of(model, [x])
        torch.testing.assert_close(moments["1"].inputs_II, second_moment(x))
        assert all(module.training == training for module in model.modules())
    assert hooks(model) == 0


def test_a_part_that_was_in_evaluation_mode_stays_so() -> None:
    """A frozen batch norm in a model that trains must not start to learn."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.train()
    model[1].eval()
    moments_of(model, [torch.randn(5, 4)])
    assert model.training
    assert model[0].training
    assert not model[1].training


def test_no_gradient_is_left_behind() -> None:
    model = Perceptron()
    moments = moments_of(model, [torch.randn(5, 6)])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(moment.inputs_II.requires_grad for moment in moments.values())


def broken() -> Iterator[Tensor]:
    yield torch.randn(2, 6)
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "batches, error", [([torch.randn(2, 6), torch.randn(2, 99)], RuntimeError), (broken(), OSError)]
)
def test_a_failure_leaves_neither_hooks_nor_another_mode(batches: Any, error: type[Exception]) -> None:
    model = Perceptron()
    with pytest.raises(error):
        moments_of(model, batches)
    assert hooks(model) == 0
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("empty", [[], iter(())])
def test_empty_calibration_is_refused(empty: Any) -> None:
    model = Perceptron()
    with pytest.raises(rw.DataError, match="`calibration` must hold at least one batch, but is empty."):
        moments_of(model, empty)
    assert hooks(model) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_refused(value: float) -> None:
    x = torch.randn(5, 6)
    x[2, 3] = value
    with pytest.raises(rw.DataError, match="must give finite activations, but the inputs of 'first' are not."):
        moments_of(Perceptron(), [torch.randn(5, 6), x])


# what moments are for


def anisotropic(num: int, width: int) -> Tensor:
    """Data that lie almost in a few directions, none of them an axis."""
    scale = torch.logspace(0, -3, width)
    basis = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(7))).Q
    return torch.randn(num, width) * scale @ basis


def perceptron(width: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@pytest.mark.parametrize("removed", [0.5, 0.7])
def test_calibration_lowers_the_error_on_the_data(removed: float) -> None:
    model, x, held_out = perceptron(), anisotropic(400, 24), anisotropic(400, 24)
    budget = rw.Budget(removed=removed)
    plain, whitened = rw.compress(model, budget), rw.compress(model, budget, x.split(100))
    for data in (x, held_out):
        assert (whitened(data) - model(data)).norm() < 0.5 * (plain(data) - model(data)).norm()


def test_frequent_words_are_kept_best() -> None:
    model = nn.Sequential(nn.Embedding(40, 16), nn.Tanh())
    common = torch.arange(4).repeat(100)
    budget = rw.Budget(removed=0.6)
    plain, whitened = (rw.compress(model, budget, data, embeddings=True) for data in (None, [common]))
    error = [(small(common) - model(common)).norm() for small in (plain, whitened)]
    assert error[1] < 0.5 * error[0]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("back", ["untied", "tied", "low-rank"])
def test_compress_meets_the_budget_and_leaves_the_model_alone(calibrated: bool, back: Any) -> None:
    spec = Spec(width=16, num_words=40, back=back, parts=("linear", "nested", "pair", "conv1d", "norm"))
    model = spec.build()
    state, types = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    small = rw.compress(model, rw.Budget(removed=0.4), [batch(spec)] if calibrated else None, embeddings=True)
    assert rw.count(small) <= 0.6 * rw.count(model)
    assert [type(module) for module in model.modules()] == types
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert hooks(model) == hooks(small) == 0
    assert small.training == model.training
    for parameter in small.parameters():
        nn.init.zeros_(parameter)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    small(batch(spec))


def test_compress_at_full_size_changes_nothing_that_is_computed() -> None:
    model, x = perceptron().double(), anisotropic(50, 24).double()
    small = rw.compress(model, rw.Budget(params=rw.count(model)), [x])
    torch.testing.assert_close(small(x), model(x), rtol=1e-8, atol=1e-8)


def test_a_whitened_start_computes_what_the_model_did() -> None:
    model, x = perceptron().double(), anisotropic(200, 24).double()
    want = model(x).detach()
    rw.Pruner(model, rw.Budget(removed=0.5), "flop-agp", init="whitened", calibration=[x], anneal_steps=10)
    torch.testing.assert_close(model(x), want, rtol=1e-8, atol=1e-8)
    assert hooks(model) == 0


@pytest.mark.parametrize("loss", ["sampled", lambda output: output.square().sum(), None])
def test_a_pruner_weighs_errors_as_compress_does(loss: Any) -> None:
    """Even ranks from one start: the first factors of the pruner are those that `compress` leaves."""
    model, x = perceptron().double(), anisotropic(200, 24).double()
    budget = rw.Budget(removed=0.5)
    small = rw.compress(model, budget, [x], loss=loss, ranks="even")
    pruner = rw.Pruner(model, budget, "fac", init="whitened", calibration=[x], loss=loss)
    # `compress` sums moments in single precision
    torch.testing.assert_close(pruner.compact()(x), small(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"init": "whitened"}, 'init="whitened" needs `calibration`, but there is none'),
        (
            {"calibration": [torch.randn(3, 24)]},
            "`calibration` must go with .* but init is 'svd' and the method 'flop-l0'",
        ),
        ({"init": "random", "calibration": []}, "`calibration` must go with .* but init is 'random'"),
        (
            {"calibration": [torch.randn(3, 24)], "loss": "sampled", "method": "flop-agp"},
            "`calibration` must go with .* and the method 'flop-agp'",
        ),
        (
            {"calibration": [torch.randn(3, 24)], "loss": "sampled", "start": "open"},
            "`calibration` must go with .* and the method 'flop-l0'",
        ),
    ],
)
def test_calibration_data_that_are_missing_or_change_nothing_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(rw.PlanError, match=match):
        rw.Pruner(perceptron(), rw.Budget(removed=0.5), anneal_steps=10, **arguments)
