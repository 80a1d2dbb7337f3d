"""The pruner: the one object a training loop meets.

It gates a model in place, moves the gates by one call a step, and gives back a compact model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rankwise.adapters import families
from rankwise.adapters.plans import check_plan, find_plan, split_pairs
from rankwise.core.budget import Account, Budget, CostCurve, SizeReport, Storage, count
from rankwise.core.compact import compact
from rankwise.core.control import Controller
from rankwise.core.matrices import FactorizedMatrix, GatedMatrix
from rankwise.core.memory import trim
from rankwise.core.plan import LeftOut, Plan, check_not_empty, check_weights, left_out, refusal, source
from rankwise.core.ranks import Ranks
from rankwise.core.stale import Replaced
from rankwise.core.surgery import Outline, install
from rankwise.core.targets import Target, find_target
from rankwise.core.verify import Batch, verify_layers
from rankwise.errors import PlanError, RankwiseError
from rankwise.methods import make_method
from rankwise.methods.base import Init as Init
from rankwise.methods.base import Method, make_factorizer
from rankwise.methods.representations import Factorized
from rankwise.split import all_split, split

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp", "torch.distributed._composable.fsdp")
"""Where those modules are from that keep books of a model's parameters."""
LEFT_OUT, NEARLY_ALL = 0.05, 0.95
"""Shares that are worth a warning: of the parameters in layers left out, of the prunable ones that must go."""


class Pruner:
    """Gates `model` in place and moves its gates towards `budget` as it trains.

    Args:
        model: any module; its planned layers become gated ones. Build the optimizer after this.
        budget: the size of the exported model.
        method: "flop-l0", "flop-agp", "np-l0", "agp", "fac" or "dense" (`rankwise.methods`), or a method object.
        plan: which matrices are pruned; by default every linear layer and embedding that can be gated safely.
        init: how a matrix is factorized: "svd" and "whitened" keep what the model computes, "random" starts afresh
            with the variance of the matrix. A low-rank pair that the model holds is gated as it stands with "random",
            or where the method says so (`refactor=False`).
        calibration: with init="whitened", batches of input for `model`.
        example: a batch of input for `model` (a tensor, a tuple of arguments or a mapping of keyword arguments), on
            which the model's code is checked to do with gated and compact layers what it does with stock ones. By
            default the first batch of `calibration`, or what the model is first called with.
        rank_multiple: keep ranks at multiples of this number; by default those that `target` wants.
        target: where the compact model will run, "cuda", "cpu" or "size" (`rankwise.core.targets`); by default the
            device that `model` is on.
        seed: of the gates' noise, and of random factors.
        process_group: over which gradients of gates are averaged, as those of weights are. None: that of the
            `DistributedDataParallel` through which the model is called; without one, gates learn from their own
            process alone, and where there are several a warning says so. If you average gradients in another way, pass
            the group, such as `torch.distributed.group.WORLD`. False: every process trains a model of its own.
        settings: the method's own, such as `anneal_steps` or `gate_lr`.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        method: str | Method = "flop-l0",
        plan: Plan | None = None,
        init: Init = "svd",
        *,
        calibration: Iterable[Any] | None = None,
        example: Any = None,
        rank_multiple: int | None = None,
        target: str | Target | None = None,
        seed: int = 0,
        process_group: ProcessGroup | Literal[False] | None = None,
        **settings: Any,
    ) -> None:
        check_arguments(model, budget, init, calibration, rank_multiple, seed)
        ranks = Ranks(process_group)
        self.model = model
        self.budget = budget
        self.rank_multiple = rank_multiple
        self.target = find_target(target, model)
        self.method = _method(method, self.target, settings)
        trained = init != "random"
        self.plan = planned(model, plan, self.method)
        check_weights(model, self.plan)
        account = account_of(model, self.plan, self.method, self.target, rank_multiple, trained=trained)
        self.limit = budget.resolve(account)
        if plan is None and self.method.prunes:
            _warn_of_what_stays(model, self.plan, account, budget, self.limit)
        self.account = self.method.allot(account, self.limit)
        self._replaced = Replaced(model)
        self._batch = Batch(example)
        matrices = self._gate(init, calibration, seed)
        self.controller: Controller = self.method.controller(matrices, self.account, self.limit, seed=seed)
        self.controller.ranks = ranks
        self.controller.modules_of_model = model.modules
        for matrix in matrices:
            matrix.gate.attend(self.controller)
        if matrices:
            # the first gate carries the controller, so that the model's state_dict holds its state
            matrices[0].gate.register_module("controller", self.controller)
            self.controller.to(next(matrices[0].parameters()).device)
        self._outline = Outline(model)
        self._is_checked = False
        families.changed(model)
        verify_layers(model, self._batch)
        self._batch.note(model)

    def _gate(self, init: Init, calibration: Iterable[Any] | None, seed: int) -> list[GatedMatrix]:
        """Let every planned layer go through a gated matrix; a model on which calibration fails stays as it was."""
        model = self.model
        undo = split(model, [use.name for site in self.plan.sites for use in site.uses])
        try:
            batches = None if calibration is None else self._batch.first_of(calibration)
            factorizer = make_factorizer(init, model, self.plan, batches, seed)
        except BaseException:
            undo()
            raise
        # it holds the weights as they were
        del undo
        matrices: list[GatedMatrix] = []
        # one site at a time, its dense weight freed before the next: a large model need not fit twice
        for site, curve in zip(self.plan.sites, self.account.curves, strict=True):
            found = source(model, site)
            gate = self.method.gate(curve.num_components).to(found.tensors[0].device)
            matrices.append(self.method.represent(site, found, gate, curve, factorizer))
            install(model, site, matrices[-1])
            del found
            trim()
        return matrices

    def __repr__(self) -> str:
        controller, removed = self.controller, 1 - self.limit / self.account.dense
        ramp = f" of {controller.anneal_steps:,}" if controller.anneal_steps else ""
        return (
            f"Pruner({self.method.name}: {self.account.dense:,} -> {self.limit:,} parameters ({removed:.1%} removed), "
            f"step {self.steps:,}{ramp}, target {controller.target():,})"
        )

    def step(self, grad_scale: float = 1.0) -> None:
        """After `optimizer.step()`: move the gates, the multipliers and the target, and draw the next mask.

        With fp16 loss scaling pass the scale: `pruner.step(grad_scale=scaler.get_scale())`.
        """
        self._check_start()
        self.controller.advance(grad_scale)

    def zero_grad(self) -> None:
        """Drop what the gates have collected since the last step, as `optimizer.zero_grad()` does for weights.

        Seldom needed: that `optimizer.zero_grad()` has thrown away a batch is seen by the next backward pass. Only in
        compiled models and those of a single matrix it can miss `zero_grad(set_to_none=False)`.
        """
        self.controller.forget_gradients()

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.controller.step

    def weight_parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer trains: every parameter of the model. Gates are not among them."""
        return self.model.parameters()

    def size(self) -> SizeReport:
        """Dense, budget, expected and exported size."""
        return SizeReport(
            dense=self.account.dense,
            budget=self.limit,
            expected=self.controller.expected_size(),
            exported=self.account.size(self.controller.counts(self.limit)),
            prunable=self.account.prunable,
            nonzeros=self.method.counts_nonzeros,
        )

    def ranks(self, budget: Budget | None = None) -> dict[str, int]:
        """Components that an export would keep now, by the name of the matrix."""
        counts = self.controller.counts(self._limit(budget))
        return {site.name: k for site, k in zip(self.plan.sites, counts, strict=True)}

    def compact(self, budget: Budget | None = None, *, target: str | Target | None = None) -> nn.Module:
        """A new, ordinary model of the size asked for; `model` stays as it is.

        Another `budget` gives another size of the same run, another `target` ranks for another place to run.
        """
        if target is not None:
            with self._aimed(find_target(target, self.model)):
                return self.compact(budget)
        if self.controller.learns and not self.steps:
            raise RankwiseError(
                "`compact()` needs gates that have learned something, but no `pruner.step()` was taken. "
                "Train first, or use `rankwise.compress` to prune without training."
            )
        self._outline.check(self.model, self.controller.matrices, "compact()")
        limit = self._limit(budget)
        self._warn_if_early(limit)
        dtype = (budget or self.budget).dtype
        self._settle_layouts(limit, dtype)
        self._batch.stop()
        small = compact(self.model, self.controller, limit)
        families.changed(small)
        verify_layers(small, self._batch)
        size = self.account.dense if self.method.counts_nonzeros else self.account.size(self.controller.counts(limit))
        assert count(small) == size
        return small if dtype is None else small.to(dtype)

    def _check_start(self) -> None:
        """At the first steps: notice what would make all the others useless."""
        self._replaced.check(self.model, self.controller.matrices)
        if self._is_checked:
            return
        matrices = self.controller.matrices
        self._outline.check_gates(self.model, matrices, "pruner.step()")
        self._is_checked = True
        is_wrapped = any(is_wrapper(each) for each in self.model.modules())
        if self.controller.ranks.size == 1 and not is_wrapped:
            verify_layers(self.model, self._batch)
        if self._batch.is_known:
            self._batch.stop()
        # a layer that only training needs may be taken away again; shards have sizes of their own
        if count(self.model) > self._outline.size and not is_wrapped:
            warnings.warn(self._outline.message(self.model, matrices, "compact()"), stacklevel=3)

    def _warn_if_early(self, limit: int) -> None:
        target, steps, end = self.controller.target(), self.steps, self.controller.anneal_steps
        if steps < end and limit < target:
            warnings.warn(
                f"the ramp has not ended: after {steps:,} of {end:,} steps the target is {target:,} parameters, and "
                f"evaluation mode stands there, but this export has at most {limit:,}, for which the gates have not "
                f"learned yet. Train on, or export `compact(Budget(params={target}))`.",
                stacklevel=3,
            )

    def _settle_layouts(self, limit: int, dtype: torch.dtype | None) -> None:
        """Let those matrices be pairs, at the price of pairs, whose pivots would suffer in half precision."""
        while True:
            pairs = set()
            for i, kept in enumerate(self.controller.choose(limit)):
                matrix, columns = self.controller.matrices[i], self.plan.sites[i].has_embedding
                if isinstance(matrix, FactorizedMatrix) and matrix.suffers(
                    kept, self.controller.values(i), dtype, by_columns=columns
                ):
                    pairs.add(i)
            if not pairs:
                return
            self._price([replace(c, pivot=c.pivot and i not in pairs) for i, c in enumerate(self.account.curves)])
            self.controller.outdate()

    @contextmanager
    def _aimed(self, target: Target) -> Iterator[None]:
        """For as long as this lasts, exports are for `target`."""
        before = self.account.curves
        sites = zip(self.plan.sites, before, strict=True)
        self._price([self.method.aimed(site, curve, target, self.rank_multiple) for site, curve in sites])
        try:
            yield
        finally:
            self._price(before)

    def _price(self, curves: Sequence[CostCurve]) -> None:
        """Let exports cost what `curves` say."""
        self.account = self.controller.account = replace(self.account, curves=tuple(curves))
        for matrix, curve in zip(self.controller.matrices, curves, strict=True):
            if isinstance(matrix, FactorizedMatrix):
                matrix.costs = curve

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: the gated model with its gates, multipliers and step."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the pruner must have been made with the same arguments."""
        self.model.load_state_dict(state)

    def _limit(self, budget: Budget | None) -> int:
        return self.limit if budget is None else budget.resolve(self.account)


def account_of(
    model: nn.Module,
    plan: Plan,
    method: Method,
    target: Target | None = None,
    rank_multiple: int | None = None,
    *,
    trained: bool,
) -> Account:
    """The books of a model under a plan, by default for the device that it is on."""
    target = target or find_target(None, model)
    saved = set(model.state_dict())
    storage = Storage(
        dtypes=frozenset(p.dtype for p in model.parameters()),
        buffers=tuple((b.numel(), b.dtype) for name, b in model.named_buffers() if name in saved),
        overhead=sum(method.overhead_bytes(site) for site in plan.sites),
    )
    plain = ((site, method.curve(site, trained=trained)) for site in plan.sites)
    curves = tuple(method.aimed(site, curve, target, rank_multiple) for site, curve in plain)
    share, which = left_out(model, plan)
    said = f"{share:.1%} of the parameters: {which}" if which else ""
    return Account(count(model), plan.params, curves, None if method.counts_nonzeros else storage, said)


def _warn_of_what_stays(model: nn.Module, plan: Plan, account: Account, budget: Budget, limit: int) -> None:
    """Say what nobody asked for: layers that are left out, and a size that leaves next to nothing of the others."""
    told = []
    if left_out(model, plan)[0] >= LEFT_OUT:
        told.append(f"the plan leaves out {account.left_out}.")
    removed = (account.dense - limit) / max(account.prunable, 1)
    if removed > NEARLY_ALL and budget.of == "model":
        told.append(f"{removed:.1%} of the prunable parameters must go to reach the budget.")
    if told:
        remedy = "See `rankwise plan`; to go on without this warning, pass `plan=rankwise.find_plan(model)`."
        warnings.warn(" ".join([*told, remedy]), stacklevel=3)


def planned(model: nn.Module, plan: Plan | None, method: Method) -> Plan:
    """The plan with what the method refuses left out; refuses a plan that leaves nothing."""
    if plan is None:
        plan = find_plan(model)
    else:
        check_plan(model, plan)
    if method.splits_pairs:
        plan = split_pairs(plan)
    with all_split(model):
        reasons = {site: reason for site in plan.sites if (reason := method.refuses(site) or refusal(model, site))}
    kept = [site for site in plan.sites if site not in reasons]
    refused = [LeftOut(site.name, site.params, reason) for site, reason in reasons.items()]
    taken = plan.only(kept, refused)
    if method.prunes:
        check_not_empty(taken)
    return taken


def _method(method: str | Method, target: Target, settings: dict[str, Any]) -> Method:
    """The method with its settings; unless one is asked for, a name's layout is that of the target."""
    if isinstance(method, Method):
        if settings:
            raise TypeError(f"Settings go into the method object, but got {', '.join(settings)} beside it.")
        return method
    made = make_method(method, **settings)
    if isinstance(made, Factorized) and "layout" not in settings and made.layout != target.layout:
        made = make_method(method, **settings, layout=target.layout)
    return made


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module keeps books of a model's parameters."""
    # FSDP's second version makes a subclass of each
    return any(kind.__module__.startswith(WRAPPERS) for kind in type(module).__mro__)


def check_arguments(
    model: nn.Module,
    budget: Budget,
    init: Init,
    calibration: Iterable[Any] | None,
    rank_multiple: int | None,
    seed: int,
) -> None:
    """Refuse what no method can work with."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__} instead.")
    for name, module in model.named_modules():
        if is_wrapper(module):
            raise PlanError(
                f"`model` must be gated before it is wrapped for several devices, but {name or 'it'} is a "
                f"{type(module).__name__}. Pass the model inside, and wrap it afterwards."
            )
    if not isinstance(budget, Budget):
        raise TypeError(f"`budget` must be a Budget, but is {budget!r} instead. Example: Budget(removed=0.8).")
    if init not in ("svd", "whitened", "random"):
        raise ValueError(f'`init` must be "svd", "whitened" or "random", but is {init!r} instead.')
    if (init == "whitened") != (calibration is not None):
        raise PlanError('`calibration` and init="whitened" go together: pass both, or neither.')
    multiple = 1 if rank_multiple is None else rank_multiple
    for name, value, least in (("rank_multiple", multiple, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r} instead.")
