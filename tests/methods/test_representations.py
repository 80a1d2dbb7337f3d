"""How methods divide the matrices of a model into components."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.modules import LowRankLinear
from tests.methods.rows import METHODS


@pytest.mark.parametrize("method", ["flop-l0", "flop-agp"])
def test_components_of_a_trained_pair_come_by_what_they_carry(method: str) -> None:
    """Cut to its first k components, the pair is the best matrix of rank k."""
    torch.manual_seed(0)
    pair = LowRankLinear(nn.Linear(20, 9, bias=False), nn.Linear(9, 30, bias=False)).double()
    first, second = pair[0].weight, pair[1].weight
    dense = (second @ first).detach()
    singular = torch.linalg.svdvals(dense)
    model = nn.Sequential(pair)
    budget = rw.Budget(removed=0.5)
    rw.Pruner(model, budget, method, **METHODS[method])
    q, p = dict(model.named_parameters()).values()
    p, q = (p, q) if p.shape == (30, 9) else (q, p)
    for k in range(10):
        error = torch.linalg.norm(dense - p[:, :k] @ q[:k])
        torch.testing.assert_close(error, torch.linalg.norm(singular[k:]), rtol=1e-9, atol=1e-9)
    model = nn.Sequential(LowRankLinear(nn.Linear(20, 9, bias=False), nn.Linear(9, 30, bias=False)))
    own = set(model.parameters())
    rw.Pruner(model, budget, method, **{**METHODS[method], "refactor": False})
    assert set(model.parameters()) == own
