"""What a checkpoint that is loaded into a gated model must be.

`load_state_dict(strict=False)` does not report what it leaves out: the weights of a dense model, or the gates. In both
cases training would continue with other weights or gates than were saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

ARGUMENTS = ("the budget in parameters", "anneal_steps", "seed", "the settings of the method, or `loss`")
"""What a resumed run must repeat; a checkpoint holds their values, the last as a checksum."""
MADE_WITH = "made_with"
DENSE = "The state must be that of the model"


def check_layer(state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Refuse the weight of the dense layer that a gated one replaced; once for all layers."""
    if f"{prefix}weight" in state and not any(DENSE in error for error in errors):
        errors.append(
            f"{DENSE} that `rankwise.Pruner` gated, but it holds {prefix}weight of the dense model. Load it before the "
            "Pruner is made, or load the `state_dict()` of the gated model."
        )


def check_gates(state: dict[str, Any], prefix: str, gate: nn.Module, errors: list[str]) -> None:
    """Refuse the weights of a gated matrix without its gate; `prefix` is the name of the matrix."""
    own = [name for name in state if name.startswith(prefix)]
    if own and any(True for _ in gate.buffers()) and not any(name.startswith(f"{prefix}gate.") for name in own):
        errors.append(
            f"The state must hold gates too, but of {prefix.removesuffix('.')} it holds the weights alone. Save the "
            "whole `state_dict()`: gates and steps are buffers."
        )


def check_arguments(state: dict[str, Any], prefix: str, arguments: Sequence[int]) -> None:
    """Warn where a pruner that was made with other arguments has saved a state.

    Args:
        prefix: the name of the controller.
        arguments: the values of `ARGUMENTS` here.
    """
    saved = state.get(f"{prefix}{MADE_WITH}")
    found = list(arguments) if saved is None or saved.is_meta else saved.tolist()
    differing = [
        name if name == ARGUMENTS[-1] else f"{name} ({was:,} there, {now:,} here)"
        for name, was, now in zip(ARGUMENTS, found, arguments, strict=False)
        if was != now
    ]
    if differing:
        warnings.warn(
            f"The checkpoint was saved by a pruner that was made with other arguments: {', '.join(differing)}. A run "
            "that is resumed from it will not be the same run. Make the pruner with the arguments of the checkpoint.",
            stacklevel=2,
        )
