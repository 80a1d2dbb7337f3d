"""relu and dropout in one pass over memory on a GPU: the output says all that its gradient needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import can_fuse
from rankwise.lab.kernels.dropout import draw
from rankwise.modules import is_observed


def call(x: Tensor, dropout: nn.Dropout) -> Tensor:
    """`dropout(relu(x))`."""
    if not can_fuse(x) or is_observed(dropout):
        y: Tensor = dropout(F.relu(x))
        return y
    return relu_dropout(x, dropout.p if dropout.training else 0.0)


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """`F.dropout(F.relu(x), dropout)`."""
    y: Tensor = _ReluDropout.apply(x, dropout)  # type: ignore[no-untyped-call]
    return y


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float) -> Tensor:
        from rankwise.lab.kernels.relu_kernels import relu_forward

        y = relu_forward(x, draw(dropout, x.device))
        ctx.dropout = dropout
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        from rankwise.lab.kernels.relu_kernels import relu_backward

        (y,) = ctx.saved_tensors
        return relu_backward(dy, y, ctx.dropout), None
