"""Compression without training: SVD, whitened where there is calibration data."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from rankwise.adapters.generic import find_plan
from rankwise.core.budget import Budget
from rankwise.core.plan import Plan
from rankwise.pruner import Pruner


def compress(
    model: nn.Module,
    budget: Budget,
    calibration: Iterable[Any] | None = None,
    *,
    plan: Plan | None = None,
    rank_multiple: int = 1,
) -> nn.Module:
    """A new model of the size asked for, at once; `model` stays as it is.

    Ranks are shared out over the whole model: the components that carry most of their layer's output per parameter
    are kept. With `calibration` (batches of input for `model`) outputs are measured on those data.
    """
    # before the copy, which loses what `from_pretrained` notes of weights that it loaded
    plan = plan or find_plan(model)
    gated = copy.deepcopy(model)
    init = "svd" if calibration is None else "whitened"
    pruner = Pruner(gated, budget, "svd", plan, init, calibration=calibration, rank_multiple=rank_multiple)  # type: ignore[arg-type]
    return pruner.compact()
