"""What `torch.compile` makes one pass over memory in training on a GPU: layer norms, and the loss of an output layer.

Elsewhere they are torch's own operations. In the training of the paper's models these are as fast as Triton kernels
written by hand, or 2% slower (docs/log/speed-gpu.md).  Shapes: D = width, N = targets, V = words.
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


def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """`module(x)`; where it is compiled, in the dtype of the product that comes next.

    torch's own kernels are slow only where the width is not a multiple of four, such as the 205 characters of enwik8.
    """
    if x.shape[-1] % 4 == 0 or not _can_compile(x, module):
        y: Tensor = module(x)
        return y
    y = _compiled(_norm)(x, module.weight, module.bias, module.eps, half_dtype(x))
    return y


def norm_of_sum(module: nn.LayerNorm, x: Tensor, addend: Tensor, dropout: nn.Dropout) -> Tensor:
    """`module(x + dropout(addend))`; where it is compiled, in the dtype of the product that comes next."""
    if not _can_compile(x, module, dropout):
        y: Tensor = module(x + dropout(addend))
        return y
    rate = dropout.p if dropout.training else 0.0
    y = _compiled(_norm_of_sum)(x, addend, module.weight, module.bias, module.eps, rate, half_dtype(x))
    return y


def cross_entropy(logits: Tensor, targets_N: Tensor, ignored: int) -> Tensor:
    """The mean loss in nats, in float32 or wider, over the targets that are not `ignored`; words are last in logits."""
    loss: Tensor = (_compiled(_cross_entropy) if _can_compile(logits) else _cross_entropy)(logits, targets_N, ignored)
    return loss


def _norm(x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.layer_norm(x, weight_D.shape, weight_D, bias_D, eps).to(dtype)


def _norm_of_sum(
    x: Tensor, addend: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, rate: float, dtype: torch.dtype
) -> Tensor:
    return F.layer_norm(x + F.dropout(addend, rate), weight_D.shape, weight_D, bias_D, eps).to(dtype)


def _cross_entropy(logits: Tensor, targets_N: Tensor, ignored: int) -> Tensor:
    logits_NV = logits.flatten(0, -2)
    return F.cross_entropy(
        logits_NV.to(torch.promote_types(logits.dtype, torch.float32)), targets_N, ignore_index=ignored
    )


def _can_compile(x: Tensor, *modules: nn.Module) -> bool:
    """Evaluation is not compiled: its shapes differ, and each would have to be compiled."""
    is_training = torch.is_grad_enabled() and half_dtype(x) is not None
    return is_training and can_fuse(x) and not any(map(is_observed, modules))


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)
