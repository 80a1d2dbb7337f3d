"""Modules that turn into others in place, and copies of models, of those too that keep what they have computed.

In place, because whoever holds the module (several parents, a Python list, the user's own variable for a model that is
itself a layer) then sees the new one, so shared modules and root modules need no special care.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def hooks(module: nn.Module) -> dict[str, object]:
    """The part of a module's `__dict__` that others have hung on it."""
    return {name: value for name, value in vars(module).items() if "_hook" in name}


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) was applied to this module, of whose class it then makes a subclass."""
    return own_class(module) is not type(module)


def own_class(module: nn.Module) -> type:
    """The class of a module without what `fully_shard` made of it."""
    # mypy thinks that classes of modules cannot be hashed
    kind: Any = type(module)
    return _own_class(kind)


@lru_cache(maxsize=1024)
def _own_class(kind: Any) -> type:
    # by name, because importing the package takes long
    names = [base.__name__ for base in kind.__mro__]
    own: type = kind.__mro__[names.index("FSDPModule") + 1] if "FSDPModule" in names else kind
    return own


def _sharded_class(like: Any, kind: Any) -> type:
    """`kind` as a class that `fully_shard` made, as it made `like`."""
    wrapper = next(base for base in like.__mro__ if base.__name__ == "FSDPModule")
    return type(f"FSDP{kind.__name__}", (wrapper, kind), {"__deepcopy__": like.__deepcopy__})


def _is_of_fsdp(name: str) -> bool:
    """Whether `fully_shard` has set an attribute of this name."""
    return name.startswith(("__composable_api", "_is_fsdp_", "_fsdp_"))


def become(module: nn.Module, other: nn.Module) -> Callable[[], None]:
    """Turn `module` into `other`, keeping its identity, its mode and its hooks; what is returned undoes it."""
    kind, state = module.__class__, module.__dict__

    def undo() -> None:
        module.__class__, module.__dict__ = kind, state

    other.train(module.training)
    kept = {**hooks(module), **{name: value for name, value in state.items() if _is_of_fsdp(name)}}
    module.__class__ = _sharded_class(kind, type(other)) if is_fully_sharded(module) else type(other)
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
    module's forward for training in mixed precision stays with the model, and so do FSDP2 and the wrappers of
    activation checkpointing.

    Args:
        memo: what counts as copied already, by the id of the original, as in `copy.deepcopy`.
        instead: modules of the copy in place of the model's own, whose hooks they get.
    """
    made = {id(tensor): tensor.detach().clone() for module in model.modules() for tensor in _computed(vars(module))}
    given = {id(own): other for own, other in (instead or {}).items()}
    known: dict[int, object] = {**made, **(memo or {}), **given}
    with _without_fsdp(model):
        for own, other in (instead or {}).items():
            vars(other).update(copy.deepcopy(hooks(own), known))
        made_copy = copy.deepcopy(model, known)
    for module in made_copy.modules():
        _unwrap_forward(module)
        for name, child in module._modules.items():
            module._modules[name] = getattr(child, "_checkpoint_wrapped_module", child)
    return made_copy


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Take off what `fully_shard` has put on modules, which cannot be copied, for as long as this lasts."""
    before = [(module, type(module), vars(module)) for module in model.modules() if any(map(_is_of_fsdp, vars(module)))]
    try:
        for module, _, state in before:
            module.__class__ = own_class(module)
            module.__dict__ = {
                name: _without_fsdp_hooks(value) if "_hook" in name else value
                for name, value in state.items()
                if not _is_of_fsdp(name)
            }
        yield
    finally:
        for module, kind, state in before:
            module.__class__, module.__dict__ = kind, state


def _without_fsdp_hooks(value: object) -> object:
    if not isinstance(value, OrderedDict):
        return value
    homes = {key: str(getattr(getattr(hook, "hook", hook), "__module__", "")) for key, hook in value.items()}
    return OrderedDict(
        (key, hook) for key, hook in value.items() if not homes[key].startswith("torch.distributed.fsdp.")
    )


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
