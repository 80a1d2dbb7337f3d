"""Norms, losses and look-ups of the paper's models, as they train fast on a GPU; elsewhere they are torch's own.

`torch.compile` makes layer norms and the loss of an output layer one pass over memory: in the training of the paper's
models as fast as Triton kernels written by hand, or 2% slower (docs/log/speed-gpu.md). The gradient of a look-up is
summed up by PyTorch in a dozen kernels, which sort the words. For few words, such as characters, a product with their
one-hot rows is faster, and its order of sums does not change.

Shapes: D = width, N = targets, or words in a batch, V = words.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import MULTIPLE, half_dtype, padded, product
from rankwise.modules import is_observed

FEW = 1024
"""Words of a table that count as few."""


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


def look_up(module: nn.Module, index: Any) -> Tensor:
    """`module(index)`."""
    if type(module) is nn.Embedding and not is_observed(module):
        plain = module.padding_idx is None and module.max_norm is None and not module.scale_grad_by_freq
        dtype = half_dtype(module.weight)
        if plain and not module.sparse and can_fuse(module.weight) and dtype and module.num_embeddings <= FEW:
            y: Tensor = _Embedding.apply(module.weight, index, dtype)  # type: ignore[no-untyped-call]
            return y
    y = module(index)
    return y


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype, ctx.num_words = dtype, weight_VD.shape[0]
        return F.embedding(index, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        index_N, dy_ND = index.flatten(), dy.flatten(0, -2)
        width = -(-ctx.num_words // MULTIPLE) * MULTIPLE
        one_hot_NV = dy.new_zeros(index_N.numel(), width, dtype=ctx.dtype).scatter_(1, index_N[:, None], 1)
        rows = product(one_hot_NV.t(), padded(dy_ND, ctx.dtype))
        return rows[: ctx.num_words, : dy_ND.shape[1]].to(dy.dtype), None, None
