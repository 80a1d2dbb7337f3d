"""Look-ups in a small table on a GPU, such as one of characters.

PyTorch sums the gradient up by sorting the words: a dozen kernels. For few words a product with their one-hot rows is
faster, and its order of sums does not change.  Shapes: N = words in a batch, V = words of the table, D = width.
"""

from __future__ import annotations

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


def call(module: nn.Module, index: Any) -> Tensor:
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
