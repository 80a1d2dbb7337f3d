"""Modules that turn into others in place.

Whoever holds the module (several parents, a Python list, the user's own variable for a model that is itself a
layer) sees the new one, so shared modules and root modules need no special care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn


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
    undo: list[Callable[[], None]] = []
    try:
        for module, other in pairs:
            undo.append(become(module, other))
        yield
    finally:
        for step in undo:
            step()
