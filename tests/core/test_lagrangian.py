"""The Lagrangian: the penalty and the expected size against plain loops, and what each recipe does step by step."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.budget import CostCurve
from rankwise.core.controller import FlatLayout
from rankwise.core.lagrangian import OPEN_RANGE, ExpectedSize, Lagrangian, penalty

IGNORE_UNDECIDED = pytest.mark.filterwarnings("ignore:.* of the gates had not decided")


# the penalty


def test_the_penalty_has_the_right_gradients() -> None:
    gap, lambda_1, lambda_2 = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(penalty, (gap, lambda_1, lambda_2))
    assert torch.autograd.gradgradcheck(penalty, (gap, lambda_1, lambda_2))


@given(st.floats(-2, 2), st.floats(-50, 50), st.floats(0, 50))
def test_the_penalty_is_that_of_the_paper(gap: float, lambda_1: float, lambda_2: float) -> None:
    value = penalty(torch.tensor(gap, dtype=torch.float64), lambda_1, lambda_2)
    assert value.item() == pytest.approx(lambda_1 * gap + lambda_2 * gap * gap, abs=1e-9)


# the expected size

pairs = st.builds(
    CostCurve, num_components=st.integers(1, 12), per_component=st.integers(1, 40), cap=st.integers(1, 200)
)
pivots = st.builds(
    lambda rows, columns: CostCurve(min(rows, columns), rows + columns, rows * columns, pivot=True),
    st.integers(1, 12),
    st.integers(1, 12),
)
paying = st.builds(
    lambda curve, multiple, share: replace(curve, multiple=multiple, dense_from=max(1, int(share * curve.cap))),
    pairs | pivots,
    st.integers(1, 4),
    st.floats(0.3, 1),
)
"""With ranks in multiples, and dense from some share of the dense parameters on."""
curves_ = st.lists(pairs | pivots | paying, min_size=1, max_size=6)


def flat(curves: list[CostCurve], seed: int) -> Tensor:
    total = sum(curve.num_components for curve in curves)
    return torch.rand(total, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_size(curves: list[CostCurve], p: Tensor) -> Tensor:
    return ExpectedSize(curves, FlatLayout([curve.num_components for curve in curves]))(p)


@given(curves_, st.integers(0, 10**6))
def test_the_expected_size_is_the_cost_of_the_expected_ranks(curves: list[CostCurve], seed: int) -> None:
    """The oracle: one matrix after the other."""
    p = flat(curves, seed)
    size = 0.0
    for curve, part in zip(curves, p.split([c.num_components for c in curves]), strict=True):
        rank = float(part.sum())
        low_rank = rank * (curve.per_component - rank * curve.pivot)
        size += low_rank if low_rank < curve.threshold else curve.cap
    assert float(expected_size(curves, p)) == pytest.approx(size)


@given(curves_, st.integers(0, 10**6))
def test_every_component_pulls_with_its_cost_even_where_its_matrix_is_capped(
    curves: list[CostCurve], seed: int
) -> None:
    p = flat(curves, seed).requires_grad_()
    (grad,) = torch.autograd.grad(expected_size(curves, p), p)
    want = []
    for curve, part in zip(curves, p.detach().split([c.num_components for c in curves]), strict=True):
        # in the pivot layout the more components there are, the less each costs; never nothing
        cost = curve.per_component - float(part.sum()) * curve.pivot
        assert cost >= curve.per_component / 2
        want += [cost] * len(part)
    assert grad.tolist() == pytest.approx(want)


@given(curves_, st.integers(0, 10**6))
def test_with_decided_gates_the_expected_size_is_the_exported_one(curves: list[CostCurve], seed: int) -> None:
    p = (flat(curves, seed) > 0.5).double()
    counts = [int(part.sum()) for part in p.split([c.num_components for c in curves])]
    assert float(expected_size(curves, p)) == sum(c(k) for c, k in zip(curves, counts, strict=True))


# runs


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8))


def gated(removed: float = 0.5, **settings: Any) -> tuple[nn.Sequential, rw.Pruner]:
    model = make()
    return model, rw.Pruner(model, rw.Budget(removed=removed), **{"anneal_steps": 8, "gate_lr": 4.0, **settings})


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    (model(x).square().mean() * scale).backward()


def train(model: nn.Module, pruner: rw.Pruner, steps: int, lr: float = 0.1, scale: float = 1.0) -> None:
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, pruner.steps, scale)
        optimizer.step()
        pruner.step()


def masks(pruner: rw.Pruner) -> Tensor:
    return torch.cat([gate.z.detach() for gate in pruner.controller.gates])


def chosen(pruner: rw.Pruner) -> Tensor:
    """What an export keeps, as a mask."""
    kept = zip(pruner.controller.gates, pruner.controller.kept_components(pruner.limit), strict=True)
    return torch.cat([torch.zeros(gate.num_components).index_fill(0, index, 1.0) for gate, index in kept])


def test_the_expected_size_of_a_fresh_model_is_that_of_the_dense_one() -> None:
    _, pruner = gated()
    assert pruner.size().expected == pytest.approx(pruner.account.dense, rel=1e-3)


@IGNORE_UNDECIDED
@pytest.mark.parametrize(
    "settings, power",
    [
        ({}, 3),
        ({"schedule": "linear"}, 1),
        ({"recipe": "published"}, 1),
        ({"recipe": "published", "schedule": "cubic"}, 3),
    ],
)
def test_the_target_falls_to_the_limit(settings: dict[str, Any], power: int) -> None:
    """Linearly as in the paper, or fast at first: what is left to remove is the cube of what is left of the ramp."""
    model, pruner = gated(anneal_steps=8, **settings)
    dense, limit = pruner.account.dense, pruner.limit
    for step in range(12):
        left = max(1 - step / 8, 0) ** power
        assert pruner.controller.target_size() == pytest.approx(limit + (dense - limit) * left, abs=0.5)
        assert pruner.controller.target_size() >= limit
        train(model, pruner, 1)


@pytest.mark.parametrize("recipe", ["committed", "published"])
def test_gates_follow_the_gradient_of_loss_and_penalty(recipe: Any) -> None:
    """The oracle: the whole objective as one function of alpha. Adam's first moment tells the gradient it was given."""
    model = nn.Linear(6, 6, bias=False).double()
    pruner = rw.Pruner(model, rw.Budget(removed=0.6), anneal_steps=10, recipe=recipe, open_probability=0.6)
    controller, x = pruner.controller, torch.randn(9, 6, dtype=torch.float64)
    (matrix,) = controller.matrices
    for step in range(4):
        controller.multipliers.copy_(torch.tensor([0.7, 1.3]))
        alpha = controller.alpha().double().requires_grad_()
        z = controller.distribution.sample(alpha, controller.noise().double())
        assert torch.allclose(z.float(), masks(pruner)) or step == 0
        p_open = controller.distribution.open_probability(alpha)
        # 12 parameters a component; the cap of 36 holds from an expected rank of 3
        size = 12 * p_open.sum()
        size = size - (size - size.clamp(max=36)).detach()
        gap = (size - controller.target_size()) / 36
        lambda_2 = 10 * 1000 ** (step / 10) if recipe == "committed" else 1.3
        loss = (x @ matrix.q.detach().t() * z @ matrix.p.detach().t()).square().sum()
        (want,) = torch.autograd.grad(loss + 0.7 * gap + lambda_2 * gap**2, alpha)

        before = controller.moments[0].clone()
        model(x).square().sum().backward()
        pruner.step()
        got = (controller.moments[0] - 0.9 * before) / 0.1
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("recipe", ["committed", "published"])
@pytest.mark.parametrize("alpha, sign", [(6.0, 1), (-6.0, -1)])
def test_the_multiplier_ascends_with_the_sign_of_the_violation(recipe: Any, alpha: float, sign: int) -> None:
    """Too large a model makes size dearer, too small a one cheaper."""
    model, pruner = gated(0.5, recipe=recipe, anneal_steps=1000, gate_lr=0.05)
    train(model, pruner, 1)
    pruner.controller.steps.fill_(500)
    pruner.controller.invalidate_masks()
    for gate in pruner.controller.gates:
        gate.alpha.fill_(alpha)
    pruner.controller.multiplier_moments.zero_()
    before = pruner.controller.multipliers.clone()
    assert sign * (pruner.size().expected - pruner.controller.target_size()) > 0
    train(model, pruner, 1)
    moved = pruner.controller.multipliers - before
    assert sign * moved[0] > 0
    assert moved[1] > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_multiplier_pushes_the_gates_its_way(sign: int) -> None:
    """A loss without slope leaves the penalty alone at work."""
    model, pruner = gated(0.5, recipe="published", anneal_steps=1000, gate_lr=0.1, open_probability=0.9)
    pruner.controller.multipliers[0] = sign * 100.0
    before = pruner.controller.alpha()
    train(model, pruner, 1, scale=0.0)
    assert (sign * (pruner.controller.alpha() - before) < 0).all()


def test_noise_is_a_function_of_seed_and_step() -> None:
    def noise(seed: int, step: int) -> Tensor:
        torch.manual_seed(torch.seed())
        torch.rand(7)
        _, pruner = gated(seed=seed)
        pruner.controller.steps.fill_(step)
        pruner.controller.invalidate_masks()
        return pruner.controller.noise()

    assert torch.equal(noise(3, 5), noise(3, 5))
    for other in (noise(3, 6), noise(4, 5), noise(3, 0)):
        assert not torch.isclose(noise(3, 5), other).any()


def test_noise_is_independent_of_what_happened_before() -> None:
    model, pruner = gated(open_probability=0.5)
    torch.manual_seed(1)
    train(model, pruner, 3)
    other, twin = gated(open_probability=0.5)
    torch.manual_seed(2)
    train(other, twin, 3, lr=0.0, scale=7.0)
    assert torch.equal(pruner.controller.noise(), twin.controller.noise())


def test_drawing_masks_leaves_the_global_generator_alone() -> None:
    model, pruner = gated()
    state = torch.get_rng_state()
    backward(model)
    pruner.step()
    assert torch.equal(torch.get_rng_state(), state)


# the committed recipe


@IGNORE_UNDECIDED
def test_until_the_ramp_ends_masks_are_drawn_every_step() -> None:
    model, pruner = gated(anneal_steps=6, open_probability=0.5)
    seen = []
    for _ in range(6):
        train(model, pruner, 1)
        if pruner.steps < 6:
            controller = pruner.controller
            assert torch.equal(masks(pruner), controller.distribution.sample(controller.alpha(), controller.noise()))
            assert all(gate.z.requires_grad for gate in controller.gates)
            seen.append(masks(pruner))
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    assert any(((z > 0) & (z < 1)).any() for z in seen)


@IGNORE_UNDECIDED
def test_after_the_ramp_exactly_the_exported_model_is_trained() -> None:
    model, pruner = gated(anneal_steps=6)
    train(model, pruner, 6)
    z, alpha, multipliers = masks(pruner), pruner.controller.alpha(), pruner.controller.multipliers.clone()
    assert set(z.tolist()) == {0.0, 1.0}
    assert pruner.size().expected == pruner.size().exported <= pruner.limit
    x = torch.randn(5, 8)
    for _ in range(5):
        assert not any(gate.z.requires_grad for gate in pruner.controller.gates)
        assert torch.equal(chosen(pruner), z)
        small = pruner.compact()
        in_training = model.train()(x)
        torch.testing.assert_close(small(x), in_training)
        torch.testing.assert_close(model.eval()(x), in_training)
        model.train()
        train(model, pruner, 1)
        assert torch.equal(masks(pruner), z)
        assert torch.equal(pruner.controller.alpha(), alpha)
        assert torch.equal(pruner.controller.multipliers, multipliers)


@IGNORE_UNDECIDED
def test_what_was_committed_to_outlives_every_change_of_the_weights() -> None:
    """Gates that the loss cannot tell apart are told apart by what their components weigh, at one moment only."""
    model, pruner = gated(anneal_steps=6)
    train(model, pruner, 6, lr=0.0, scale=0.0)
    z = masks(pruner)
    with torch.no_grad():
        for matrix in pruner.controller.matrices:
            matrix.p.mul_(torch.linspace(0.001, 1000, matrix.p.shape[1]))
    x = torch.randn(5, 8)
    in_training = model.train()(x)
    assert torch.equal(chosen(pruner), z)
    torch.testing.assert_close(model.eval()(x), in_training)
    torch.testing.assert_close(pruner.compact()(x), in_training)


@IGNORE_UNDECIDED
def test_a_resumed_run_keeps_what_was_committed_to() -> None:
    model, pruner = gated(anneal_steps=6)
    train(model, pruner, 6, lr=0.0, scale=0.0)
    with torch.no_grad():
        for matrix in pruner.controller.matrices:
            matrix.p.mul_(torch.linspace(0.001, 1000, matrix.p.shape[1]))
    resumed, other = gated(anneal_steps=6)
    resumed.load_state_dict(model.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(resumed(x), model(x))
    assert torch.equal(masks(other), masks(pruner))


@IGNORE_UNDECIDED
@pytest.mark.parametrize("scale", [1e6, -1e6])
def test_alpha_stays_in_its_range(scale: float) -> None:
    """Whatever the loss says; what parts ties at the end of the ramp is next to nothing."""
    for start in (0.5, 0.9999):
        model, pruner = gated(anneal_steps=6, gate_lr=50.0, open_probability=start)
        distribution = pruner.controller.distribution
        low, high = (distribution.alpha(p) for p in (OPEN_RANGE[0], max(OPEN_RANGE[1], start)))
        for _ in range(8):
            train(model, pruner, 1, lr=0.0, scale=scale)
            alpha = pruner.controller.alpha()
            assert (alpha > low - 0.002).all()
            assert (alpha < high + 0.002).all()
        assert min((alpha - low).abs().min(), (alpha - high).abs().min()) < 0.002


def at_the_end_of_the_ramp(open_probability: Tensor) -> nn.Module:
    """A model whose gates are open with these probabilities as the ramp ends."""
    model, pruner = gated(anneal_steps=6)
    for gate in pruner.controller.gates:
        gate.alpha.copy_(torch.tensor([gate.distribution.alpha(p) for p in open_probability.tolist()]))
    pruner.controller.steps.fill_(6)
    pruner.controller.invalidate_masks()
    return model


def test_undecided_gates_warn_at_the_end_of_the_ramp() -> None:
    model = at_the_end_of_the_ramp(torch.tensor([0.99, 0.99, 0.9, 0.5, 0.1, 0.01, 0.01, 0.01]))
    with pytest.warns(UserWarning, match="38% of the gates had not decided .* Raise `anneal_steps` or `gate_lr`."):
        backward(model)


def test_decided_gates_do_not_warn() -> None:
    model = at_the_end_of_the_ramp(torch.tensor([0.99, 0.99, 0.99, 0.5, 0.01, 0.01, 0.01, 0.01]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model)


# the published recipe


def test_the_published_recipe_moves_both_multipliers_and_never_commits() -> None:
    model, pruner = gated(anneal_steps=4, recipe="published")
    train(model, pruner, 4)
    for _ in range(6):
        controller = pruner.controller
        alpha, multipliers = controller.alpha(), controller.multipliers.clone()
        train(model, pruner, 1)
        assert (controller.multipliers != multipliers).all()
        assert not torch.equal(controller.alpha(), alpha)
        assert torch.equal(masks(pruner), controller.distribution.sample(controller.alpha(), controller.noise()))
        assert all(gate.z.requires_grad for gate in controller.gates)
    assert pruner.controller.multipliers[1] > 0
    assert rw.count(pruner.compact()) <= pruner.limit


# settings


def test_gates_that_cannot_travel_far_enough_warn() -> None:
    message = r"gates cannot decide: `gate_lr` \(0.1\) times `anneal_steps` \(100\) should be at least 15"
    with pytest.warns(UserWarning, match=message):
        Lagrangian(anneal_steps=100, gate_lr=0.1)
    with pytest.warns(UserWarning, match=message) as caught:
        rw.Pruner(make(), rw.Budget(removed=0.5), anneal_steps=100, gate_lr=0.1)
    assert len(caught) == 1


@given(st.integers(1, 10**6))
def test_the_default_learning_rate_lets_gates_decide_on_every_ramp(anneal_steps: int) -> None:
    settings = Lagrangian(anneal_steps=anneal_steps)
    assert settings.alpha_lr * anneal_steps == pytest.approx(50)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"anneal_steps": 0}, "`anneal_steps` must be a whole number of at least 1, but is 0 instead."),
        ({"anneal_steps": -5}, "`anneal_steps` must be a whole number of at least 1, but is -5 instead."),
        ({"gate_lr": -0.1}, "`gate_lr` must be positive.*, but is -0.1 instead."),
        ({"gate_lr": 0.0}, "`gate_lr` must be positive.*, but is 0.0 instead."),
        ({"gate_lr": float("nan")}, "`gate_lr` must be positive.*, but is nan instead."),
        ({"gate_lr": float("inf")}, "`gate_lr` must be positive.*, but is inf instead."),
        ({"anneal_steps": float("nan")}, "`anneal_steps` must be .*, but is nan instead."),
        ({"multiplier_lr": -1e-2}, "`multiplier_lr` must be positive.*, but is -0.01 instead."),
        ({"recipe": "publish"}, '`recipe` must be "committed" or "published", but is \'publish\' instead.'),
        ({"open_probability": 0.0}, r"`open_probability` must lie in \(0, 1\), but is 0.0 instead."),
        ({"open_probability": 1.0}, r"`open_probability` must lie in \(0, 1\), but is 1.0 instead."),
        ({"temperature": 0.0}, "`temperature` must be positive and finite, but is 0.0 instead."),
        ({"stretch": -0.1}, "`stretch` must be positive and finite, but is -0.1 instead."),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lagrangian(**{"anneal_steps": 1000, **settings})
    with pytest.raises(ValueError, match=message):
        rw.Pruner(make(), rw.Budget(removed=0.5), **{"anneal_steps": 1000, **settings})


@pytest.mark.parametrize("recipe", ["committed", "published"])
@given(seed=st.integers(0, 100), gate_lr=st.floats(0.02, 2.0))
def test_no_more_components_open_than_the_bound(recipe: Any, seed: int, gate_lr: float) -> None:
    """On a GPU the next step multiplies by so many, and nobody counts again."""
    model, pruner = gated(recipe=recipe, anneal_steps=1000, gate_lr=gate_lr, open_probability=0.5, seed=seed)
    controller = pruner.controller
    train(model, pruner, 1)
    for _ in range(6):
        bound = controller.bound_open_counts(controller.alpha())
        # gradients that change their sign and size as they can
        train(model, pruner, 1, scale=10.0 ** torch.randint(-3, 4, ()).item())
        assert bound.step == pruner.steps
        opened = torch.tensor([int((gate.z != 0).sum()) for gate in controller.gates])
        assert (opened <= bound.num_open).all()
