"""Gradual magnitude pruning: what is closed when, and the learned diagonal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.magnitude import GradualPruning
from rankwise.core.optim import cubic

METHODS = ["agp", "flop-agp"]


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 10))


def gated(method: str, removed: float = 0.5, **settings: Any) -> tuple[nn.Sequential, rw.Pruner]:
    model = make()
    settings = {"anneal_steps": 10, "mask_every": 3, **settings}
    return model, rw.Pruner(model, rw.Budget(removed=removed, of="prunable"), method, **settings)


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(seed))
    (model(x).square().mean() * scale).backward()


def train(model: nn.Module, pruner: rw.Pruner, steps: int, lr: float = 0.1, scale: float = 1.0) -> list[Tensor]:
    """The masks after each step."""
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=lr)
    masks = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, scale)
        optimizer.step()
        pruner.step()
        masks.append(kept(pruner))
    return masks


def kept(pruner: rw.Pruner) -> Tensor:
    return torch.cat([gate.kept for gate in pruner.controller.gates])


def diagonal(pruner: rw.Pruner) -> Tensor:
    return torch.cat([gate.diagonal for gate in pruner.controller.gates])


def test_agp_keeps_exactly_the_largest_weights_of_each_matrix() -> None:
    model, pruner = gated("agp")
    train(model, pruner, 12, lr=0.0)
    for layer in (model[0], model[2], model[4]):
        weight, mask = layer.matrix.w.detach().abs().flatten(), layer.matrix.gate.kept
        assert 0 < mask.sum() < mask.numel()
        assert weight[mask].min() > weight[~mask].max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("removed", [0.3, 0.8])
def test_every_matrix_keeps_the_same_fraction(method: str, removed: float) -> None:
    model, pruner = gated(method, removed)
    train(model, pruner, 12)
    matrices = zip(pruner.account.curves, pruner.controller.gates, strict=True)
    # beyond the cap components are free: such a matrix keeps all
    shrunk = [(curve, gate) for curve, gate in matrices if curve(int(gate.kept.sum())) < curve.cap]
    assert shrunk
    fractions = [float(gate.kept.double().mean()) for _, gate in shrunk]
    assert max(fractions) - min(fractions) <= max(1 / curve.num_components for curve, _ in shrunk) + 1e-9
    if method == "agp":
        assert fractions == pytest.approx([1 - removed] * 3, abs=0.02)
        assert kept(pruner).sum() == pruner.limit - pruner.account.fixed


def test_flop_agp_weighs_a_component_with_its_diagonal() -> None:
    """A small diagonal closes a heavy component, a negative one is as good as its size."""
    model, pruner = gated("flop-agp", 0.6, anneal_steps=2, mask_every=100, diagonal_lr=0.0)
    for gate in pruner.controller.gates:
        gate.diagonal.copy_(torch.linspace(0.01, -5, gate.num_components))
    train(model, pruner, 2, lr=0.0)
    for matrix in pruner.controller.matrices:
        gate, weight = matrix.gate, matrix.magnitudes() * matrix.gate.diagonal.abs()
        assert 0 < gate.kept.sum() < gate.num_components
        assert weight[gate.kept].min() > weight[~gate.kept].max()
        assert matrix.magnitudes()[gate.kept].min() < matrix.magnitudes()[~gate.kept].max()


@pytest.mark.parametrize("method", METHODS)
def test_the_mask_is_chosen_every_so_often_and_at_the_end_of_the_ramp(method: str) -> None:
    model, pruner = gated(method, 0.7, anneal_steps=9, mask_every=5)
    masks = [kept(pruner), *train(model, pruner, 16)]
    changed = [step for step in range(1, 17) if not torch.equal(masks[step], masks[step - 1])]
    assert changed == [5, 9]
    assert masks[0].all()


@pytest.mark.parametrize("method", METHODS)
def test_the_mask_follows_the_cubic_target(method: str) -> None:
    model, pruner = gated(method, 0.7, anneal_steps=10, mask_every=1)
    for step in range(1, 13):
        train(model, pruner, 1)
        account, limit = pruner.account, pruner.limit
        target = account.dense + (limit - account.dense) * cubic(step, 10)
        assert pruner.controller.target_size() == max(limit, round(target))
        size = pruner.size().expected
        steps = [
            curve(int(gate.kept.sum()) + 1) - curve(int(gate.kept.sum()))
            for curve, gate in zip(account.curves, pruner.controller.gates, strict=True)
            if not gate.kept.all()
        ]
        assert size <= pruner.controller.target_size() < size + min(steps)


@pytest.mark.parametrize("method", METHODS)
def test_closed_components_stay_behind_the_open_ones(method: str) -> None:
    """Whatever their weights: one returns only if its matrix may keep more, and after the ramp none does."""
    model, pruner = gated(method, 0.7, anneal_steps=10, mask_every=2)
    gates = pruner.controller.gates
    before = [gate.kept.clone() for gate in gates]
    for step in range(1, 17):
        train(model, pruner, 1, lr=0.0)
        for gate, matrix, old in zip(gates, pruner.controller.matrices, before, strict=True):
            opened, closed = gate.kept & ~old, old & ~gate.kept
            assert not (opened.any() and closed.any())
            assert not opened.any() or step <= 10
            with torch.no_grad():
                parameter = matrix.w.view(1, -1) if method == "agp" else matrix.p
                parameter.copy_(torch.where(gate.kept, 0.3 * parameter, 100.0))
        before = [gate.kept.clone() for gate in gates]
    assert not all(kept.all() for kept in before)


@pytest.mark.parametrize("method", METHODS)
def test_the_exported_components_are_those_that_were_trained(method: str) -> None:
    model, pruner = gated(method, 0.6)
    train(model, pruner, 20, lr=0.5)
    chosen = torch.cat(
        [
            torch.zeros(gate.num_components, dtype=torch.bool).index_fill(0, index, True)
            for gate, index in zip(
                pruner.controller.gates, pruner.controller.kept_components(pruner.limit), strict=True
            )
        ]
    )
    assert torch.equal(chosen, kept(pruner))
    x = torch.randn(8, 10)
    torch.testing.assert_close(pruner.compact()(x), model(x))


def test_masked_weights_stay_masked_and_get_no_gradient() -> None:
    model, pruner = gated("agp")
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for step in range(16):
        optimizer.zero_grad()
        backward(model, step)
        for layer in (model[0], model[2], model[4]):
            mask = layer.matrix.gate.kept.view(layer.matrix.shape)
            assert (layer.weight[~mask] == 0).all()
            assert (layer.matrix.w.grad[~mask] == 0).all()
            assert (layer.matrix.w.grad[mask] != 0).any()
        optimizer.step()
        pruner.step()
    assert not kept(pruner).all()


def test_closed_components_get_no_gradient() -> None:
    model, pruner = gated("flop-agp", 0.6)
    train(model, pruner, 12)
    model.zero_grad()
    backward(model)
    for matrix in pruner.controller.matrices:
        mask = matrix.gate.kept
        assert not mask.all()
        assert (matrix.p.grad[:, ~mask] == 0).all()
        assert (matrix.q.grad[~mask] == 0).all()
        assert (matrix.p.grad[:, mask] != 0).any()


# the learned diagonal


def test_the_diagonal_takes_adam_steps_down_the_loss() -> None:
    """`torch.optim.Adam` is the oracle."""
    model, pruner = gated("flop-agp", anneal_steps=100, mask_every=100, diagonal_lr=0.01)
    twin = diagonal(pruner).clone().requires_grad_()
    adam = torch.optim.Adam([twin], lr=0.01)
    for step in range(5):
        backward(model, step)
        twin.grad = torch.cat([gate.z.grad for gate in pruner.controller.gates]).clone()
        adam.step()
        pruner.step()
        model.zero_grad()
        torch.testing.assert_close(diagonal(pruner), twin.detach(), rtol=1e-5, atol=1e-7)
    assert (diagonal(pruner) != 1).all()


def test_a_gate_lets_through_the_diagonal_where_it_is_kept() -> None:
    model, pruner = gated("flop-agp", 0.6, diagonal_lr=0.05)
    train(model, pruner, 12)
    for gate in pruner.controller.gates:
        assert torch.equal(gate.z.detach(), gate.diagonal * gate.kept)
    assert (diagonal(pruner)[kept(pruner)] != 1).all()


@pytest.mark.parametrize("l1", [0.0, 1e-2])
def test_the_diagonal_of_a_closed_component_stands_still(l1: float) -> None:
    """So that an export at a larger budget finds it as it was closed."""
    model, pruner = gated("flop-agp", 0.6, diagonal_lr=0.05, mask_every=2, l1=l1)
    for _ in range(14):
        before, closed = diagonal(pruner).clone(), ~kept(pruner)
        train(model, pruner, 1)
        assert torch.equal(diagonal(pruner)[closed], before[closed])
    assert closed.any()


def test_l1_shrinks_the_diagonal_during_the_ramp_only() -> None:
    """A loss without slope leaves l1 alone at work; after the ramp Adam's momentum dies out undisturbed."""
    model, pruner = gated("flop-agp", 0.3, anneal_steps=6, l1=0.1, diagonal_lr=0.01)
    moments = pruner.controller.moments
    for _ in range(6):
        before = diagonal(pruner).clone()
        train(model, pruner, 1, scale=0.0)
        open_ = kept(pruner)
        assert (diagonal(pruner)[open_] < before[open_]).all()
    for _ in range(3):
        momentum = moments[0].clone()
        train(model, pruner, 1, scale=0.0)
        torch.testing.assert_close(moments[0][open_], 0.9 * momentum[open_])


def test_l1_draws_a_negative_diagonal_up() -> None:
    model, pruner = gated("flop-agp", 0.3, anneal_steps=6, l1=0.1, diagonal_lr=0.01)
    for gate in pruner.controller.gates:
        gate.diagonal.fill_(-1.0)
    train(model, pruner, 1, scale=0.0)
    assert (diagonal(pruner) > -1).all()


def test_without_l1_and_slope_the_diagonal_stays_one() -> None:
    model, pruner = gated("flop-agp", 0.3)
    train(model, pruner, 4, scale=0.0)
    assert (diagonal(pruner) == 1).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_ramp_of_no_steps_prunes_at_once(method: str) -> None:
    model, pruner = gated(method, 0.6, anneal_steps=0)
    backward(model)
    assert pruner.size().expected <= pruner.limit


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"anneal_steps": -1}, "`anneal_steps` must be at least 0 and finite, but is -1 instead."),
        ({"anneal_steps": 5, "mask_every": 0}, "`mask_every` must be at least 1 and finite, but is 0 instead."),
        ({"anneal_steps": 5, "diagonal_lr": -0.1}, "`diagonal_lr` must be at least 0 and finite, but is -0.1 instead."),
        ({"anneal_steps": 5, "l1": -1e-3}, "`l1` must be at least 0 and finite, but is -0.001 instead."),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradualPruning(**settings)
    for method in METHODS:
        with pytest.raises(ValueError, match=message):
            rw.Pruner(make(), rw.Budget(removed=0.5), method, **settings)
