"""Checks of a user's training loop that need no state of a backward pass: who trains the weights, and how.

An optimizer that was built before the model was gated holds the old weights and trains no new ones. A loss scale that
the gates do not know of makes their gradients thousands of times too large. What is made in inference mode cannot be
trained.
"""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankwise.core.layers import GatedLayer
from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import listed
from rankwise.core.sharding import are_finite
from rankwise.errors import RankwiseError


class OptimizerCheck:
    """Checks the optimizers that take steps between those of a pruner: whose weights they hold, and who calls them."""

    def __init__(self, model: nn.Module) -> None:
        _watch_optimizers()
        self._since = next(_NUMBERS)
        # weak references, so that weights that were replaced are freed
        self._before = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        self._gated: list[tuple[str, weakref.ref[nn.Parameter]]] = []
        """The weights of the gated model, in whose place `fully_shard` puts others."""

    def note_gated(self, model: nn.Module) -> None:
        """Remember the weights of the gated model too."""
        self._gated = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]

    def check(self, model: nn.Module, matrices: Sequence[GatedMatrix], *, takes_scale: bool) -> None:
        """Raise if an optimizer trains weights that were replaced, or if gates would learn from a scaled loss.

        Args:
            takes_scale: whether the gates are about to take gradients without dividing them by a loss scale.
        """
        steps = [(each, scaler) for each, (number, scaler) in _LAST_STEPS.items() if number > self._since]
        if self._before and steps:
            self._check_weights(model, matrices, {id(weight) for each, _ in steps for weight in _weights_of(each)})
        for optimizer, ref in steps if takes_scale else ():
            scaler = None if ref is None else ref()
            if scaler is not None and (scale := scaler.get_scale()) != 1.0 and _trains(optimizer, model):
                raise RankwiseError(
                    "`grad_scale` must be given where losses are scaled, but is not, and a GradScaler scales them by "
                    f"{scale:g}. Call `pruner.step(grad_scale=scale)` with `scale = scaler.get_scale()` from before "
                    "`scaler.update()`."
                )
        self._since = next(_NUMBERS)

    def _check_weights(self, model: nn.Module, matrices: Sequence[GatedMatrix], trained: set[int]) -> None:
        """Raise if weights that were replaced are among the `trained`, and none of those in their place."""
        before, gated = _names(self._before), _names(self._gated)
        present = {id(weight) for weight in model.parameters()}
        new = {id(weight) for weight in _trained(matrices)} - before.keys()
        held = [name for key, name in (before | gated).items() if key in trained - present]
        if held and new and not new & trained:
            by = "`fully_shard`" if set(held) & set(gated.values()) else "the pruner"
            raise RankwiseError(
                f"The optimizer must hold the weights of the gated model, but holds {len(held)} that {by} replaced "
                f"({listed(held)}) and none of those in their place. Build the optimizer after the Pruner, and after "
                "`fully_shard` if you use it, from `pruner.weight_parameters()`. To train the gates alone, freeze the "
                "weights with `requires_grad_(False)`."
            )
        if new & trained or not (new or held):
            self._before = []

    def __reduce__(self) -> tuple[type[OptimizerCheck], tuple[nn.Module]]:
        # a copy gets an optimizer of its own, and weak references cannot be pickled
        return OptimizerCheck, (nn.Module(),)


_NUMBERS = itertools.count()
_LAST_STEPS: WeakKeyDictionary[Optimizer, tuple[int, weakref.ref[GradScaler] | None]] = WeakKeyDictionary()
"""The number of each optimizer's last step, in the order of steps, and the `GradScaler` that took it."""


@cache
def _watch_optimizers() -> None:
    """Note every step of an optimizer from now on: from when the first pruner is made."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    # what is compiled cannot look at its callers
    if not torch.compiler.is_compiling():
        caller = running(GradScaler.step)
        _LAST_STEPS[optimizer] = next(_NUMBERS), None if caller is None else weakref.ref(caller["self"])


def running(function: Callable[..., Any]) -> dict[str, Any] | None:
    """The variables of the innermost call of a Python function that has not returned yet; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


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


def other_optimizers(weights: Iterable[nn.Parameter], known: Sequence[Any]) -> list[Optimizer]:
    """The optimizers with a state of some of these weights, without those whose state `known` ones share."""
    wanted = {id(weight) for weight in weights}

    def find() -> list[Optimizer]:
        # a search of memory, because one whose state was loaded may have taken no step yet
        found = [(each, getattr(each, "state", {})) for each in gc.get_objects() if issubclass(type(each), Optimizer)]
        # a wrapper, as of Accelerate, has the state of the optimizer inside
        others = ((each, state) for each, state in found if all(state is not one.state for one in known))
        return [each for each, state in others if any(id(weight) in wanted for weight in state)]

    # one that is no longer referenced may still wait for the garbage collector
    return find() if find() and gc.collect() >= 0 else []


class UnchangedWeightsCheck:
    """Warns once if no weight of a gated matrix has changed in the first steps: no optimizer trains them."""

    STEPS = 32
    """So many that a warm-up from zero and skipped steps of a loss scaler are over."""

    def __init__(self) -> None:
        self._steps, self._sums = 0, torch.empty(0)

    def check(self, matrices: Sequence[GatedMatrix]) -> None:
        """Called in each step."""
        if self._steps == 0:
            self._sums = _sums(_trained(matrices))
        if self._steps == self.STEPS and len(self._sums) and torch.equal(self._sums, _sums(_trained(matrices))):
            warnings.warn(
                f"No weight of a gated layer has changed in {self.STEPS} steps. Build the optimizer from "
                "`pruner.weight_parameters()`: gated layers have parameters of other names. Call `optimizer.step()` "
                "before `pruner.step()`; to train the gates alone, freeze the weights with `requires_grad_(False)`.",
                stacklevel=4,
            )
        self._steps += 1


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


def _names(weights: Iterable[tuple[str, weakref.ref[nn.Parameter]]]) -> dict[int, str]:
    """The names of the weights that are still alive, by id."""
    return {id(weight): name for name, ref in weights if (weight := ref()) is not None}


def _weights_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    weights = {id(weight) for weight in model.parameters()}
    return any(id(weight) in weights for weight in _weights_of(optimizer))


def _sums(weights: Sequence[nn.Parameter]) -> Tensor:
    """The sum of each weight, or of this process's shard of it."""
    parts = (getattr(weight, "_local_tensor", weight).detach() for weight in weights)
    # NaN that stays NaN has not changed
    return torch.tensor([float(part.sum(dtype=torch.float64)) for part in parts], dtype=torch.float64).nan_to_num()
