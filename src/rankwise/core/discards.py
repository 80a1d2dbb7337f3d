"""Gradients of batches that were thrown away.

`optimizer.zero_grad()` without a step throws away the gradients of a batch, but does not reach z, whose gradients would
be added to those of the next one. So a backward pass, before it adds anything to z, asks whether the gradients of
weights that the last one left are still there. Where they are gone, so are those of z.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from rankwise.core.control import Controller
    from rankwise.core.matrices import GatedMatrix


class Discards:
    """Watches the gradients of weights, to know when those of z are out of date.

    Gradients that were set to None, as `zero_grad()` does, are told by identity: what is there now is not what the
    last backward pass left. Those that are set to zero in place (`set_to_none=False`) are told by value, on their
    device. Gradients that do not outlive their backward pass say nothing: where a hook takes the optimizer's step, or
    where parameters are sharded and those of the pass are not those of the optimizer (FSDP2).
    """

    def __init__(self) -> None:
        self._task = -1
        self._starts = True
        self._left: list[tuple[nn.Parameter, TensorWeakRef]] = []
        """What the last backward pass left."""
        self._lasting: set[nn.Parameter] | None = None
        """Parameters whose gradient stays from step to step: zeroed in place, or by nobody. None: not yet known."""
        self._is_sharded = False

    def __reduce__(self) -> tuple[type[Discards], tuple[()]]:
        # of a copy, other tensors are watched
        return Discards, ()

    def listen(self, controller: Controller) -> None:
        """Be told of gradients on their way to z; again after z was made anew."""
        for matrix in controller.matrices:
            z = matrix.gate.z
            if z is not None and z.requires_grad and not z._backward_hooks:
                z.register_hook(_arrival(controller, matrix))  # type: ignore[no-untyped-call]

    def arrive(self, controller: Controller, matrix: GatedMatrix) -> None:
        """A gradient is on its way to the z of `matrix`. The first one of a backward pass finds what was left."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        owner = weakref.ref(controller)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(owner()))
        tensors = [gate.z for gate in controller.gates if gate.z is not None and gate.z.grad is not None]
        self._starts = not tensors
        if self._starts:
            return
        watched = [(weight, left) for weight, left in self._left if weight not in (self._lasting or ())]
        is_gone = bool(watched) and all(weight.grad is None or weight.grad is not left() for weight, left in watched)
        # what `zero_grad` of this loop does is known after the first step
        if not is_gone and self._left and (self._lasting is None or self._lasting):
            alive = _alive(controller.matrices, matrix)
            is_gone = alive is False
            if isinstance(alive, Tensor):
                for z in tensors:
                    z.grad = torch.where(alive.to(z.device), z.grad, 0.0)  # type: ignore[arg-type]
        if is_gone:
            self._starts = True
            for z in tensors:
                z.grad = None

    def _end(self, controller: Controller | None) -> None:
        """A backward pass is over."""
        if controller is None:
            return
        if self._starts and self._left:
            stayed = {weight for weight, left in self._left if weight.grad is not None and weight.grad is left()}
            self._lasting = (self._lasting or set()).difference(weight for weight, _ in self._left) | stayed
        watched: list[nn.Parameter] = []
        if self._lasting is None:
            self._is_sharded = any(map(_shards, controller.modules_of_model()))
        else:
            # one of each matrix is enough
            own = (_with_gradient(matrix._parameters.values(), self._lasting) for matrix in controller.matrices)
            watched = [weight for weights in own for weight in weights[:1]]
        if not watched:
            everywhere = (module._parameters.values() for module in controller.modules_of_model())
            watched = _with_gradient(weight for weights in everywhere for weight in weights)
        if self._is_sharded:
            watched = []
        self._left = [(weight, TensorWeakRef(weight.grad)) for weight in watched]  # type: ignore[arg-type]


def _arrival(controller: Controller, matrix: GatedMatrix) -> Callable[[Tensor], None]:
    # the hook belongs to z, which belongs to both: weak, or a model would hold itself
    owner, of = weakref.ref(controller), weakref.ref(matrix)

    def arrives(grad: Tensor) -> None:
        found, its_matrix = owner(), of()
        if found is not None and its_matrix is not None:
            found.discards.arrive(found, its_matrix)

    # a saved model is without it, and gets its own when masks are next drawn
    unserializable_hook(arrives)  # type: ignore[no-untyped-call]
    return arrives


def _alive(matrices: Iterable[GatedMatrix], arriving: GatedMatrix) -> Tensor | bool:
    """Whether some matrix still has gradients in all its weights: a number on the device, where they must be read.

    In the matrix whose z is next, weights may hold gradients of this backward pass already.
    """
    matrices = list(matrices)
    watched = [matrix for matrix in matrices if matrix is not arriving] or matrices
    found: list[Tensor] = []
    is_trained = False
    for matrix in watched:
        weights = [weight for weight in matrix._parameters.values() if weight is not None and weight.requires_grad]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        is_trained = is_trained or bool(weights)
        if grads and len(grads) == len(weights):
            found.append(torch.stack([grad.any() for grad in grads]).all())
    if not found:
        return not is_trained
    return torch.stack([one.to(found[0].device) for one in found]).any()


def _with_gradient(
    parameters: Iterable[nn.Parameter | None], without: Container[nn.Parameter] = ()
) -> list[nn.Parameter]:
    return [one for one in parameters if one is not None and one.grad is not None and one not in without]


def _shards(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__)
