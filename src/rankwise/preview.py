"""What pruning would do with a model, before anything is trained: what is pruned, left out and counted, and the ranks.

Everything is computed from shapes, so a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rankwise.adapters.plans import find_plan
from rankwise.core.allocation import uniform_allocation
from rankwise.core.budget import Budget
from rankwise.core.plan import Plan
from rankwise.errors import OutOfReachError
from rankwise.methods.base import Method
from rankwise.methods.paper import MagnitudeGates, UniformRanks
from rankwise.methods.representations import InputFeatures, SingleWeights
from rankwise.methods.width import Widths
from rankwise.sizes import plan_for_method, size_account
from rankwise.split import all_split

COMPONENTS: dict[type, str] = {SingleWeights: "weight", InputFeatures: "feature", Widths: "component"}
"""What is kept or dropped as one, in methods that do not prune ranks."""
SHOWN = 5
"""The number of layers that an error names."""


@dataclass(frozen=True)
class Matrix:
    """One matrix of the plan."""

    names: list[str]
    """Every module that uses it, because tied modules share one matrix. The model itself has the empty name."""
    kinds: list[str]
    shape: list[int]
    parameters: int
    components: int
    """The full rank; the number of input features or single weights where the method prunes those."""
    kept: int | None
    """The rank within the budget; None without a budget."""
    exported: int | None
    """Parameters of the matrix at that rank."""


@dataclass(frozen=True)
class Preview:
    """What a pruner would do with a model. Sizes are in parameters."""

    method: str
    component: str
    """What is kept or dropped as one: a rank, an input feature or a weight."""
    final: bool
    """Whether the method exports these very numbers. Other methods divide the budget differently when they train."""
    matrices: list[Matrix]
    left_out: list[dict[str, Any]]
    """Layers that are not pruned: `name`, `parameters`, `share` of the model, `reason`."""
    dense: int
    prunable: int
    fixed: int
    smallest: int
    """The smallest size that can be reached: all that is fixed, and what a method never prunes of the rest."""
    budget: int | None
    exported: int | None


def preview(
    model: nn.Module, method: Method, budget: Budget | None, include: list[str] | None, exclude: list[str]
) -> Preview:
    """Plan the model and divide the budget by uniform ranks. The model is not changed."""
    plan = plan_for_method(model, find_plan(model, include, exclude), method)
    account = size_account(model, plan, method, trained=True)
    try:
        # `_what_is_fixed` names what is left out, with all else that stays
        limit = budget.resolve(replace(account, left_out="")) if budget is not None else None
    except OutOfReachError as error:
        raise OutOfReachError(f"{error} {_what_is_fixed(model, plan, account.dense)}") from None
    counts = uniform_allocation(account.curves, limit - account.fixed) if limit is not None else None
    kept_counts: Sequence[int | None] = counts if counts is not None else [None] * len(plan.sites)
    matrices = [
        Matrix(
            names=[use.name for use in site.uses],
            kinds=[use.kind for use in site.uses],
            shape=list(site.shape),
            parameters=site.params,
            components=curve.num_components,
            kept=kept,
            exported=curve(kept) if kept is not None else None,
        )
        for site, curve, kept in zip(plan.sites, account.curves, kept_counts, strict=True)
    ]
    left_out = [
        {"name": each.name, "parameters": each.params, "share": each.params / account.dense, "reason": each.reason}
        for each in plan.left_out
    ]
    return Preview(
        method=method.name,
        component=next((word for kind, word in COMPONENTS.items() if isinstance(method, kind)), "rank"),
        final=isinstance(method, UniformRanks | MagnitudeGates),
        matrices=matrices,
        left_out=left_out,
        dense=account.dense,
        prunable=account.prunable,
        fixed=account.fixed,
        smallest=account.smallest,
        budget=limit,
        exported=account.size(counts) if counts is not None else None,
    )


def _what_is_fixed(model: nn.Module, plan: Plan, dense: int) -> str:
    """What cannot be pruned: the layers that are left out, largest first and tied weights once, and the rest."""
    parts: dict[str, int] = {}
    seen: set[int] = set()
    with all_split(model):
        for item in sorted(plan.left_out, key=lambda item: -item.params):
            own = {id(p): p.numel() for p in model.get_submodule(item.name).parameters() if id(p) not in seen}
            seen |= own.keys()
            if own:
                name = item.name or "(model)"
                parts[name if len(parts) < SHOWN else "other layers"] = sum(own.values()) + parts.get("other layers", 0)
    if rest := dense - plan.params - sum(parts.values()):
        parts["biases, norms and the like"] = rest
    said = ", ".join(f"{name} {params:,} ({params / dense:.1%})" for name, params in parts.items())
    return f"Left out of the plan: {said}. Without a budget this command says why."
