"""Layer norm of rows whose width is no multiple of four, which PyTorch's own kernels on a GPU are slow at.

The 205 characters of enwik8 are such a width. Shapes: N = rows, D = width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankwise.kernels.linear import half_dtype
from rankwise.kernels.sru import can_fuse
from rankwise.modules import is_observed


def call(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """`module(x)`; under autocast in the dtype of the product that comes next."""
    width = x.shape[-1]
    if width % 4 == 0 or width > 4096 or not can_fuse(x) or is_observed(module) or module.bias is None:
        y: Tensor = module(x)
        return y
    return layer_norm(x, module.weight, module.bias, module.eps, half_dtype(x) or x.dtype)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`F.layer_norm` over the last dimension, in `dtype`."""
    y: Tensor = _LayerNorm.apply(x, weight_D, bias_D, eps, dtype)  # type: ignore[no-untyped-call]
    return y


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        from rankwise.kernels.norm_kernels import norm_forward

        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return norm_forward(x, weight_D, bias_D, eps, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from rankwise.kernels.norm_kernels import norm_backward

        x, weight_D = ctx.saved_tensors
        return *norm_backward(dy, x, weight_D, ctx.eps), None, None
