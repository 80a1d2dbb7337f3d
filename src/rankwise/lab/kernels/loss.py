"""The loss of a plain output layer on a GPU, without logits in float32: cross entropy of the product in half precision.

The columns that pad the words to a multiple of 16 bytes (`linear.py`) stay: the loss ignores them, and writes their
gradient as zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import half_dtype
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
    from rankwise.lab.kernels.loss_kernels import OutputLoss

    if h_BTD.transpose(0, 1).is_contiguous():
        h_BTD, targets_BT = h_BTD.transpose(0, 1), targets_BT.t()
    dtype = half_dtype(h_BTD) or h_BTD.dtype
    given = (h_BTD.flatten(0, 1), output.weight, output.bias, targets_BT.flatten(), ignored, dtype)
    loss: Tensor = OutputLoss.apply(*given)  # type: ignore[no-untyped-call]
    return loss


def reference(h_BTD: Tensor, output: nn.Linear, targets_BT: Tensor, ignored: int) -> Tensor:
    """The mean loss in nats over the targets that are not `ignored`."""
    return F.cross_entropy(output(h_BTD).flatten(0, 1).float(), targets_BT.flatten(), ignore_index=ignored)
