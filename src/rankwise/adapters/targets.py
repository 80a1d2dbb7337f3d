"""Plans in the words that users of PEFT know: `target_modules`, `exclude_modules`, `modules_to_save`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from rankwise.adapters.generic import Pattern, find_plan, matches
from rankwise.adapters.heads import fresh
from rankwise.adapters.kinds import kind_of
from rankwise.core.plan import Plan
from rankwise.errors import PlanError, nearest

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
    chosen = _chosen(model, target_modules)
    excluded = [] if exclude_modules is None else _names(model, "exclude_modules", exclude_modules)
    saved = [] if modules_to_save is None else _inside(model, _names(model, "modules_to_save", modules_to_save))
    plan = find_plan(model, None if chosen is None else _exactly(chosen), _exactly([*excluded, *saved]))
    words = {"not in `include`": "not in `target_modules`", "in `exclude`": "in `exclude_modules`"}
    left_out = []
    for item in plan.left_out:
        reason = "in `modules_to_save`" if item.name in saved else words.get(item.reason, item.reason)
        left_out.append(replace(item, reason=reason))
    if not plan.sites:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in left_out[:3])
        raise PlanError(f"A plan must hold at least one matrix, but this one leaves out every one of them ({reasons}).")
    return Plan(plan.sites, tuple(left_out))


def _chosen(model: nn.Module, target_modules: Pattern | None) -> list[str] | None:
    if target_modules is None:
        return None
    if target_modules != ALL_LINEAR:
        return _names(model, "target_modules", target_modules)
    # a method of transformers' models
    output: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    unwanted = {id(output()), *fresh(model)}
    linear = ("linear", "conv1d", "linear-pair")
    found = [n for n, module in model.named_modules() if kind_of(module) in linear and id(module) not in unwanted]
    if not found:
        raise PlanError(f"`target_modules` is {ALL_LINEAR!r}, but {type(model).__name__} has no linear layer.")
    return found


def _names(model: nn.Module, word: str, pattern: Pattern) -> list[str]:
    """The names of the modules that fit; a pattern that fits none is a mistake."""
    if not isinstance(pattern, str) and not all(isinstance(each, str) for each in pattern):
        raise TypeError(f"`{word}` must be a string or a list of names, but is {pattern!r} instead.")
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    try:
        found = [name for name in names if matches(name, pattern)]
    except re.error as error:
        raise PlanError(f"`{word}` must be a regular expression, but is {pattern!r}: {error}.") from None
    if not found:
        guess = "" if isinstance(pattern, str) or not pattern else nearest(pattern[0], _parts(names))
        raise PlanError(f"`{word}` must name modules of the model, but {pattern!r} matches none.{guess}")
    return found


def _parts(names: list[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _inside(model: nn.Module, names: list[str]) -> list[str]:
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return [name for name in every if any(name == each or name.startswith(each + ".") for each in names)]


def _exactly(names: list[str]) -> str:
    """A regular expression for these names and no others."""
    return "|".join(map(re.escape, names)) if names else "(?!)"
