"""What a user's training loop may do that gates must notice.

`optimizer.zero_grad()` without a step discards the gradients of a batch, but does not know z, whose gradients would be
added to those of the next batch. So before a backward pass adds anything to z, it checks whether the gradients that the
last pass left in weights are still there. If they are gone, the gradients of z are cleared too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from rankwise.core.budget import count
from rankwise.core.layers import GatedLayer, gated_layers
from rankwise.core.matrices import GatedMatrix
from rankwise.core.optimizer_checks import running
from rankwise.core.plan import listed
from rankwise.errors import RankwiseError
from rankwise.swap import is_fully_sharded

if TYPE_CHECKING:
    from rankwise.core.controller import Controller


class GatedStructure:
    """What a gated model is made of: its size is counted for this structure and for no other."""

    def __init__(self, model: nn.Module, matrices: Sequence[GatedMatrix]) -> None:
        self.outside = count(model) - _size(matrices)
        """Parameters outside of gated matrices, which lose some when closed components are dropped."""
        self.modules = _modules(model)

    def check_gates(self, model: nn.Module, matrices: Sequence[GatedMatrix], what: str) -> None:
        """Refuse a model that has lost gated layers, or gained some that are not over `matrices`."""
        if {layer.matrix for layer in gated_layers(model)} != set(matrices):
            raise RankwiseError(self.message(model, matrices, what))

    def check(self, model: nn.Module, matrices: Sequence[GatedMatrix], what: str) -> None:
        """Refuse a model of another size too."""
        self.check_gates(model, matrices, what)
        if self.growth(model, matrices):
            raise RankwiseError(self.message(model, matrices, what))

    def growth(self, model: nn.Module, matrices: Sequence[GatedMatrix]) -> int:
        """The number of parameters that the model has gained since."""
        return count(model) - _size(matrices) - self.outside

    def message(self, model: nn.Module, matrices: Sequence[GatedMatrix], what: str) -> str:
        """What became of the model since, with the names of modules."""
        now, before = _modules(model), self.modules
        replaced = {name for name in before if name in now and now[name] != before[name]}
        for name, module in model.named_modules():
            if isinstance(module, GatedLayer) and name in before and module.matrix not in matrices:
                replaced.add(name)
        changes = {"added": now.keys() - before.keys(), "removed": before.keys() - now.keys(), "replaced": replaced}
        growth, size = self.growth(model, matrices), count(model)
        told = [f"{size:,} parameters instead of {size - growth:,}"] if growth else []
        for word, names in changes.items():
            # a part of a module that was changed as a whole goes without saying
            found = [name for name in (before | now) if name in names and not (names | replaced) & _around(name)]
            told += [f"{word}: {listed(found)}"] if found else []
        return (
            f"`{what}` needs the model as the pruner gated it, but it has changed since ({'; '.join(told)}). Make such "
            "changes before `rankwise.Pruner`, or to what `compact()` returns."
        )


def _size(matrices: Sequence[GatedMatrix]) -> int:
    return sum(parameter.numel() for matrix in matrices for parameter in matrix.parameters())


def _modules(model: nn.Module) -> dict[str, tuple[str, int]]:
    """The kind and the number of own parameters of each module but gated matrices, by its name."""
    return {
        name: (type(module).__name__, sum(p.numel() for p in module.parameters(recurse=False)))
        for name, module in model.named_modules()
        if not isinstance(module, GatedMatrix)
    }


def _around(name: str) -> set[str]:
    """The names of the modules that a module stands in, but that of the model."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


class ZeroGradDetector:
    """Watches the gradients of weights, to know when those of z are out of date.

    Gradients that were set to None, as `zero_grad()` does, are recognised by identity: the tensor is no longer the one
    that the last backward pass left. Gradients that were set to zero in place (`set_to_none=False`) are recognised by
    value, on their device, unless weights are sharded (FSDP2): in a backward pass their places hold whole ones.
    Gradients that do not outlive their backward pass tell nothing: if a hook takes the optimizer's step.
    """

    def __init__(self) -> None:
        self._task = -1
        """Autograd's number of the backward pass that was seen last."""
        self._is_first_pass = True
        """Whether that pass found no gradients in z: it is the first of its step."""
        self._left: dict[nn.Parameter, TensorWeakRef] = {}
        """The gradients that the last backward pass left in some weights."""
        self._lasting: set[nn.Parameter] | None = None
        """Parameters whose gradient tensor stays from step to step, zeroed in place or never. None while unknown."""
        self._is_sharded = False
        self._has_checked_clearing = False

    def __reduce__(self) -> tuple[type[ZeroGradDetector], tuple[()]]:
        # a copy of the model has other tensors to watch
        average = running(swa_utils.AveragedModel.__init__)
        if average is not None and average["use_buffers"]:
            raise RankwiseError(
                "An average of a gated model must copy the state of its gates, but `AveragedModel(use_buffers=True)` "
                "takes the mean of step counts and masks. Pass `use_buffers=False`: buffers are copied then."
            )
        return ZeroGradDetector, ()

    def register_hooks(self, controller: Controller) -> None:
        """Hook every z that has no hook yet, so that arriving gradients are seen."""
        for matrix in controller.matrices:
            z = matrix.gate.z
            if z is not None and z.requires_grad and not z._backward_hooks:
                z.register_hook(_hook(controller, matrix))  # type: ignore[no-untyped-call]

    def before_gradient(self, controller: Controller, matrix: GatedMatrix) -> None:
        """Check the gradients that were left, when the first gradient of a backward pass is about to reach a z."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        owner = weakref.ref(controller)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._after_backward(owner()))
        tensors = [gate.z for gate in controller.gates if gate.z is not None and gate.z.grad is not None]
        self._is_first_pass = not tensors
        if self._is_first_pass:
            self._check_cleared(controller, matrix)
            return
        watched = self._left.keys() - (self._lasting or set())
        is_gone = bool(watched) and watched.isdisjoint(self._stayed())
        # how the user's loop clears gradients is known after the first step
        if not is_gone and self._left and not self._is_sharded and (self._lasting is None or self._lasting):
            nonzero = _any_nonzero(controller.matrices, matrix)
            is_gone = nonzero is False
            if isinstance(nonzero, Tensor):
                for z in tensors:
                    z.grad = torch.where(nonzero.to(z.device), z.grad, 0.0)  # type: ignore[arg-type]
        if is_gone:
            self._is_first_pass = True
            for z in tensors:
                z.grad = None

    def _check_cleared(self, controller: Controller, matrix: GatedMatrix) -> None:
        """Warn in the second step if the gradients of the first are still there: it was taken within a batch."""
        if self._has_checked_clearing or not self._left:
            return
        self._has_checked_clearing = True
        can_tell = not self._is_sharded and len(controller.matrices) > 1
        if can_tell and self._left.keys() == self._stayed() and _any_nonzero(controller.matrices, matrix):
            warnings.warn(
                "`pruner.step()` must be called where `optimizer.step()` is, but the gradients of the last one were "
                "not cleared. If you accumulate gradients, call both after the last part of a batch, and then "
                "`optimizer.zero_grad()`.",
                stacklevel=2,
            )

    def _after_backward(self, controller: Controller | None) -> None:
        """Remember the gradients that this backward pass leaves."""
        if controller is None:
            return
        if self._is_first_pass and self._left:
            self._lasting = ((self._lasting or set()) - self._left.keys()) | self._stayed()
        watched: list[nn.Parameter] = []
        if self._lasting is None:
            self._is_sharded = any(map(is_fully_sharded, controller.modules_of_model()))
        else:
            # one parameter of each matrix is enough
            own = (_with_gradient(matrix._parameters.values(), self._lasting) for matrix in controller.matrices)
            watched = [weight for weights in own for weight in weights[:1]]
        if not watched:
            everywhere = (module._parameters.values() for module in controller.modules_of_model())
            watched = _with_gradient(weight for weights in everywhere for weight in weights)
        self._left = {weight: TensorWeakRef(weight.grad) for weight in watched}  # type: ignore[arg-type]

    def _stayed(self) -> set[nn.Parameter]:
        """The weights whose gradients are still those that the last backward pass left."""
        return {weight for weight, left in self._left.items() if weight.grad is not None and weight.grad is left()}


def _hook(controller: Controller, matrix: GatedMatrix) -> Callable[[Tensor], None]:
    # z holds its hook, and both of these hold z: weak references, so that a model does not keep itself alive
    controller_ref, matrix_ref = weakref.ref(controller), weakref.ref(matrix)

    def before_gradient(grad: Tensor) -> None:
        owner, gated = controller_ref(), matrix_ref()
        if owner is not None and gated is not None:
            owner.zero_grad_detector.before_gradient(owner, gated)

    # a saved model does not hold the hook; a loaded one registers its own when masks are next drawn
    unserializable_hook(before_gradient)  # type: ignore[no-untyped-call]
    return before_gradient


def _any_nonzero(matrices: Iterable[GatedMatrix], arriving: GatedMatrix) -> Tensor | bool:
    """Whether the gradients of all weights of some matrix are not zero: a tensor on the device if values decide.

    The matrix whose z comes next is left out if possible: its weights may already hold gradients of this pass.
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
