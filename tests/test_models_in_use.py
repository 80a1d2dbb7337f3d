"""Models as they are met: with hooks and states, averaged, wrapped, half frozen, and exported in bytes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rankwise as rw
from rankwise.deploy.quantize import int8
from rankwise.modules import LowRankLinear
from tests.models import Spec, batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* of the gates had not decided"),
    pytest.mark.filterwarnings("ignore:This processor has no instructions for int8"),
]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def train(model: nn.Module, pruner: rw.Pruner, x: Tensor, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(pruner.weight_parameters(), lr=0.1)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def test_hooks_hang_on_gated_and_on_compact_layers() -> None:
    model, x = two_layers(), torch.randn(5, 16)
    seen: list[str] = []
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(type(module).__name__))
    expected = model(x).detach()
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), "fac")
    small = pruner.compact()
    assert not torch.allclose(expected, model[2](model[1](model[0].forward(x))), atol=1e-4)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    small(x).sum().backward()
    assert seen == ["GatedLinear", type(small[2]).__name__]


def test_hooks_hang_on_int8_layers() -> None:
    model, x = two_layers(), torch.randn(5, 16)
    plain = int8(model)(x)
    model[2].register_forward_hook(lambda module, inputs, output: output * 2)
    torch.testing.assert_close(int8(model)(x), 2 * plain)


class Stateful(nn.Module):
    """Keeps its state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.output = nn.Linear(16, 16)
        self.state: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x) + sum(state.detach() for state in self.state))
        self.state = (h,)
        y: Tensor = self.output(h)
        return y


def test_a_model_that_keeps_what_it_computed_is_copied() -> None:
    model, x = Stateful(), torch.randn(5, 16)
    model(x)
    assert rw.count(rw.compress(model, rw.Budget(removed=0.4))) <= 0.6 * rw.count(model)
    int8(model)
    pruner = rw.Pruner(model, rw.Budget(removed=0.4), anneal_steps=4, gate_lr=5.0)
    train(model, pruner, x)
    small = pruner.compact()
    assert isinstance(small, Stateful)
    torch.testing.assert_close(small.state[0], model.state[0].detach())


def test_an_average_of_the_latest_weights_computes_what_the_model_computes() -> None:
    model, x = two_layers(), torch.randn(5, 16)
    pruner = rw.Pruner(model, rw.Budget(removed=0.6), anneal_steps=6, gate_lr=5.0)
    average = AveragedModel(model, avg_fn=lambda averaged, latest, number: latest)
    for steps in (3, 5):
        train(model, pruner, x, steps)
        average.update_parameters(model)
        model.eval()
        average.eval()
        torch.testing.assert_close(average(x), model(x), rtol=0, atol=0)
        model.train()


def test_an_average_of_step_counts_is_refused() -> None:
    model, x = two_layers(), torch.randn(5, 16)
    pruner = rw.Pruner(model, rw.Budget(removed=0.6), anneal_steps=6, gate_lr=5.0)
    train(model, pruner, x, 2)
    with pytest.raises(rw.RankwiseError, match="`AveragedModel\\(use_buffers=True\\)` takes the mean of step counts"):
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    copied = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, pruner, x, 2)
    copied.update_parameters(model)
    copied.eval()
    assert [int(part.steps) for part in copied.modules() if hasattr(part, "steps")] == [pruner.steps]


class Tied(nn.Module):
    """A table of words that reads twice and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Embedding(30, 16), nn.Embedding(30, 16), nn.Linear(16, 30)
        self.second.weight = self.head.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.first(tokens) + self.second(tokens.flip(0)))
        return logits


@pytest.mark.parametrize("layout", ["pair", "pivot"])
def test_a_tied_compact_model_can_be_called_with_other_weights(layout: Literal["pair", "pivot"]) -> None:
    small, tokens = rw.compress(Tied(), rw.Budget(removed=0.35), embeddings=True, layout=layout), torch.arange(30)
    expected = small(tokens)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in small.named_parameters()}
    assert not functional_call(small, zeros, (tokens,)).any()
    assert torch.equal(small(tokens), expected)


def test_a_tied_model_of_low_rank_can_be_called_with_other_weights() -> None:
    spec = Spec(back="low-rank")
    model, tokens = spec.build(), batch(spec)
    expected = model(tokens)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert not functional_call(model, zeros, (tokens,)).any()
    assert torch.equal(model(tokens), expected)


def test_a_model_that_is_wrapped_already_is_refused() -> None:
    wrapped = nn.Sequential(nn.DataParallel(two_layers()))
    with pytest.raises(rw.PlanError, match="must be gated before it is wrapped .* but 0 is a DataParallel. Pass the"):
        rw.Pruner(wrapped, rw.Budget(removed=0.5), "fac")
    with pytest.raises(rw.PlanError, match="must be gated before"):
        rw.compress(wrapped, rw.Budget(removed=0.5))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_half_frozen_pair_is_left_out_where_components_have_a_part_in_both(frozen: int) -> None:
    def build() -> nn.Sequential:
        halves = LowRankLinear(nn.Linear(16, 8, bias=False), nn.Linear(8, 16))
        halves[frozen].weight.requires_grad_(False)
        return nn.Sequential(halves, nn.Tanh(), nn.Linear(16, 16))

    with pytest.warns(UserWarning, match=r"leaves out 50.0% of the parameters: 0 \(one of its two layers is frozen"):
        pruner = rw.Pruner(build(), rw.Budget(removed=0.2), "fac")
    assert [site.name for site in pruner.plan.sites] == ["2"]
    assert any(left.name == "0" and "one of its two layers is frozen" in left.reason for left in pruner.plan.left_out)
    whole = rw.Pruner(build(), rw.Budget(removed=0.2), "agp", anneal_steps=4)
    flags = {
        site.name: parameter.requires_grad for site in whole.plan.sites for parameter in _weights(whole, site.name)
    }
    assert flags == {"0.0": frozen != 0, "0.1": frozen != 1, "2": True}


def _weights(pruner: rw.Pruner, name: str) -> list[nn.Parameter]:
    matrix = pruner.model.get_submodule(f"{name}.matrix")
    return [p for p in matrix.parameters() if p.dim() == 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("export", [None, torch.float16])
def test_another_budget_in_bytes_is_met_in_the_bytes_of_the_export(
    dtype: torch.dtype, export: torch.dtype | None
) -> None:
    model = Spec().build().to(dtype)
    pruner = rw.Pruner(model, rw.Budget(removed=0.2), "flop-l0", anneal_steps=2, gate_lr=20.0)
    model(batch(Spec())).float().square().mean().backward()
    pruner.step()
    whole = rw.count(Spec().build()) * (export or dtype).itemsize
    budget = rw.Budget(megabytes=0.7 * whole / 1e6, dtype=export)
    # 30% of the bytes, half way to 20% of the parameters
    with pytest.warns(UserWarning, match="the ramp has not ended: after 1 of 2 steps"):
        small = pruner.compact(budget)
    saved = sum(t.numel() * t.element_size() for t in {id(t): t for t in small.state_dict().values()}.values())
    assert 0.5 * whole < saved <= 0.7 * whole
    assert {p.dtype for p in small.parameters()} == {export or dtype}


def test_bytes_of_a_method_that_keeps_shapes_are_refused_at_the_export_too() -> None:
    pruner = rw.Pruner(Spec().build(), rw.Budget(removed=0.2), "agp", anneal_steps=2)
    with pytest.raises(rw.BudgetError, match="`megabytes` needs matrices that shrink"):
        pruner.ranks(rw.Budget(megabytes=0.001))
