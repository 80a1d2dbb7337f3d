"""The hard concrete distribution against its own samples, and gates as state that no optimizer can reach."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.core.gates import HardConcrete, HardConcreteGate, MagnitudeGate

alphas = st.floats(-8, 8)
distributions = st.builds(HardConcrete, temperature=st.floats(0.2, 3), stretch=st.floats(0.01, 0.5))
# every quantile once: sampling without sampling error
QUANTILES = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000


def samples(distribution: HardConcrete, alpha: float) -> torch.Tensor:
    return distribution.sample(torch.tensor(alpha, dtype=torch.float64), QUANTILES)


@given(distributions, alphas)
def test_open_probability_is_the_rate_of_open_samples(distribution: HardConcrete, alpha: float) -> None:
    p = distribution.open_probability(torch.tensor(alpha, dtype=torch.float64))
    assert abs(p - (samples(distribution, alpha) > 0).double().mean()) < 2e-5


@given(distributions, alphas)
def test_expected_gate_is_the_mean_of_samples(distribution: HardConcrete, alpha: float) -> None:
    mean = distribution.expected(torch.tensor([alpha], dtype=torch.float64))
    assert abs(mean - samples(distribution, alpha).mean()) < 2e-5


def test_expected_gate_agrees_with_random_sampling() -> None:
    distribution, alpha = HardConcrete(), torch.linspace(-4, 4, 9)
    noise = torch.rand(200_000, 9)
    error = distribution.sample(alpha, noise).mean(0) - distribution.expected(alpha)
    assert error.abs().max() < 5 * 0.5 / 200_000**0.5


@given(distributions, st.floats(0.001, 0.999))
def test_alpha_inverts_the_open_probability(distribution: HardConcrete, probability: float) -> None:
    alpha = torch.tensor(distribution.alpha(probability), dtype=torch.float64)
    assert abs(distribution.open_probability(alpha) - probability) < 1e-9


@given(distributions, alphas, st.floats(0.001, 5))
def test_a_larger_alpha_opens_every_sample_further(distribution: HardConcrete, alpha: float, more: float) -> None:
    assert (samples(distribution, alpha + more) >= samples(distribution, alpha)).all()


def test_samples_and_moments_have_the_right_gradients() -> None:
    distribution = HardConcrete()
    alpha = torch.linspace(-2, 2, 7, dtype=torch.float64, requires_grad=True)
    noise = torch.full((7,), 0.45, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: distribution.sample(a, noise), (alpha,))
    assert torch.autograd.gradcheck(distribution.open_probability, (alpha,))
    assert torch.autograd.gradcheck(distribution.expected, (alpha,))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_extreme_noise_gives_finite_gates_and_gradients(noise: float) -> None:
    alpha = torch.zeros(3, requires_grad=True)
    z = HardConcrete().sample(alpha, torch.full((3,), noise))
    z.sum().backward()
    assert torch.isfinite(z).all()
    assert torch.isfinite(alpha.grad).all()


@pytest.mark.parametrize("name", ["temperature", "stretch"])
@pytest.mark.parametrize("value", [0.0, -0.1, float("nan"), float("inf")])
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be positive and finite, but is {value}"):
        HardConcrete(**{name: value})


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, 2.0])
def test_an_impossible_start_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match=r"`open_probability` must lie in \(0, 1\)"):
        HardConcreteGate(3, open_probability=probability)


def test_a_gate_starts_with_the_probability_asked_for() -> None:
    gate = HardConcreteGate(5, open_probability=0.97)
    assert torch.allclose(gate.distribution.open_probability(gate.alpha), torch.tensor(0.97))


@pytest.mark.parametrize("gate", [HardConcreteGate(4), MagnitudeGate(4, learned=True)])
def test_no_optimizer_sees_a_gate(gate: torch.nn.Module) -> None:
    assert list(gate.parameters()) == []
    assert gate.z.is_leaf
    assert gate.z.requires_grad


def test_gate_state_stays_in_float32_when_the_model_is_cast() -> None:
    gate = HardConcreteGate(4).to(torch.bfloat16)
    assert gate.alpha.dtype == gate.z.dtype == torch.float32
    assert gate.z.is_leaf
    assert gate.z.requires_grad


def test_a_copied_gate_is_a_gate_of_its_own() -> None:
    gate = HardConcreteGate(4)
    other = copy.deepcopy(gate)
    with torch.no_grad():
        other.alpha.fill_(-9.0)
        other.z.fill_(0.0)
    assert (gate.alpha > 0).all()
    assert (gate.z == 1).all()
