"""Latency: the size for `Budget(latency_ms=...)`, found by building models and timing them on this machine.

The size of a compact model does not tell its time: at high ranks two thin products can take longer than the one that
they replace. The result holds for this machine, for PyTorch as it is set up, for inputs of the example's shapes, and
for uniform ranks; a model with the same parameters and other ranks comes close.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rankwise.adapters.plans import find_plan
from rankwise.core.budget import Budget, count
from rankwise.core.plan import LeftOut, Plan, Site, check_not_empty
from rankwise.errors import BudgetError
from rankwise.measure import call_model, evaluating, time_together
from rankwise.methods import make_method
from rankwise.pruner import Pruner
from rankwise.sizes import size_account
from rankwise.split import all_split
from rankwise.swap import copied

P = TypeVar("P", Plan, Plan | None)
ROUNDS = 7
"""Models that are built and timed in a search by halves."""
SLOWER = "slower as a low-rank pair on this machine"


@dataclass(frozen=True)
class LatencyResult:
    """The largest model that was fast enough."""

    budget: Budget
    """The size in parameters."""
    plan: Plan
    """The plan without the layers that stay dense, because a pair would be slower."""
    milliseconds: float
    """Median time of that model."""
    dense_milliseconds: float


def size_for(
    model: nn.Module, budget: Budget, plan: P, example: Any, rank_multiple: int | None
) -> tuple[Budget, P | Plan]:
    """The budget and the plan as they are; for a budget in milliseconds, the size and the plan that meet it."""
    if budget.latency_ms is None:
        return budget, plan
    if example is None:
        raise BudgetError(
            f"A budget in milliseconds ({budget.latency_ms:g}) needs inputs to time the model with, but got none. "
            "Pass `example`: a batch, as the model is called with it."
        )
    found = meet_latency(model, budget, example, plan=plan, rank_multiple=rank_multiple or 16)
    return found.budget, found.plan


def meet_latency(
    model: nn.Module,
    budget: Budget,
    example_inputs: Any,
    *,
    plan: Plan | None = None,
    rank_multiple: int = 16,
    repeats: int = 7,
) -> LatencyResult:
    """The largest size at which one call of `model` with `example_inputs` takes at most `budget.latency_ms`.

    `example_inputs` is a tensor, a tuple of positional arguments or a mapping of keyword arguments. A time that the
    dense model meets already is refused, and so is one that is out of reach even at the lowest ranks.
    """
    if budget.latency_ms is None:
        raise BudgetError(f"`budget` must name `latency_ms`, but is {budget}. Example: Budget(latency_ms=20).")
    plan = plan or find_plan(model)
    check_not_empty(plan)
    search = _Search(model, plan, example_inputs, rank_multiple, repeats)
    goal, dense = budget.latency_ms, search.dense
    if goal >= dense:
        raise BudgetError(
            f"`latency_ms` must be below what the dense model takes, {dense:.3g} ms here, but is {goal:g} instead. "
            "It is met already."
        )
    low, high = search.smallest(), count(model)
    best = search.trial(low)
    if best.milliseconds > goal:
        raise BudgetError(
            f"`latency_ms` must be at least {best.milliseconds:.3g} here (rank {rank_multiple} in every planned "
            f"matrix; dense {dense:.3g}), but is {goal:g} instead. Ask for that, or add modules to the plan."
        )
    for _ in range(ROUNDS):
        middle = (low + high) // 2
        tried = search.trial(middle)
        if tried.milliseconds <= goal:
            low, best = middle, tried
        else:
            high = middle
    return best


class _Search:
    def __init__(self, model: nn.Module, plan: Plan, inputs: Any, rank_multiple: int, repeats: int) -> None:
        self.model, self.plan, self.inputs = model, plan, inputs
        self.rank_multiple, self.repeats = rank_multiple, repeats
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        with all_split(model):
            self.rows = _rows(model, plan, inputs)
        self.known: dict[tuple[int, int, int, int], bool] = {}
        self.dense = self.time(model)

    def smallest(self) -> int:
        """Parameters with one step of rank in every matrix."""
        method = make_method("fac")
        account = size_account(self.model, self.plan, method, rank_multiple=self.rank_multiple, trained=False)
        return account.size([min(self.rank_multiple, curve.num_components) for curve in account.curves])

    def trial(self, limit: int) -> LatencyResult:
        """Build and time a model of `limit` parameters; layers that are faster dense stay dense."""
        pruner = self._pruner(limit, self.plan)
        ranks = pruner.ranks()
        slow = {site for site in pruner.plan.sites if self._is_slower(site, ranks[site.name])}
        kept = [site for site in self.plan.sites if site not in slow]
        plan = self.plan
        if slow and kept:
            left = [LeftOut(site.name, site.params, SLOWER) for site in self.plan.sites if site in slow]
            narrowed = self.plan.only(kept, left)
            # where the others cannot make up for what stays dense, all are pruned
            if limit > count(self.model) - narrowed.params:
                plan, pruner = narrowed, self._pruner(limit, narrowed)
        small = pruner.compact()
        # ranks are multiples, so it may be smaller than it might: what was timed is what counts
        return LatencyResult(Budget(params=count(small)), plan, self.time(small), self.dense)

    def time(self, model: nn.Module) -> float:
        """Milliseconds of one call."""
        with torch.inference_mode(), evaluating(model):
            calls = {"": lambda: call_model(model, self.inputs)}
            timing = time_together(calls, repeats=self.repeats, device=self.device)
        return timing[""].median

    def _pruner(self, limit: int, plan: Plan) -> Pruner:
        # random factors: the time of a model does not depend on its weights
        budget, multiple = Budget(params=limit), self.rank_multiple
        return Pruner(copied(self.model), budget, "fac", plan, init="random", rank_multiple=multiple)

    def _is_slower(self, site: Site, rank: int) -> bool:
        """Whether the layer is slower as a pair of this rank than as one matrix."""
        rows = self.rows.get(site.name)
        if rows is None or site.pair_rank is not None:
            return False
        key = (*site.shape, rank, rows)
        if key not in self.known:
            outputs, inputs = site.shape
            shapes = ((rows, inputs), (inputs, outputs), (inputs, rank), (rank, outputs))
            x, whole, first, second = (torch.rand(shape, dtype=self.dtype, device=self.device) for shape in shapes)
            calls = {"whole": lambda: x @ whole, "pair": lambda: x @ first @ second}
            times = time_together(calls, repeats=3 * self.repeats, device=self.device)
            self.known[key] = times["pair"].median > times["whole"].median
        return self.known[key]


def _rows(model: nn.Module, plan: Plan, inputs: Any) -> dict[str, int]:
    """How many vectors each linear layer gets; embeddings, which only look up, get none."""
    rows: dict[str, int] = {}

    def note(site: Site, module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor):
            rows[site.name] = given[0].numel() // site.shape[1]

    with ExitStack() as stack, torch.inference_mode(), evaluating(model):
        for site in plan.sites:
            if not site.has_embedding:
                stack.enter_context(model.get_submodule(site.name).register_forward_pre_hook(partial(note, site)))
        call_model(model, inputs)
    return rows
