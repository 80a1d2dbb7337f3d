"""What a family of models wants done when pruning has changed the layers of one of its models.

Filled from above (`rankwise.hf`), so that the pruner need not know whose models it prunes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

ON_CHANGE: list[Callable[[nn.Module], None]] = []
"""Told of every model that has been gated, and of every compact or rounded one that was made or loaded."""


def changed(model: nn.Module) -> None:
    """Tell every family."""
    for tell in ON_CHANGE:
        tell(model)
