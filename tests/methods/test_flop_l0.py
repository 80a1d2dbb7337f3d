"""FLOP-L0 from end to end: the gates find the components that the data need."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.core.matrices import FactorizedMatrix


@pytest.mark.parametrize("recipe", ["committed", "published"])
def test_the_components_that_matter_are_found(recipe: Any) -> None:
    """A matrix of k components that the data need and n - k larger ones that the data never touch.

    What a component weighs says the opposite of what it is worth, so only the loss can tell which to keep.
    """
    n, k = 16, 4
    left, right = (torch.linalg.qr(torch.randn(n, n)).Q for _ in range(2))
    values = torch.full((n,), 5.0)
    values[:k] = 1.0
    model = nn.Linear(n, n, bias=False)
    with torch.no_grad():
        model.weight.copy_(left * values @ right.t())
    teacher = model.weight.detach().clone()
    budget = rw.Budget(params=k * 2 * n)
    x = torch.randn(64, n) @ right[:, :k] @ right[:, :k].t()
    wrong = rw.compress(model, budget)
    assert (wrong(x) - x @ teacher.t()).square().mean() > 0.5 * (x @ teacher.t()).square().mean()

    lr = {} if recipe == "committed" else {"multiplier_lr": 1.0}
    pruner = rw.Pruner(model, budget, anneal_steps=150, recipe=recipe, **lr)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=1e-3)
    for _ in range(250):
        optimizer.zero_grad()
        (20 * (model(x) - x @ teacher.t()).square().mean()).backward()
        optimizer.step()
        pruner.step()
    small = pruner.compact()
    assert rw.count(small) == k * 2 * n
    assert (small(x) - x @ teacher.t()).square().mean() < 0.01 * (x @ teacher.t()).square().mean()


def test_a_low_rank_teacher_is_learned_from_scratch_within_its_budget() -> None:
    n, k = 16, 3
    teacher = torch.randn(n, k) @ torch.randn(k, n) / n**0.5
    model = nn.Linear(n, n, bias=False)
    pruner = rw.Pruner(model, rw.Budget(params=k * 2 * n), anneal_steps=150)
    optimizer = torch.optim.Adam(pruner.weight_parameters(), lr=2e-2)
    for step in range(500):
        x = torch.randn(64, n, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x @ teacher.t()).square().mean().backward()
        optimizer.step()
        pruner.step()
    small = pruner.compact()
    assert rw.count(small) == k * 2 * n == pruner.size().expected
    x = torch.randn(256, n)
    assert (small(x) - x @ teacher.t()).square().mean() < 0.01 * (x @ teacher.t()).square().mean()


def correlated(n: int = 24) -> tuple[nn.Sequential, torch.Tensor]:
    """A model of two matrices of different worth, and inputs of very different sizes."""
    model = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n)).double()
    return model, torch.randn(300, n).double() * torch.logspace(0, -2, n).double()


def test_gates_start_between_even_ranks_and_those_of_one_shot_compression() -> None:
    """With the SVD weighed by the loss, what would be exported at first is what `compress` keeps with blended ranks."""
    model, x = correlated()
    budget = rw.Budget(removed=0.5)
    small = rw.compress(model, budget, [x], loss="sampled", ranks="blend")
    pruner = rw.Pruner(model, budget, init="whitened", calibration=[x], loss="sampled", anneal_steps=30)
    kept = pruner.ranks()
    assert [kept["0"], kept["2"]] == [small[i][0].out_features for i in (0, 2)]
    size = pruner.size()
    assert abs(size.expected - size.budget) < 1 and pruner.controller.target_size() == size.budget
    plain = rw.Pruner(correlated()[0], budget, anneal_steps=30)
    assert plain.size().expected > 0.99 * plain.size().dense


def test_components_of_the_plain_svd_start_by_what_they_are_worth() -> None:
    """The loss sees the inputs of the smallest components alone: these start open, and factors are the plain SVD's."""
    n, k = 16, 4
    left, right = (torch.linalg.qr(torch.randn(n, n)).Q for _ in range(2))
    values = torch.linspace(5, 1, n)
    model = nn.Linear(n, n, bias=False)
    with torch.no_grad():
        model.weight.copy_(left * values @ right.t())
    x = torch.randn(256, n) @ right[:, -k:] @ right[:, -k:].t()
    pruner = rw.Pruner(model, rw.Budget(params=k * 2 * n), calibration=[x], loss="sampled", anneal_steps=30)
    (matrix,) = pruner.controller.matrices
    assert isinstance(matrix, FactorizedMatrix)
    sizes_R = matrix.p.detach().norm(dim=0) * matrix.q.detach().norm(dim=1)
    torch.testing.assert_close(sizes_R.sort(descending=True).values, values, rtol=1e-4, atol=1e-4)
    kept = pruner.controller.kept_components(pruner.limit)[0]
    torch.testing.assert_close(sizes_R[kept].sort(descending=True).values, values[-k:], rtol=1e-4, atol=1e-4)


class WithAside(nn.Module):
    """Two layers that count, one whose large outputs the loss does not see, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.aside, self.unused = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        self.seen = self.aside(100 * h)
        y: torch.Tensor = self.last(h)
        return y


def test_a_matrix_on_which_the_loss_does_not_depend_takes_nothing_from_others() -> None:
    x = torch.randn(100, 24)
    pruner = rw.Pruner(
        *(WithAside(), rw.Budget(removed=0.5)), init="whitened", calibration=[x], anneal_steps=30,
        loss=lambda output: output.square().mean(),
    )  # fmt: skip
    ranks = pruner.ranks()
    assert min(ranks["first"], ranks["last"]) > 2 * max(ranks["aside"], ranks["unused"])
    assert min(ranks.values()) > 0


def weighed_pruner(**given: Any) -> rw.Pruner:
    model, x = correlated()
    if given:
        given |= {"init": "whitened", "calibration": [x]}
    return rw.Pruner(model, rw.Budget(removed=0.5), anneal_steps=30, **given)


def test_a_start_by_worth_is_copied_and_resumed() -> None:
    pruner = weighed_pruner(loss="sampled")
    for twin in (copy.deepcopy(pruner), pickle.loads(pickle.dumps(pruner))):
        assert twin.ranks() == pruner.ranks() and twin.controller.target_size() == pruner.limit
    weighed_pruner(loss="sampled").load_state_dict(pruner.state_dict())
    # without the loss gates would go on with another schedule and step length
    with pytest.warns(UserWarning, match="made with other arguments: the settings of the method, or `loss`. A run"):
        weighed_pruner().load_state_dict(pruner.state_dict())


def test_a_start_is_open_or_by_worth() -> None:
    with pytest.raises(ValueError, match='`start` must be "open" or "worth", but is \'closed\' instead.'):
        rw.Pruner(correlated()[0], rw.Budget(removed=0.5), start="closed", anneal_steps=30)
