"""AdamW that clips on the way: the weights and the state of PyTorch's own after `clip_grad_norm_`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rankwise.lab.kernels import adamw
from rankwise.lab.kernels.adamw import ClippedAdamW
from tests.lab.kernels.triton_cases import DEVICE, by_interpreter, kernels, run_by_interpreter

BETAS, DECAY = (0.9, 0.999), 0.1


@by_interpreter
def test_the_kernels_by_the_interpreter() -> None:
    run_by_interpreter(__file__)


@pytest.fixture(autouse=True)
def few_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "LARGE", 100)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 3), nn.Linear(3, 1)).to(DEVICE)


def ours(model: nn.Module, betas: tuple[float, float] = BETAS) -> ClippedAdamW:
    lr = torch.tensor(1e-2, device=DEVICE)
    return ClippedAdamW(model.parameters(), lr, betas=betas, weight_decay=DECAY)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=generator).to(p) * 10.0 ** (-i)
    # one that had no part in a step
    if seed % 3 == 1:
        list(model.parameters())[seed % 6].grad = None


def assert_same_weights(got: nn.Module, want: nn.Module, rtol: float = 2e-6) -> None:
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=1e-6)


@kernels
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("betas", [BETAS, (0.0, 0.95), (0.9, 0.99999)], ids=str)
def test_weights_are_those_of_torch_in_float64(clip: float | None, betas: tuple[float, float]) -> None:
    model = make_model()
    exact = copy.deepcopy(model).double()
    optimizer = ours(model, betas)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-2, betas=betas, weight_decay=DECAY)
    for step in range(12):
        give_gradients(model, step)
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        lr = 1e-2 / (1 + step)
        optimizer.param_groups[0]["lr"].fill_(lr)
        reference.param_groups[0]["lr"] = lr
        if clip is None:
            optimizer.step()
        else:
            norm = optimizer.clipped_step(clip)
            torch.testing.assert_close(
                norm.double(), nn.utils.clip_grad_norm_(exact.parameters(), clip), rtol=1e-6, atol=0
            )
        reference.step()
    assert_same_weights(model, exact)


@kernels
def test_it_goes_on_from_the_state_of_torch_and_torch_from_its() -> None:
    first, second = make_model(), make_model()
    lr = torch.tensor(1e-2, device=DEVICE)
    optimizers: list[torch.optim.AdamW] = [
        ours(first),
        torch.optim.AdamW(second.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY, fused=True, capturable=True),
    ]
    for step in range(6):
        if step == 3:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            assert states[0]["param_groups"] == states[1]["param_groups"]
            for index, values in states[0]["state"].items():
                assert values.keys() == states[1]["state"][index].keys()
                for key, value in values.items():
                    other: Tensor = states[1]["state"][index][key]
                    assert (value.dtype, value.device, value.shape) == (other.dtype, other.device, other.shape)
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict(state)
        for model, optimizer in zip((first, second), optimizers, strict=True):
            give_gradients(model, step)
            optimizer.step()
    assert_same_weights(first, second, rtol=1e-5)
