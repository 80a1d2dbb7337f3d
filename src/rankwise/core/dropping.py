"""Dropping the components that stay closed, in place and with the optimizers' state.

Once a controller has committed to the components of the export, the others are never multiplied again. P's columns, Q's
rows, the buffers of gates and controller, and the optimizers' state are narrowed to the components that are kept, so
that memory and time fall for the rest of the run. Parameters stay the same objects, which optimizers hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.controller import Controller
from rankwise.core.optimizer_checks import other_optimizers
from rankwise.core.sharding import mesh_of
from rankwise.errors import InvalidTypeError, RankwiseError


def drop_closed(controller: Controller, optimizers: Sequence[Any]) -> int:
    """Narrow every factorized matrix to the components of the export; the number of parameters that this saves."""
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "state", None), Mapping):
            raise InvalidTypeError(f"`drop_closed()` takes optimizers, but got a {type(optimizer).__name__}.")
    if not controller.learns:
        return 0
    controller.ensure_masks(evaluation=False)
    if not controller.has_committed:
        raise RankwiseError(
            "`drop_closed()` needs components that stay closed, but gates still move: this is step "
            f"{controller.step:,}, and the ramp has {controller.anneal_steps:,}. Call it after the ramp; with "
            'recipe="published" gates never stay.'
        )
    weights = [weight for matrix in controller.matrices for weight in matrix.parameters()]
    if controller.distributed.is_wrapped or mesh_of(weights) is not None:
        raise RankwiseError(
            "`drop_closed()` needs a model that no DistributedDataParallel or FSDP has wrapped, because they hold the "
            "shapes of its weights. Save a checkpoint, make model and pruner again, load it, call `drop_closed()`, and "
            "wrap the model then."
        )
    if others := other_optimizers(weights, optimizers):
        raise RankwiseError(
            "`drop_closed()` needs all optimizers of the weights, whose state it narrows, but one that has taken steps "
            f"was not passed ({type(others[0]).__name__}). Call `pruner.drop_closed(optimizer)` with all of them, and "
            "delete those that are done."
        )
    before = sum(weight.numel() for weight in weights)
    narrowed: list[Tensor] = []
    for matrix, kept in zip(controller.matrices, controller.kept_components(controller.limit), strict=True):
        size = matrix.gate.num_components
        dims = matrix.narrow(kept) if len(kept) < size else {}
        for weight, dim in dims.items():
            for optimizer in optimizers:
                _narrow_state(optimizer.state, weight, dim, size, kept)
        narrowed.append(kept if dims else torch.arange(size, device=kept.device))
    controller.narrow(narrowed)
    return before - sum(weight.numel() for weight in weights)


def _narrow_state(states: Mapping[Any, Any], weight: nn.Parameter, dim: int, size: int, kept: Tensor) -> None:
    """Narrow what an optimizer keeps of each component: moments of the weight's shape, or sums over its other side."""
    state: dict[str, Any] = states.get(weight, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() == weight.dim() and value.shape[dim] == size:
            state[name] = value.index_select(dim, kept.to(value.device))
