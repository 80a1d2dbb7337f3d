"""Checks of a user's training loop that need no state of a backward pass: who trains the weights, and how.

An optimizer that was built before the model was gated holds the old weights and trains no new ones. A loss scale that
the gates do not know of makes their gradients thousands of times too large. What is made in inference mode cannot be
trained.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.layers import GatedLayer
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import listed
from rankwise.core.sharding import are_finite
from rankwise.errors import RankwiseError


class StaleOptimizerCheck:
    """Remembers the weights of a model before it is gated, and before it is sharded, without keeping them alive.

    No counter tells whether a weight is trained: fused optimizers, kernels, CUDA graphs and copies into `.data` leave
    `_version` as it is, and a learning rate of zero changes no value. So the check looks for who holds the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        self._gated: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        """The weights of the gated model, in whose place `fully_shard` puts others."""
        self._sums: list[Tensor] | None = None
        """The sums of the new weights at the first step."""

    def note_gated(self, model: nn.Module) -> None:
        """Remember the weights of the gated model too."""
        self._gated = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]

    def check(self, model: nn.Module, matrices: Sequence[GatedMatrix]) -> None:
        """Raise at the second step if an optimizer holds old weights, none holds a new one, and none has changed.

        Once that is known not to be so, or no old weight is alive, later steps check nothing.
        """
        if not self._before:
            return
        alive = [(name, weight) for name, ref in self._before if (weight := ref()) is not None]
        gated = [(name, weight) for name, ref in self._gated if (weight := ref()) is not None]
        present = {id(parameter) for parameter in model.parameters()}
        old = {id(weight): name for name, weight in (*alive, *gated) if id(weight) not in present}
        if not old:
            self._before = []
            return
        known = {id(weight) for _, weight in alive}
        weights = [parameter for matrix in matrices for parameter in matrix.parameters() if parameter.requires_grad]
        new = [parameter for parameter in weights if id(parameter) not in known]
        if not new or not _have_gradients(matrices):
            return
        if self._sums is None:
            self._sums = _sums(new)
            return
        # an optimizer that is no longer referenced may still wait for the garbage collector
        if not (_held(old, new) and gc.collect() >= 0 and (held := _held(old, new)) and _are_equal(self._sums, new)):
            self._before, self._sums = [], None
            return
        by = "`fully_shard`" if set(held) & {name for name, _ in gated} else "the pruner"
        raise RankwiseError(
            f"The optimizer must hold the weights of the gated model, but holds {len(held)} that {by} replaced "
            f"({listed(held)}); those in their place have not changed since the last `pruner.step()`. Build the "
            "optimizer after the Pruner, and after `fully_shard` if you use it, from `pruner.weight_parameters()`. To "
            "train the gates alone, freeze the weights with `requires_grad_(False)`."
        )

    def __getstate__(self) -> dict[str, Any]:
        # a copy gets an optimizer of its own, and weak references cannot be pickled
        return {"_before": [], "_gated": [], "_sums": None}


def check_loss_scale() -> None:
    """Refuse to take gradients as they are where a `GradScaler` is in use: z is in no optimizer that it unscales."""
    # one that is no longer referenced may still wait for the garbage collector
    if _loss_scales() and gc.collect() >= 0 and (scales := _loss_scales()):
        raise RankwiseError(
            f"`grad_scale` must be given where losses are scaled, but is not, and a GradScaler scales them by "
            f"{max(scales):g}. Call `pruner.step(grad_scale=scale)` with `scale = scaler.get_scale()` from before "
            "`scaler.update()`; pass grad_scale=1.0 if the scaler belongs to another model."
        )


def _loss_scales() -> list[float]:
    """The scales of every `GradScaler` that has scaled a loss."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]
    # the scale is made when a loss is scaled for the first time
    scales = [each.get_scale() for each in found if each.is_enabled() and each._scale is not None]
    return [scale for scale in scales if scale != 1.0]


def check_mode(model: nn.Module | None = None) -> None:
    """Refuse what is made in inference mode, and so cannot be trained."""
    weights = [] if model is None else list(model.named_parameters())
    made = [name for name, weight in weights if weight.is_inference()]
    if made or torch.is_inference_mode_enabled():
        what = f"{listed(made)} were made in it" if made else "this is within it"
        raise RankwiseError(
            f"A model that is pruned must be made and gated outside of `torch.inference_mode`, whose tensors cannot be "
            f"trained, but {what}. Use `torch.no_grad`, or leave it out."
        )


def optimizers_of(weights: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The optimizers that have taken a step with some of these weights."""
    wanted = {id(weight) for weight in weights}

    def find() -> list[torch.optim.Optimizer]:
        return [each for each in _optimizers() if any(id(weight) in wanted for weight in getattr(each, "state", ()))]

    # one that is no longer referenced may still wait for the garbage collector
    return find() if find() and gc.collect() >= 0 else []


class UnchangedWeightsCheck:
    """Warns once if no weight of a gated matrix has changed in the first steps: no optimizer trains them."""

    STEPS = 32
    """So many that a warm-up from zero and skipped steps of a loss scaler are over."""

    def __init__(self) -> None:
        self._sums: list[Tensor] | None = None
        self._left = self.STEPS

    def check(self, matrices: Sequence[GatedMatrix]) -> None:
        """Called in each step."""
        if self._left < 0:
            return
        if self._sums is None:
            self._sums = _sums(_trained(matrices))
        if self._left == 0 and self._sums and _are_equal(self._sums, _trained(matrices)):
            warnings.warn(
                f"No weight of a gated layer has changed in {self.STEPS} steps. Build the optimizer from "
                "`pruner.weight_parameters()`: gated layers have parameters of other names. Call `optimizer.step()` "
                "before `pruner.step()`; to train the gates alone, freeze the weights with `requires_grad_(False)`.",
                stacklevel=4,
            )
        self._left -= 1


def warn_of_modes(model: nn.Module) -> None:
    """Warn of gated layers in evaluation mode beside others that are trained."""
    layers = [(name, layer.training) for name, layer in model.named_modules() if isinstance(layer, GatedLayer)]
    fixed = [name for name, training in layers if not training]
    if fixed and len(fixed) < len(layers):
        warnings.warn(
            f"Gates learn in training mode, but these layers are in evaluation mode: {listed(fixed)}. The budget alone "
            "moves their gates. Call `model.train()`, or leave these layers out of the plan.",
            stacklevel=4,
        )


def _trained(matrices: Sequence[GatedMatrix]) -> list[nn.Parameter]:
    return [weight for matrix in matrices for weight in matrix.parameters() if weight.requires_grad]


def warn_if_not_finite(model: nn.Module) -> None:
    """Warn of weights that are NaN or infinite; the size is kept all the same."""
    weights = dict(model.named_parameters())
    found = zip(weights, are_finite([weight.detach() for weight in weights.values()]), strict=True)
    if names := [name for name, is_finite in found if not is_finite]:
        warnings.warn(
            f"A compact model must have finite weights, but {listed(names)} hold NaN or infinity: training has "
            "diverged. Load an earlier checkpoint, and train with a lower learning rate.",
            stacklevel=3,
        )


def _have_gradients(matrices: Sequence[GatedMatrix]) -> bool:
    """Whether a backward pass has reached a matrix; `zero_grad()` may have cleared its weights, but not z."""
    tensors = (tensor for matrix in matrices for tensor in (*matrix.parameters(), matrix.gate.z))
    return any(tensor is not None and tensor.grad is not None for tensor in tensors)


def _held(old: dict[int, str], new: Sequence[nn.Parameter]) -> list[str]:
    """The names of old weights that optimizers hold; none if an optimizer holds a new weight."""
    groups = [group for optimizer in _optimizers() for group in getattr(optimizer, "param_groups", ())]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return [] if any(id(parameter) in held for parameter in new) else [old[i] for i in old if i in held]


def _optimizers() -> list[torch.optim.Optimizer]:
    # `type(each)`, because `isinstance` may run an object's own code
    return [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]


def _sums(weights: Sequence[nn.Parameter]) -> list[Tensor]:
    """The sum of each weight, or of this process's shard of it."""
    parts = (getattr(weight, "_local_tensor", weight).detach() for weight in weights)
    return [part.sum(dtype=torch.float64) for part in parts]


def _are_equal(before: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> bool:
    now = _sums(weights)
    # NaN that stays NaN has not changed
    return len(before) == len(now) and all(
        torch.equal(a.to(b.device).nan_to_num(), b.nan_to_num()) for a, b in zip(before, now, strict=True)
    )
