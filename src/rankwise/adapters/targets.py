"""Plans in the words that users of PEFT know: `target_modules`, `exclude_modules`, `modules_to_save`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from rankwise.adapters.generic import check_ungated, layer_names, plan_by_name
from rankwise.adapters.heads import fresh
from rankwise.adapters.kinds import kind_of
from rankwise.adapters.names import Pattern, chosen
from rankwise.core.plan import Plan
from rankwise.errors import PlanError

ALL_LINEAR = "all-linear"


def target_plan(
    model: nn.Module,
    target_modules: Pattern | None = None,
    exclude_modules: Pattern | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> Plan:
    """A plan in PEFT's words. A list of names matches last parts of names, a string is a regular expression.

    Args:
        model: any module.
        target_modules: which layers are pruned; "all-linear": every linear layer but the output layer and fresh heads;
            by default all that can be pruned, embeddings too.
        exclude_modules: which of them are not.
        modules_to_save: modules that are trained and saved whole, with all that is inside them.
    """
    check_ungated(model)
    layers, every = layer_names(model), [name for name, _ in model.named_modules(remove_duplicate=False)]
    excluded = chosen(model, "exclude_modules", exclude_modules or (), layers)
    whole = chosen(model, "modules_to_save", modules_to_save or (), every, "modules")
    saved = {name for name in every if any(name == each or name.startswith(each + ".") for each in whole)}
    plan = plan_by_name(model, _targets(model, target_modules, layers), excluded | saved)
    words = {"not in `include`": "not in `target_modules`", "in `exclude`": "in `exclude_modules`"}
    left_out = []
    for item in plan.left_out:
        reason = "in `modules_to_save`" if item.name in saved else words.get(item.reason, item.reason)
        left_out.append(replace(item, reason=reason))
    if not plan.sites:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in left_out[:3])
        raise PlanError(f"A plan must hold at least one matrix, but this one leaves out every one of them ({reasons}).")
    return Plan(plan.sites, tuple(left_out))


def _targets(model: nn.Module, target_modules: Pattern | None, layers: list[str]) -> set[str] | None:
    if target_modules is None:
        return None
    if target_modules != ALL_LINEAR:
        return chosen(model, "target_modules", target_modules, layers)
    # a method of transformers' models
    output: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    unwanted = {id(output()), *fresh(model)}
    linear = ("linear", "conv1d", "linear-pair")
    found = {n for n, module in model.named_modules() if kind_of(module) in linear and id(module) not in unwanted}
    if not found:
        raise PlanError(f"`target_modules` is {ALL_LINEAR!r}, but {type(model).__name__} has no linear layer.")
    return found
