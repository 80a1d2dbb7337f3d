"""relu and dropout in one pass over memory on a GPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import can_fuse
from rankwise.modules import is_observed


def call(x: Tensor, dropout: nn.Dropout) -> Tensor:
    """`dropout(relu(x))`."""
    if not can_fuse(x) or is_observed(dropout):
        y: Tensor = dropout(F.relu(x))
        return y
    return relu_dropout(x, dropout.p if dropout.training else 0.0)


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """`F.dropout(F.relu(x), dropout)`."""
    from rankwise.lab.kernels.relu_kernels import ReluDropout

    y: Tensor = ReluDropout.apply(x, dropout)  # type: ignore[no-untyped-call]
    return y
