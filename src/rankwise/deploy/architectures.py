"""Architectures that a saved model can name, so that it loads without a skeleton.

A package registers its own with `register`; those of `rankwise.lab` are imported when a saved model asks for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from rankwise.errors import CheckpointError, nearest

REGISTERED: dict[str, tuple[type[Any], Callable[[Any], nn.Module]]] = {}
"""By name: the frozen dataclass that a model is built from and keeps as `model.config`, and the class of the model."""
HOMES = {"sru": "rankwise.lab.models.sru", "transformer-xl": "rankwise.lab.models.transformer_xl"}
"""Modules that register an architecture when they are imported."""


def register(name: str, config: type[Any], model: Callable[[Any], nn.Module]) -> None:
    """Register an architecture, so that saved models can name it."""
    REGISTERED[name] = (config, model)


@contextmanager
def building_at_most(number: int) -> Iterator[None]:
    """Stop this thread from making a model of more than so many tensors: a description may ask for any number."""
    thread, made = get_ident(), count()

    def check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if get_ident() == thread and next(made) >= number:
            raise CheckpointError(f"it describes a model of more than {number:,} tensors, which are not there")

    hook = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _name_of(config: Any) -> str:
    return next(name for name, (kind, _) in REGISTERED.items() if kind is type(config))


def build(config: Any) -> nn.Module:
    """A model with fresh weights."""
    return REGISTERED[_name_of(config)][1](config)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Architecture and shape of the dense model, for JSON; None where its architecture is not registered."""
    return describe_config(model.config) if type(model) in [made for _, made in REGISTERED.values()] else None


def describe_config(config: Any) -> dict[str, Any]:
    """Architecture and shape, for JSON."""
    return {"architecture": _name_of(config), **dataclasses.asdict(config)}


def from_description(description: Mapping[str, Any]) -> Any:
    """The configuration that was described."""
    settings = dict(description)
    name = settings.pop("architecture", None)
    if name not in REGISTERED and name in HOMES:
        import_module(HOMES[name])
    if name not in REGISTERED:
        known = list(dict.fromkeys([*HOMES, *REGISTERED]))
        raise CheckpointError(
            f"`architecture` must be one of {', '.join(known)}, but is {name!r} instead.{nearest(str(name), known)}"
        )
    try:
        return REGISTERED[name][0](**settings)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CheckpointError(f"The description of a {name} model must hold its settings, but {error}.") from error
