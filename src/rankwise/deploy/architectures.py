"""Architectures that a saved model can name, so that it loads without a skeleton.

A package registers its own with `register`; those of `rankwise.lab` are imported when a saved model asks for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from rankwise.errors import CheckpointError, nearest


class Architecture(NamedTuple):
    """A model class and the frozen dataclass that it is built from and keeps as `model.config`."""

    config: type[Any]
    model: Callable[[Any], nn.Module]


REGISTERED: dict[str, Architecture] = {}
HOMES = {"sru": "rankwise.lab.models.sru", "transformer-xl": "rankwise.lab.models.transformer_xl"}
"""Modules that register an architecture when they are imported."""


def register(name: str, config: type[Any], model: Callable[[Any], nn.Module]) -> None:
    """Register an architecture, so that saved models can name it."""
    REGISTERED[name] = Architecture(config, model)


def names() -> list[str]:
    """Every architecture that can be built by name."""
    return list(dict.fromkeys([*HOMES, *REGISTERED]))


def find(name: str) -> Architecture:
    """An architecture by name."""
    if name not in REGISTERED and name in HOMES:
        import_module(HOMES[name])
    if name not in REGISTERED:
        raise CheckpointError(
            f"`architecture` must be one of {', '.join(names())}, but is {name!r} instead.{nearest(str(name), names())}"
        )
    return REGISTERED[name]


def name_of(config: Any) -> str:
    """The name of the architecture that a configuration belongs to."""
    return next(name for name, known in REGISTERED.items() if known.config is type(config))


def build(config: Any) -> nn.Module:
    """A model with fresh weights."""
    return REGISTERED[name_of(config)].model(config)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Architecture and shape of the dense model, for JSON; None where its architecture is not registered."""
    if type(model) not in [known.model for known in REGISTERED.values()]:
        return None
    return describe_config(model.config)


def describe_config(config: Any) -> dict[str, Any]:
    """Architecture and shape, for JSON."""
    return {"architecture": name_of(config), **dataclasses.asdict(config)}


def from_description(description: Mapping[str, Any]) -> Any:
    """The configuration that was described."""
    settings = dict(description)
    name = settings.pop("architecture", None)
    known = find(name)
    try:
        return known.config(**settings)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The description of a {name} model must hold its settings, but {error}.") from error
