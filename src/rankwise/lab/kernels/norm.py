"""Layer norm on a GPU, with what stands before it: `norm(x)` and `norm(x + dropout(y))` in one pass over memory.

PyTorch's own kernels are slow where the width is not a multiple of four, such as the 205 characters of enwik8, and for
the gradients of weight and bias. Shapes: N = rows, D = width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import half_dtype
from rankwise.modules import is_observed

WIDEST = 4096
"""The widest row that a program can hold."""


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
    from rankwise.lab.kernels.norm_kernels import LayerNorm

    y: Tensor = LayerNorm.apply(x, addend, weight_D, bias_D, eps, dtype, dropout)  # type: ignore[no-untyped-call]
    return y


def reference(x: Tensor, addend: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float, dropout: float) -> Tensor:
    """`F.layer_norm` of x + dropout(addend) over the last dimension."""
    total = x if addend is None else x + F.dropout(addend, dropout)
    return F.layer_norm(total, weight_D.shape, weight_D, bias_D, eps)
