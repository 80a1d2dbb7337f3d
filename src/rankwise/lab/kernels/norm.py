"""Layer norm of x + dropout(y) on a GPU in one pass over memory, as `torch.compile` makes it.

Without it the sum, the dropout and the norm are passes of their own. Triton kernels written by hand were 2% faster in
the training of Transformer-XL (docs/log/speed-gpu.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import half_dtype
from rankwise.modules import is_observed


def norm_of_sum(module: nn.LayerNorm, x: Tensor, addend: Tensor, dropout: nn.Dropout) -> Tensor:
    """`module(x + dropout(addend))`; in training under autocast in the dtype of the product that comes next."""
    dtype, is_training = half_dtype(x), torch.is_grad_enabled()
    if dtype is None or not is_training or not can_fuse(x) or is_observed(module) or is_observed(dropout):
        y: Tensor = module(x + dropout(addend))
        return y
    rate = dropout.p if dropout.training else 0.0
    y = _compiled()(x, addend, module.weight, module.bias, module.eps, rate, dtype)
    return y


def reference(
    x: Tensor, addend: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dropout: float, dtype: torch.dtype
) -> Tensor:
    """`F.layer_norm` of x + dropout(addend) over the last dimension, in `dtype`."""
    return F.layer_norm(x + F.dropout(addend, dropout), weight_D.shape, weight_D, bias_D, eps).to(dtype)


@cache
def _compiled() -> Any:
    return torch.compile(reference, dynamic=False)
