"""Modules that turn into others in place, and copies of models, of those too that keep what they have computed.

In place, because whoever holds the module (several parents, a Python list, the user's own variable for a model that is
itself a layer) then sees the new one, so shared modules and root modules need no special care.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def hooks(module: nn.Module) -> dict[str, object]:
    """The part of a module's `__dict__` that others have hung on it."""
    return {name: value for name, value in vars(module).items() if "_hook" in name}


def become(module: nn.Module, other: nn.Module) -> Callable[[], None]:
    """Turn `module` into `other`, keeping its identity, its mode and its hooks; what is returned undoes it."""
    kind, state = module.__class__, module.__dict__

    def undo() -> None:
        module.__class__, module.__dict__ = kind, state

    other.train(module.training)
    kept = hooks(module)
    module.__class__ = other.__class__
    module.__dict__ = {**other.__dict__, **kept}
    return undo


@contextmanager
def swapped(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Let each first module be the second for as long as this lasts."""
    with ExitStack() as undo:
        for module, other in pairs:
            undo.callback(become(module, other))
        yield


def copied(
    model: Model, memo: Mapping[int, object] | None = None, instead: Mapping[nn.Module, nn.Module] | None = None
) -> Model:
    """A copy of `model`.

    Tensors that modules have computed and kept, such as old-style weight norm's or a recurrent state, are copied
    without what they were computed from: as they are, torch does not copy them. What Accelerate has put around a
    module's forward for training in mixed precision stays with the model.

    Args:
        memo: what counts as copied already, by the id of the original, as in `copy.deepcopy`.
        instead: modules of the copy in place of the model's own, whose hooks they get.
    """
    made = {id(tensor): tensor.detach().clone() for module in model.modules() for tensor in _computed(vars(module))}
    given = {id(own): other for own, other in (instead or {}).items()}
    known: dict[int, object] = {**made, **(memo or {}), **given}
    for own, other in (instead or {}).items():
        vars(other).update(copy.deepcopy(hooks(own), known))
    made_copy = copy.deepcopy(model, known)
    for module in made_copy.modules():
        _unwrap_forward(module)
    return made_copy


def _unwrap_forward(module: nn.Module) -> None:
    """Give back the forward that Accelerate keeps as `_original_forward`; a second run keeps one that it wrapped."""
    original = vars(module).pop("_original_forward", None)
    if original is None:
        return
    own = inspect.unwrap(getattr(original, "__func__", original), stop=lambda function: not _is_of_amp(function))
    vars(module).pop("forward", None)
    if own is not type(module).forward:
        vars(module)["forward"] = MethodType(own, module) if isinstance(original, MethodType) else own


def _is_of_amp(function: Callable[..., object]) -> bool:
    """Whether a function was written by Accelerate or torch.amp, whatever it wraps."""
    home = str(getattr(function, "__globals__", {}).get("__name__"))
    return home.startswith(("accelerate.", "torch.amp."))


def _computed(value: object, around: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors with a history in a value and in what it holds."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, Mapping | list | tuple | set) and id(value) not in around:
        held: Iterable[object] = value.values() if isinstance(value, Mapping) else value
        for part in held:
            yield from _computed(part, (*around, id(value)))
