"""The pruner: the one object that a training loop meets.

It gates a model in place, moves the gates with one call per step, and returns a compact model.
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
from rankwise.adapters.widths import update_config
from rankwise.core import optimizer_checks as checks
from rankwise.core.budget import Budget, CostCurve, SizeAccount, SizeReport, count
from rankwise.core.calibrate import Loss
from rankwise.core.controller import Controller
from rankwise.core.distributed import DistributedGroup, is_wrapper
from rankwise.core.dropping import drop_closed
from rankwise.core.host_memory import release_freed_memory
from rankwise.core.layers import compact, install
from rankwise.core.loop_checks import GatedStructure
from rankwise.core.matrices import FactorizedMatrix, GatedMatrix
from rankwise.core.plan import Plan, check_weights, get_module, listed, source
from rankwise.core.sharding import (
    ShardGroups,
    StartingWeights,
    check_shards,
    gathered,
    make_shardable,
    mesh_of,
    reshard,
    unsharded,
)
from rankwise.core.targets import Target, find_target
from rankwise.core.verify import Batch, verify_layers
from rankwise.errors import RankwiseError
from rankwise.methods import resolve_method
from rankwise.methods.base import Factorizer, Method, make_factorizer
from rankwise.sizes import Init, check_arguments, check_init, check_loss, plan_for_method, size_account, warn_about_plan
from rankwise.split import splitting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Pruner:
    """Prunes a model while it trains, to the size that you name.

    ```python
    pruner = rw.Pruner(model, rw.Budget(removed=0.8), anneal_steps=4_000)  # gates `model` in place
    optimizer = torch.optim.AdamW(pruner.weight_parameters(), lr=3e-4)  # built after the pruner
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    small = pruner.compact()  # a new model without gates; `model` stays as it is
    ```

    Every planned matrix becomes a sum of components, each multiplied by a gate. `pruner.step()` trains the gates; your
    loss and your optimizer stay as they are. During the first `anneal_steps` steps the target size falls from dense to
    the budget, and the gates learn which components to keep. Later steps train the model as it will be exported, which
    repairs what pruning cost. In evaluation mode the model computes what an export at the current target size would.
    The exported model is never larger than the budget, and smaller by less than one more component would take.

    All state is in `model.state_dict()`: to resume, make the pruner with the same arguments and load your checkpoint.

    Args:
        model: any module. Its planned layers become gated layers, in place.
        budget: the size of the exported model, such as `Budget(removed=0.8)` or `Budget(params=8_000_000)`.
        method: "flop-l0", "flop-agp", "np-l0", "agp", "fac", "svd", "width-l0", "width" or "dense"
            (`rankwise.methods`), or a method object.
        plan: the matrices to prune (`rankwise.find_plan`). Default: every linear layer and embedding that can be gated
            safely.
        init: how a matrix is factorized. "svd" and "whitened" keep what the model computes; "random" draws new factors
            with the variance of the matrix, for training from scratch. A low-rank pair in the model is gated as it is
            with "random", or with `refactor=False`.
        calibration: batches of input for `model`, by which factors are whitened (init="whitened"), or on which `loss`
            is measured.
        loss: with `calibration`, the loss of what the model returns for a batch. The gates of flop-l0 then start by
            what components are worth to it. "sampled" needs no labels: it is that of the model's own answers.
        example: a batch of input for `model`, on which its code is checked to do with gated and compact layers what it
            does with stock ones. Default: the first of `calibration`, or what the model is first called with. With
            Budget(latency_ms=...) models are timed on it, here and now, to find the size.
        rank_multiple: exported ranks are multiples of this number. Default: what is fast on `target`.
        max_rank: the number of components with which a matrix starts, at most. Fewer take less memory and time, but
            those of least energy are gone before training. Default: all.
        target: where the compact model will run: "cuda", "cpu", "onnx", "openvino", or "size" for the smallest file
            (`rankwise.core.targets`). Default: the device that `model` is on.
        seed: the seed of the gates' noise and of random factors.
        process_group: the group over which the gradients of gates are averaged. Default: the group of the
            `DistributedDataParallel` or FSDP2 that wraps the model; without one, every process trains its gates alone,
            and a warning says so if there are several. If you average gradients in another way, pass the group, such as
            `torch.distributed.group.WORLD`. Pass False if every process trains a model of its own.
        settings: settings of the method, such as `anneal_steps` or `gate_lr`.
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
        loss: Loss | None = None,
        rank_multiple: int | None = None,
        max_rank: int | None = None,
        target: str | Target | None = None,
        example: Any = None,
        seed: int = 0,
        process_group: ProcessGroup | Literal[False] | None = None,
        **settings: Any,
    ) -> None:
        check_arguments(model, budget, calibration, rank_multiple, seed, max_rank)
        checks.check_mode(model)
        check_loss(loss, calibration is not None)
        reshard(model)
        self.target = find_target(target, model)
        self.method = resolve_method(method, self.target.layout, settings)
        self.method.check_budget(budget)
        self.method.check_loss(loss)
        check_init(init, self.method, calibration, loss)
        if budget.latency_ms is not None:
            # it makes pruners of known sizes, so it imports this module
            from rankwise.latency import size_for

            budget, plan = size_for(model, budget, plan, example, rank_multiple)
        distributed = DistributedGroup(process_group)
        self.model = model
        self.budget = budget
        self.rank_multiple = rank_multiple
        self.plan = plan_for_method(model, plan, self.method)
        check_weights(model, self.plan)

        account = size_account(model, self.plan, self.method, self.target, rank_multiple, trained=init != "random")
        if max_rank is not None:
            account = self.method.limit_ranks(account, max_rank)
        self.limit = budget.resolve(account)
        if plan is None and self.method.prunes and not self.method.prunes_widths:
            warn_about_plan(model, self.plan, account, budget, self.limit)
        account = self.method.fix_ranks(account, self.limit)
        self._optimizer_check = checks.OptimizerCheck(model)
        self._unchanged_weights = checks.UnchangedWeightsCheck()
        self._batch = Batch(example)
        with splitting(model, [use.name for site in self.plan.sites for use in site.uses]):
            batches = None if calibration is None else self._batch.first_of(calibration)
            factorizer = make_factorizer(init, model, self.plan, batches, seed, loss)
        matrices = self._gate_model(factorizer, account)
        self.controller: Controller = self.method.make_controller(matrices, account, self.limit, seed=seed)
        self._attach_controller(matrices, distributed)
        self._structure = GatedStructure(model, matrices)
        self._optimizer_check.note_gated(model)
        self._starting_weights = StartingWeights(model)
        self._is_checked = False
        families.changed(model)
        if mesh_of(model.parameters()) is None:
            verify_layers(model, self._batch)
        self._batch.note(model)

    def _attach_controller(self, matrices: list[GatedMatrix], distributed: DistributedGroup) -> None:
        self.controller.note_arguments()
        self.controller.distributed = distributed
        self.controller.modules_of_model = self.model.modules
        for matrix in matrices:
            matrix.gate.set_controller(self.controller)
        if matrices:
            # a submodule of the first gate, so that the model's state_dict holds the state of the controller
            matrices[0].gate.register_module("controller", self.controller)
            self.controller.to(next(matrices[0].parameters()).device)

    def _gate_model(self, factorizer: Factorizer, account: SizeAccount) -> list[GatedMatrix]:
        """Replace the planned layers by gated ones."""
        matrices = []
        shards = ShardGroups(self.model)
        # each dense weight is freed before the next one is factorized, so that a large model need not fit twice
        for site, curve in zip(self.plan.sites, account.curves, strict=True):
            found = source(self.model, site)
            before = [p for use in site.uses for p in get_module(self.model, use).parameters()]
            whole = found.gathered()
            gate = self.method.make_gate(curve.num_components).to(whole.tensors[0].device)
            matrices.append(self.method.make_matrix(site, whole, gate, curve, factorizer))
            make_shardable(matrices[-1])
            install(self.model, site, matrices[-1])
            shards.replace(before, matrices[-1])
            del found, whole, before
            release_freed_memory()
        shards.find_again()
        return matrices

    def __repr__(self) -> str:
        controller, removed = self.controller, 1 - self.limit / self.account.dense
        is_ramp = self.steps < controller.anneal_steps
        ramp = f" of {controller.anneal_steps:,}, target size {controller.target_size():,}" if is_ramp else ""
        return (
            f"Pruner({self.method.name}: {self.account.dense:,} -> {self.limit:,} parameters ({removed:.1%} removed), "
            f"step {self.steps:,}{ramp})"
        )

    def step(self, grad_scale: float | None = None) -> None:
        """Move gates, multipliers and target size, and draw the next masks; call it after `optimizer.step()`.

        With fp16 loss scaling pass the scale: `pruner.step(grad_scale=scaler.get_scale())`. Without one, a step is
        refused where a `GradScaler` has called the optimizer.
        """
        checks.check_mode()
        takes_scale = grad_scale is None and self.controller.uses_gradient
        self._optimizer_check.check(self.model, self.controller.matrices, takes_scale=takes_scale)
        self._check_loop()
        self.controller.advance(1.0 if grad_scale is None else grad_scale)

    def zero_grad(self) -> None:
        """Clear the gradients of gates, as `optimizer.zero_grad()` does for weights.

        It is seldom needed: the next backward pass sees that `optimizer.zero_grad()` has discarded a batch. Only
        compiled models and models with a single gated matrix may miss `zero_grad(set_to_none=False)`.
        """
        self.controller.clear_gradients()

    def drop_closed(self, *optimizers: torch.optim.Optimizer) -> int:
        """Drop the components that stay closed, so that the rest of the run takes less memory and time.

        Call it once, between two steps after the ramp, with the optimizers that hold the weights: their state is
        narrowed too. Weights stay the same parameter objects, and the exported model stays the same; larger exports are
        no longer possible. Input features and single weights (np-l0, agp) are not dropped. Returns how many parameters
        the gated model lost.
        """
        return drop_closed(self.controller, optimizers)

    @property
    def account(self) -> SizeAccount:
        """The sizes of the model, with any number of components kept in each matrix."""
        return self.controller.account

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self.controller.step

    def weight_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the gated model, for the optimizer. The pruner itself trains the gates."""
        return self.model.parameters()

    def size(self) -> SizeReport:
        """The dense size, the budget, and the expected and exported size at this step."""
        return SizeReport(
            dense=self.account.dense,
            budget=self.limit,
            expected=self.controller.expected_size(),
            exported=self.account.size(self.controller.num_kept(self.limit)),
            prunable=self.account.prunable,
            nonzeros=self.method.counts_nonzeros,
        )

    def ranks(self, budget: Budget | None = None) -> dict[str, int]:
        """The number of components of each matrix in an export at this step, by the name of the matrix."""
        counts = self.controller.num_kept(self._limit(budget))
        return {site.name: k for site, k in zip(self.plan.sites, counts, strict=True)}

    def compact(self, budget: Budget | None = None, *, target: str | Target | None = None) -> nn.Module:
        """A new model of the size asked for, without gates; `model` stays as it is.

        One run gives several models: pass another `budget` for another size, another `target` for ranks that suit it.
        If the model is sharded (FSDP2), call it on every rank: the first rank gets the new model, in the memory of the
        host, and the others get it on the meta device, without values.
        """
        if target is not None:
            with self._retargeted(find_target(target, self.model)):
                return self.compact(budget)
        if self.controller.learns and not self.steps:
            raise RankwiseError(
                "`compact()` needs gates that have learned something, but no `pruner.step()` was taken. "
                "Train first, or use `rankwise.compress` to prune without training."
            )
        self._structure.check(self.model, self.controller.matrices, "compact()")
        limit = self._limit(budget)
        if self.controller.is_narrowed and limit > self.limit:
            raise RankwiseError(
                f"After `drop_closed` a model has at most the {self.limit:,} parameters of the budget that it was "
                f"pruned to, but {limit:,} were asked for. Call `compact` with a larger budget before dropping."
            )
        self._warn_if_early(limit)
        dtype = (budget or self.budget).dtype
        self._avoid_imprecise_pivots(limit, dtype)
        self._batch.stop()
        checks.warn_if_not_finite(self.model)
        # what is made in inference mode could not be trained
        with torch.inference_mode(False):
            small = compact(self.model, self.controller, limit)
            small = small if dtype is None else small.to(dtype)
        if self.method.prunes_widths:
            update_config(small)
        families.changed(small)
        if mesh_of(self.model.parameters()) is None:
            verify_layers(small, self._batch)
        kept = self.account.size(self.controller.num_kept(limit))
        assert count(small) == (self.account.dense if self.method.counts_nonzeros else kept)
        return small

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: the gated model with its gates, multipliers and step."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; the pruner must have been made with the same arguments."""
        self.model.load_state_dict(state)

    def _limit(self, budget: Budget | None) -> int:
        return self.limit if budget is None else budget.resolve(self.account)

    def _check_loop(self) -> None:
        """Raise or warn about a training loop that would make pruning useless."""
        self._unchanged_weights.check(self.controller.matrices)
        if self._is_checked:
            return
        matrices = self.controller.matrices
        self._structure.check_gates(self.model, matrices, "pruner.step()")
        self._is_checked = True
        self._check_shards()
        if self.controller.uses_gradient:
            checks.warn_of_modes(self.model)
        is_wrapped = any(is_wrapper(each) for each in self.model.modules())
        if self.controller.distributed.size == 1 and not is_wrapped:
            verify_layers(self.model, self._batch)
        # a layer that only training needs may still be removed; the sizes of shards are different
        if self._structure.growth(self.model, matrices) > 0 and not is_wrapped:
            warnings.warn(self._structure.message(self.model, matrices, "compact()"), stacklevel=3)

    def _check_shards(self) -> None:
        """Raise or warn about a model whose shards do not fit together."""
        check_shards(self.model)
        mesh = mesh_of(self.model.parameters())
        if mesh is None:
            return
        differing = self._starting_weights.differing(mesh)
        if differing and not self.controller.is_loaded:
            raise RankwiseError(
                f"All ranks must gate the same weights before `fully_shard` takes a part of each, but they began with "
                f"different values of {listed(differing)}. Load the model on every rank before the Pruner, or shard it "
                "first: then the first rank's factors are sent to all."
            )
        alone = unsharded(self.model)
        if alone:
            warnings.warn(
                f"`fully_shard` was not applied to all of the model: {listed(alone)} stay whole on every rank, and "
                "their gradients are not averaged. Apply it to the model as well, after its parts.",
                stacklevel=4,
            )

    def _warn_if_early(self, limit: int) -> None:
        target, steps, end = self.controller.target_size(), self.steps, self.controller.anneal_steps
        if steps < end and limit < target:
            warnings.warn(
                f"the ramp has not ended: after {steps:,} of {end:,} steps the target size is {target:,} parameters, "
                f"also in evaluation mode, but this export has at most {limit:,}, for which the gates have not "
                f"learned yet. Train on, or export `compact(Budget(params={target}))`.",
                stacklevel=3,
            )

    def _avoid_imprecise_pivots(self, limit: int, dtype: torch.dtype | None) -> None:
        """Export matrices as pairs, at the cost of pairs, if the pivot layout would be imprecise in half precision."""
        while True:
            imprecise = set()
            for i, kept in enumerate(self.controller.kept_components(limit)):
                matrix, z = self.controller.matrices[i], self.controller.export_values(i)
                columns = self.plan.sites[i].has_embedding
                if isinstance(matrix, FactorizedMatrix) and matrix.rounds_pivots(len(kept), dtype):
                    # on the host of every rank, so that all decide the same
                    with gathered([matrix], to_host=True):
                        if matrix.loses_precision(kept, z, dtype, by_columns=columns):
                            imprecise.add(i)
            if not imprecise:
                return
            curves = enumerate(self.account.curves)
            self._set_curves([replace(curve, pivot=curve.pivot and i not in imprecise) for i, curve in curves])
            self.controller.invalidate_masks()

    @contextmanager
    def _retargeted(self, target: Target) -> Iterator[None]:
        """Within this context, exports have the ranks that suit `target`."""
        before = self.account.curves
        sites = zip(self.plan.sites, before, strict=True)
        self._set_curves([self.method.for_target(site, curve, target, self.rank_multiple) for site, curve in sites])
        try:
            yield
        finally:
            self._set_curves(before)

    def _set_curves(self, curves: Sequence[CostCurve]) -> None:
        self.controller.account = replace(self.account, curves=tuple(curves))
        for matrix, curve in zip(self.controller.matrices, curves, strict=True):
            matrix.cost_curve = curve
