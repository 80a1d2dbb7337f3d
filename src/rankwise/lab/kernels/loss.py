"""The loss of a plain output layer on a GPU, without logits in float32: cross entropy read from the product as it lies.

The columns that fill the words up to a multiple of 16 bytes (`linear.py`) never leave: the loss passes over them, and
writes their gradient as zero. Shapes: N = targets, D = width, V = words, W = words filled up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import half_dtype, padded, product
from rankwise.modules import is_observed

MOST = 4096
"""Words that a program holds the logits of."""


def fits(output: nn.Module) -> bool:
    """Whether `output_loss` can take the place of the layer and its cross entropy."""
    if type(output) is not nn.Linear or is_observed(output):
        return False
    weight_VD = output.weight
    is_half = half_dtype(weight_VD) is not None and weight_VD.dtype == torch.float32
    return can_fuse(weight_VD) and is_half and weight_VD.shape[0] <= MOST


def output_loss(h_BTD: Tensor, output: nn.Linear, targets_BT: Tensor, ignored: int) -> Tensor:
    """`reference`, multiplied in half precision."""
    if h_BTD.transpose(0, 1).is_contiguous():
        h_BTD, targets_BT = h_BTD.transpose(0, 1), targets_BT.t()
    dtype = half_dtype(h_BTD) or h_BTD.dtype
    given = (h_BTD.flatten(0, 1), output.weight, output.bias, targets_BT.flatten(), ignored, dtype)
    loss: Tensor = _OutputLoss.apply(*given)  # type: ignore[no-untyped-call]
    return loss


def reference(h_BTD: Tensor, output: nn.Linear, targets_BT: Tensor, ignored: int) -> Tensor:
    """The mean loss in nats over the targets that are not `ignored`."""
    return F.cross_entropy(output(h_BTD).flatten(0, 1).float(), targets_BT.flatten(), ignore_index=ignored)


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        ignored: int,
        dtype: torch.dtype,
    ) -> Tensor:
        from rankwise.lab.kernels.loss_kernels import loss_forward

        x_ND, w_WD = padded(h_ND, dtype), padded(weight_VD, dtype, rows=True)
        logits_NW = x_ND @ w_WD.t()
        sums = loss_forward(logits_NW, bias_V, targets_N, weight_VD.shape[0], ignored)
        ctx.save_for_backward(x_ND, w_WD, bias_V, targets_N, logits_NW, sums)
        ctx.weight_shape, ctx.ignored, ctx.h_dtype = weight_VD.shape, ignored, h_ND.dtype
        return sums[0] / sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        from rankwise.lab.kernels.loss_kernels import loss_backward

        x_ND, w_WD, bias_V, targets_N, logits_NW, sums = ctx.saved_tensors
        num_words, width = ctx.weight_shape
        dlogits_NW, dbias_V = loss_backward(dloss, sums, logits_NW, bias_V, targets_N, num_words, ctx.ignored)
        dh_ND = (dlogits_NW @ w_WD)[:, :width].to(ctx.h_dtype) if ctx.needs_input_grad[0] else None
        dweight_VD = product(dlogits_NW.t(), x_ND)[:num_words, :width]
        return dh_ND, dweight_VD, None if bias_V is None else dbias_V, None, None, None
