"""What `Pruner` and `compress` do before they change a model: check arguments, fit the plan, and add up sizes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from rankwise.adapters.plans import check_plan, find_plan, split_pairs
from rankwise.adapters.widths import find_widths
from rankwise.core.budget import Budget, SizeAccount, Storage, count
from rankwise.core.distributed import is_wrapper
from rankwise.core.plan import LeftOut, Plan, check_not_empty, left_out, refusal
from rankwise.core.sharding import check_shards, mesh_of
from rankwise.core.targets import Target, find_target
from rankwise.errors import InvalidTypeError, InvalidValueError, PlanError
from rankwise.methods.base import Method
from rankwise.split import all_split
from rankwise.swap import is_fully_sharded

Init = Literal["svd", "whitened", "random"]
WARN_LEFT_OUT, WARN_REMOVED = 0.05, 0.95
"""The pruner warns if the plan leaves out this share of the parameters, or this share of the prunable ones must go."""


def size_account(
    model: nn.Module,
    plan: Plan,
    method: Method,
    target: Target | None = None,
    rank_multiple: int | None = None,
    *,
    trained: bool,
) -> SizeAccount:
    """The sizes of a model under a plan; `target` is by default the device that the model is on."""
    target = target or find_target(None, model)
    saved = set(model.state_dict())
    storage = Storage(
        dtypes=frozenset(p.dtype for p in model.parameters()),
        buffers=tuple((b.numel(), b.dtype) for name, b in model.named_buffers() if name in saved),
        overhead=sum(method.overhead_bytes(site) for site in plan.sites),
    )
    curves = tuple(
        method.for_target(site, method.cost_curve(site, trained=trained), target, rank_multiple) for site in plan.sites
    )
    share, which = left_out(model, plan)
    text = f"{share:.1%} of the parameters: {which}" if which else ""
    return SizeAccount(count(model), plan.params, curves, None if method.counts_nonzeros else storage, text)


def plan_for_method(model: nn.Module, plan: Plan | None, method: Method) -> Plan:
    """The plan without the sites that the method cannot prune; raises if none is left."""
    if method.prunes_widths:
        return find_widths(model, heads=getattr(method, "heads", True), within=plan)
    if plan is None:
        plan = find_plan(model)
    else:
        check_plan(model, plan)
    if method.splits_pairs:
        plan = split_pairs(plan)
    with all_split(model):
        reasons = {site: reason for site in plan.sites if (reason := method.skip_reason(site) or refusal(model, site))}
    skipped = [LeftOut(site.name, site.params, reason) for site, reason in reasons.items()]
    plan = plan.only([site for site in plan.sites if site not in reasons], skipped)
    if method.prunes:
        check_not_empty(plan)
    return plan


def check_loss(loss: object, has_calibration: bool) -> None:
    """Raise if `loss` is not a loss, or if there is no calibration data to measure it on."""
    if not callable(loss) and loss not in ("sampled", None):
        raise InvalidValueError(f'`loss` must be a function, "sampled" or None, but is {loss!r} instead.')
    if loss is not None and not has_calibration:
        raise PlanError("`loss` must go with `calibration`, but there is none. Pass batches of input for the model.")


def check_init(init: Init, method: Method, calibration: Iterable[Any] | None, loss: object) -> None:
    """Raise if calibration data are missing, or would change nothing."""
    if init not in ("svd", "whitened", "random"):
        raise InvalidValueError(f'`init` must be "svd", "whitened" or "random", but is {init!r} instead.')
    if init == "whitened" and calibration is None:
        raise PlanError('init="whitened" needs `calibration`, but there is none. Pass batches of input for the model.')
    by_worth = init == "svd" and loss is not None and method.can_start_by_worth
    if calibration is not None and init != "whitened" and not by_worth:
        raise PlanError(
            f'`calibration` must go with init="whitened", or with `loss` and gates that start by it (flop-l0), but '
            f"init is {init!r} and the method {method.name!r}. Leave it out, or pass the one or the other."
        )


def check_arguments(
    model: nn.Module,
    budget: Budget,
    calibration: Iterable[Any] | None,
    rank_multiple: int | None,
    seed: int,
    max_rank: int | None = None,
) -> None:
    """Raise if an argument is of the wrong type or out of range."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    for name, module in model.named_modules():
        if is_wrapper(module) and not is_fully_sharded(module):
            raise PlanError(
                f"`model` must be gated before it is wrapped for several devices, but {name or 'it'} is a "
                f"{type(module).__name__}. Pass the model inside, and wrap it afterwards."
            )
    check_shards(model)
    check_batches("calibration", calibration)
    if not isinstance(budget, Budget):
        raise InvalidTypeError(f"`budget` must be a Budget, but is {budget!r} instead. Example: Budget(removed=0.8).")
    if (calibration is not None or budget.latency_ms is not None) and mesh_of(model.parameters()) is not None:
        asked = "`calibration`" if calibration is not None else "Budget(latency_ms=...)"
        raise PlanError(f"{asked} needs a model that one rank can run, but it is sharded. Make the pruner before.")
    for name, value, least in (("rank_multiple", rank_multiple, 1), ("max_rank", max_rank, 1), ("seed", seed, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise InvalidValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r} instead.")


def check_batches(name: str, batches: Iterable[Any] | None) -> None:
    """Raise if the argument `name` is one batch, or a path. A tensor would be taken row by row."""
    if isinstance(batches, Mapping | str | Tensor):
        listed = ", or list(batches) if its first dimension counts batches" if isinstance(batches, Tensor) else ""
        raise InvalidTypeError(
            f"`{name}` must be several batches of input for the model, such as a list of them, but is a "
            f"{type(batches).__name__} instead. Pass [batch]{listed}."
        )


def warn_about_plan(model: nn.Module, plan: Plan, account: SizeAccount, budget: Budget, limit: int) -> None:
    """Warn if the default plan leaves out many layers, or if the budget leaves almost nothing of the others."""
    warned = []
    if left_out(model, plan)[0] >= WARN_LEFT_OUT:
        warned.append(f"the plan leaves out {account.left_out}.")
    removed = (account.dense - limit) / max(account.prunable, 1)
    if removed > WARN_REMOVED and budget.of == "model":
        warned.append(f"{removed:.1%} of the prunable parameters must go to reach the budget.")
    if warned:
        remedy = "See `rankwise plan`; to go on without this warning, pass `plan=rankwise.find_plan(model)`."
        warnings.warn(" ".join([*warned, remedy]), stacklevel=3)
