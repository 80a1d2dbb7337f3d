"""Bad input gets one clear sentence, and the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from tests.models import Spec, batch

SPEC = Spec(width=8, num_words=11, parts=("linear", "nested", "pair", "conv1d", "norm"))
BUDGET = rw.Budget(removed=0.3)
Refusal = type[Exception] | tuple[type[Exception], ...]


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "types": {name: type(module) for name, module in model.named_modules()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
        },
        "parameters": {name: (id(p), p.requires_grad, p.grad) for name, p in model.named_parameters()},
        "state": {name: value.clone() for name, value in model.state_dict().items()},
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    state, other = before.pop("state"), after.pop("state")
    assert before == after
    assert list(state) == list(other)
    for name, value in state.items():
        assert value.shape == other[name].shape
        assert value.is_meta or torch.equal(value.nan_to_num(7.5), other[name].nan_to_num(7.5)), name


@contextmanager
def refused(model: nn.Module, error: Refusal, message: str) -> Iterator[None]:
    """The error comes with this message, one that ends as sentences do, and `model` is untouched."""
    before = snapshot(model)
    with pytest.raises(error, match=message) as caught:
        yield
    text = str(caught.value)
    assert text[0] in "`abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert text.endswith((".", "?")) or "Left out:" in text
    assert_same(before, snapshot(model))


def with_nan() -> nn.Module:
    model = SPEC.build()
    with torch.no_grad():
        model.body[1][0][0].weight[2, 3] = float("nan")
    return model


def with_infinity() -> nn.Module:
    model = SPEC.build()
    with torch.no_grad():
        model.front.weight[0, 0] = float("inf")
    return model


def mixed() -> nn.Module:
    model = SPEC.build()
    model.head.half()
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return SPEC.build()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Refusal, str]] = {
    "budget below what cannot be pruned": (
        SPEC.build,
        {"budget": rw.Budget(params=20)},
        rw.BudgetError,
        r"must be at least \d+ parameters .* but asks for 20 of \d+. Remove at most 0.\d+ of the model",
    ),
    "megabytes below what cannot be pruned": (
        SPEC.build,
        {"budget": rw.Budget(megabytes=1e-5)},
        rw.BudgetError,
        r"must be at least .* The smallest size is megabytes=0.000\d+",
    ),
    "a plan that matches nothing": (
        SPEC.build,
        {"plan": rw.Plan(())},
        rw.PlanError,
        "The plan must hold at least one matrix, but matches no module",
    ),
    "NaN weights": (with_nan, {}, rw.PlanError, "body.1.0.0: weights must be finite, but hold NaN or infinity"),
    "infinite weights": (with_infinity, {}, rw.PlanError, "front: weights must be finite, but hold NaN or infinity"),
    "a model without parameters": (nn.Tanh, {}, rw.PlanError, "must have parameters, but Tanh has none"),
    "a model without data": (on_meta, {}, rw.PlanError, "front: weights must hold data, but are on the meta device"),
    "an unknown method": (
        SPEC.build,
        {"method": "flop_l0"},
        rw.RankwiseError,
        r"`method` must be one of dense, .* but is 'flop_l0' instead. Did you mean 'flop-l0'\?",
    ),
    "a method that resembles none": (
        SPEC.build,
        {"method": "quantize"},
        rw.RankwiseError,
        "`method` must be one of .* but is 'quantize' instead.$",
    ),
    "an unknown setting": (
        SPEC.build,
        {"aneal_steps": 10},
        TypeError,
        r"flop-l0 has no setting `aneal_steps`. Did you mean 'anneal_steps'\? It takes: anneal_steps, gate_lr",
    ),
    "a setting of another method": (
        SPEC.build,
        {"method": "fac", "anneal_steps": 10},
        TypeError,
        "fac has no setting `anneal_steps`. It takes: layout.",
    ),
    "a missing setting": (
        SPEC.build,
        {"anneal_steps": None},
        TypeError,
        r"flop-l0 needs `anneal_steps`. Example: Pruner\(model, budget, .*'flop-l0', anneal_steps=1000\).",
    ),
    "a setting out of range": (
        SPEC.build,
        {"anneal_steps": 0},
        ValueError,
        "`anneal_steps` must be a whole number of at least 1",
    ),
    "no budget": (SPEC.build, {"budget": 0.8}, TypeError, r"`budget` must be a Budget, but is 0.8 instead. Example"),
    "an unknown init": (
        SPEC.build,
        {"init": "pca"},
        ValueError,
        '`init` must be "svd", "whitened" or "random", but is \'pca\' instead.',
    ),
    "whitening without calibration": (
        SPEC.build,
        {"init": "whitened"},
        rw.PlanError,
        "needs `calibration`, but there is none",
    ),
    "a tensor as calibration": (
        SPEC.build,
        {"init": "whitened", "calibration": torch.ones(8, 16)},
        TypeError,
        r"but is a Tensor instead. Pass \[batch\], or list\(batches\) if its first dimension counts batches",
    ),
    "a method in a list": (SPEC.build, {"method": ["fac"]}, rw.RankwiseError, r"`method` must be .*, but is \['fac'\]"),
    "a target in a list": (SPEC.build, {"target": ["cpu"]}, rw.RankwiseError, r"`target` must be .*, but is \['cpu'\]"),
    "empty calibration": (
        SPEC.build,
        {"init": "whitened", "calibration": []},
        rw.DataError,
        "`calibration` must hold at least one batch",
    ),
    "calibration with labels": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        {"init": "whitened", "calibration": [(torch.ones(2, 16), torch.ones(2))]},
        rw.RankwiseError,
        "A batch must hold the inputs of the model alone, without labels, .* not take 2 of them: .*takes 2 positional",
    ),
    "a loss without calibration": (SPEC.build, {"loss": "sampled"}, rw.PlanError, "`loss` must go with `calibration`"),
    "a loss of another kind": (
        SPEC.build,
        {"loss": "mse"},
        ValueError,
        "`loss` must be a function, \"sampled\" or None, but is 'mse' instead.",
    ),
    "a start by worth without a loss": (
        lambda: nn.LSTM(8, 8),
        {"start": "worth"},
        ValueError,
        '`start` must be "open" where nothing says what components are worth, but is "worth" instead. Pass',
    ),
    "rank multiple of zero": (
        SPEC.build,
        {"rank_multiple": 0},
        ValueError,
        "`rank_multiple` must be a whole number of at least 1",
    ),
    "rank multiple of a half": (SPEC.build, {"rank_multiple": 2.5}, (TypeError, ValueError), "`rank_multiple` must be"),
    "a seed that is no number": (SPEC.build, {"seed": "a"}, (TypeError, ValueError), "`seed` must be"),
    "megabytes for a method that keeps shapes": (
        SPEC.build,
        {"budget": rw.Budget(megabytes=1), "method": "agp"},
        rw.BudgetError,
        "`megabytes` needs matrices that shrink, but this method keeps their shape",
    ),
    "megabytes of mixed dtypes": (
        mixed,
        {"budget": rw.Budget(megabytes=1)},
        rw.BudgetError,
        "`megabytes` needs one export dtype, but the model's parameters are of torch.float16, torch.float32. Pass",
    ),
    "features of embeddings alone": (
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.Tanh()),
        {"method": "np-l0"},
        rw.PlanError,
        "Left out:\n  0: an embedding has no input features to prune",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_argument_is_refused_and_changes_nothing(case: str) -> None:
    build, changes, error, message = CASES[case]
    model = build()
    arguments: dict[str, Any] = {"budget": BUDGET, "anneal_steps": 10, **changes}
    if changes.get("anneal_steps", 10) is None or "aneal_steps" in changes:
        del arguments["anneal_steps"]
    with refused(model, error, message):
        rw.Pruner(model, **arguments)


COMPRESS = [
    "budget below what cannot be pruned",
    "a plan that matches nothing",
    "NaN weights",
    "a model without parameters",
    "a model without data",
    "no budget",
    "rank multiple of zero",
    "megabytes of mixed dtypes",
]


@pytest.mark.parametrize("case", COMPRESS)
def test_compress_refuses_the_same(case: str) -> None:
    build, changes, error, message = CASES[case]
    model = build()
    with refused(model, error, message):
        rw.compress(model, **{"budget": BUDGET, "embeddings": True, **changes})


@pytest.mark.parametrize("call", [rw.Pruner, rw.compress])
@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], nn.Linear])
def test_what_is_no_module_is_refused(call: Any, model: Any) -> None:
    message = f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead."
    with pytest.raises(TypeError, match=message):
        call(model, BUDGET)


def test_settings_beside_a_method_object_are_refused() -> None:
    from rankwise.methods import make_method

    model = SPEC.build()
    with refused(model, TypeError, "Settings go into the method object, but got gate_lr beside it."):
        rw.Pruner(model, BUDGET, make_method("flop-l0", anneal_steps=10), gate_lr=1.0)


def test_a_refused_model_can_be_pruned_right_after() -> None:
    model = SPEC.build()
    with pytest.raises(rw.BudgetError):
        rw.Pruner(model, rw.Budget(params=20), anneal_steps=10)
    model, pruner = gated(model=model)
    backward(model)
    pruner.step()


# once the model is gated

METHODS = {
    "flop-l0": {"anneal_steps": 10},
    "np-l0": {"anneal_steps": 10},
    "flop-agp": {"anneal_steps": 10},
    "agp": {"anneal_steps": 10},
}
LEARNED = [name for name in METHODS if name != "agp"]


def gated(method: str = "flop-l0", model: nn.Module | None = None) -> tuple[nn.Module, rw.Pruner]:
    model = SPEC.build() if model is None else model
    return model, rw.Pruner(model, BUDGET, method, **METHODS[method])


def backward(model: nn.Module) -> None:
    model(batch(SPEC)).square().mean().backward()
    model.zero_grad()


def gates(pruner: rw.Pruner) -> list[Tensor]:
    return [value.clone() for gate in pruner.controller.gates for value in gate.buffers()]


@pytest.mark.parametrize("method", METHODS)
def test_compact_before_any_step_is_refused(method: str) -> None:
    model, pruner = gated(method)
    with refused(model, rw.RankwiseError, r"`compact\(\)` needs gates that have learned .* no `pruner.step\(\)` was"):
        pruner.compact()


@pytest.mark.parametrize("method", LEARNED)
def test_a_step_without_a_gradient_is_refused(method: str) -> None:
    model, pruner = gated(method)
    with refused(model, rw.RankwiseError, r"`pruner.step\(\)` needs the gradient of the loss, but no gate has one."):
        pruner.step()
    assert pruner.steps == 0
    backward(model)
    pruner.step()
    with refused(model, rw.RankwiseError, r"Call `loss.backward\(\)` before it"):
        pruner.step()
    assert pruner.steps == 1


@pytest.mark.parametrize("method", LEARNED)
def test_a_step_in_evaluation_mode_is_refused(method: str) -> None:
    model, pruner = gated(method)
    model.eval()
    backward(model)
    with refused(model, rw.RankwiseError, "with the model in training mode."):
        pruner.step()
    assert pruner.steps == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_grad_scale_that_is_not_positive_is_refused(method: str, scale: float) -> None:
    model, pruner = gated(method)
    backward(model)
    with refused(model, ValueError, f"`grad_scale` must be positive, but is {scale} instead."):
        pruner.step(grad_scale=scale)
    assert pruner.steps == 0
    pruner.step()


@pytest.mark.parametrize("method", METHODS)
def test_a_second_pruner_is_refused(method: str) -> None:
    model, pruner = gated(method)
    for other in METHODS:
        with refused(model, rw.PlanError, "The model must not be gated yet, but is. Use the pruner that gated it"):
            rw.Pruner(model, BUDGET, other, anneal_steps=10)
    with refused(model, rw.PlanError, "The model must not be gated yet"):
        rw.compress(model, BUDGET)
    backward(model)
    pruner.step()


def test_another_budget_that_cannot_be_reached_is_refused() -> None:
    model, pruner = gated()
    backward(model)
    pruner.step()
    with refused(model, rw.BudgetError, "The budget must be at least"):
        pruner.compact(rw.Budget(params=1))
    with refused(model, rw.BudgetError, "The budget must be at least"):
        pruner.ranks(rw.Budget(params=1))


def test_a_state_of_another_run_is_refused() -> None:
    model, pruner = gated()
    _, other = gated("flop-agp")
    before = gates(pruner)
    with pytest.warns(UserWarning, match="other arguments"), pytest.raises(RuntimeError, match="alpha"):
        pruner.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(before, gates(pruner), strict=True))
    backward(model)
    pruner.step()
