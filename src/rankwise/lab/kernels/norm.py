"""Layer norm on a GPU, with what stands before it: `norm(x)` and `norm(x + dropout(y))` in one pass over memory.

PyTorch's own kernels are slow where the width is no multiple of four, such as the 205 characters of enwik8, and at the
gradients of weight and bias. Shapes: N = rows, D = width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import half_dtype
from rankwise.lab.kernels.dropout import draw
from rankwise.modules import is_observed

WIDEST = 4096
"""Numbers that a program holds at a time."""


def call(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """`module(x)`; under autocast in the dtype of the product that comes next."""
    if x.shape[-1] % 4 == 0 or not _fits(module, x):
        y: Tensor = module(x)
        return y
    return layer_norm(x, None, module.weight, module.bias, module.eps, half_dtype(x) or x.dtype)


def add_call(module: nn.LayerNorm, x: Tensor, addend: Tensor, dropout: nn.Dropout) -> Tensor:
    """`module(x + dropout(addend))`; under autocast in the dtype of the product that comes next."""
    if half_dtype(x) is None or not _fits(module, x) or is_observed(dropout):
        y: Tensor = module(x + dropout(addend))
        return y
    rate = dropout.p if dropout.training else 0.0
    return layer_norm(x, addend, module.weight, module.bias, module.eps, half_dtype(x) or x.dtype, rate)


def _fits(module: nn.LayerNorm, x: Tensor) -> bool:
    return can_fuse(x) and x.shape[-1] <= WIDEST and module.bias is not None and not is_observed(module)


def layer_norm(
    x: Tensor,
    addend: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    dropout: float = 0.0,
) -> Tensor:
    """`reference`, in `dtype`."""
    y: Tensor = _LayerNorm.apply(x, addend, weight_D, bias_D, eps, dtype, dropout)  # type: ignore[no-untyped-call]
    return y


def reference(x: Tensor, addend: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float, dropout: float) -> Tensor:
    """`F.layer_norm` of x + dropout(addend) over the last dimension."""
    total = x if addend is None else x + F.dropout(addend, dropout)
    return F.layer_norm(total, weight_D.shape, weight_D, bias_D, eps)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        dtype: torch.dtype,
        dropout: float,
    ) -> Tensor:
        from rankwise.lab.kernels.norm_kernels import norm_forward

        ctx.eps, ctx.dropout = eps, draw(dropout, x.device)
        ctx.save_for_backward(x, addend, weight_D)
        return norm_forward(x, addend, weight_D, bias_D, eps, dtype, ctx.dropout)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from rankwise.lab.kernels.norm_kernels import norm_backward

        x, addend, weight_D = ctx.saved_tensors
        return *norm_backward(dy, x, addend, weight_D, ctx.eps, ctx.dropout), None, None, None
