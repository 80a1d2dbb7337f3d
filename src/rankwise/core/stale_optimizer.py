"""Detects an optimizer that was built before the model was gated: it holds the old weights and trains no new ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.matrices import GatedMatrix
from rankwise.core.plan import listed
from rankwise.errors import RankwiseError


class StaleOptimizerCheck:
    """Remembers the weights of a model before it is gated, without keeping them alive.

    No counter tells whether a weight is trained: fused optimizers, kernels, CUDA graphs and copies into `.data` leave
    `_version` as it is, and a learning rate of zero changes no value. So the check looks for who holds the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        self._sums: list[Tensor] | None = None
        """The sums of the new weights at the first step."""

    def check(self, model: nn.Module, matrices: Sequence[GatedMatrix]) -> None:
        """Raise at the second step if an optimizer holds old weights, none holds a new one, and none has changed.

        Once that is known not to be so, or no old weight is alive, later steps check nothing.
        """
        if not self._before:
            return
        alive = [(name, weight) for name, ref in self._before if (weight := ref()) is not None]
        present = {id(parameter) for parameter in model.parameters()}
        old = {id(weight): name for name, weight in alive if id(weight) not in present}
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
        raise RankwiseError(
            f"The optimizer must hold the weights of the gated model, but holds {len(held)} that the pruner replaced "
            f"({listed(held)}); those in their place have not changed since the last `pruner.step()`. Build the "
            "optimizer after the Pruner, from `pruner.weight_parameters()`. To train the gates alone, freeze the "
            "weights with `requires_grad_(False)`."
        )

    def __getstate__(self) -> dict[str, Any]:
        # a copy gets an optimizer of its own, and weak references cannot be pickled
        return {"_before": [], "_sums": None}


def _have_gradients(matrices: Sequence[GatedMatrix]) -> bool:
    """Whether a backward pass has reached a matrix; `zero_grad()` may have cleared its weights, but not z."""
    tensors = (tensor for matrix in matrices for tensor in (*matrix.parameters(), matrix.gate.z))
    return any(tensor is not None and tensor.grad is not None for tensor in tensors)


def _held(old: dict[int, str], new: Sequence[nn.Parameter]) -> list[str]:
    """The names of old weights that optimizers hold; none if an optimizer holds a new weight."""
    # `type(each)`, because `isinstance` may run an object's own code
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return [] if any(id(parameter) in held for parameter in new) else [old[i] for i in old if i in held]


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
