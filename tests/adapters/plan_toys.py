"""What plans are asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.core.plan import Plan


def kinds(plan: Plan) -> dict[str, str]:
    """How each planned module uses its matrix, by name."""
    return {use.name: use.kind for site in plan.sites for use in site.uses}


def reasons(plan: Plan) -> dict[str, str]:
    return {item.name: item.reason for item in plan.left_out}


def names(plan: Plan) -> set[str]:
    return set(kinds(plan))


def weights(module: nn.Module, kind: str) -> list[nn.Parameter]:
    if kind == "low-rank-head":
        return [module.embedding.weight, module.projection.weight]
    if kind.endswith("pair"):
        return [module[0].weight, module[1].weight]
    return [module.weight]


def assert_trains_and_exports(model: nn.Module, x: Tensor, **arguments: Any) -> None:
    """A gated model runs in both modes, and its compact model gives the same."""
    plan = rw.find_plan(model)
    pruner = rw.Pruner(
        model, rw.Budget(removed=0.1, of="prunable"), "flop-agp", anneal_steps=1, **{"plan": plan, **arguments}
    )
    model.train()
    model(x).square().mean().backward()
    pruner.step()
    model.eval()
    small = pruner.compact()
    with torch.no_grad():
        torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-5)
