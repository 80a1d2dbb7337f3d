"""What a family of models needs done when pruning has changed the layers of one of its models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module

from torch import nn

ON_CHANGE: list[Callable[[nn.Module], None]] = []
"""Called with every model that has been gated, and with every compact or rounded one that was made or loaded."""
HOMES = {"transformers": "rankwise.hf"}
"""Packages of models, and the module that adds to `ON_CHANGE` for them when it is imported."""


def changed(model: nn.Module) -> None:
    """Call all of `ON_CHANGE`. The stock `save_pretrained` of a changed model would write random weights unnoticed."""
    packages = {base.__module__.partition(".")[0] for kind in {*map(type, model.modules())} for base in kind.__mro__}
    for package in packages & HOMES.keys():
        try:
            import_module(HOMES[package])
        except (ImportError, AttributeError) as error:
            warnings.warn(
                f"rankwise cannot save or load models with this version of {package}: {error}.",
                RuntimeWarning,
                stacklevel=3,
            )
    for call in ON_CHANGE:
        call(model)
