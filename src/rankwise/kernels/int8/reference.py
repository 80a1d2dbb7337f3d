"""Rows of floats as bytes, and products of bytes as floats, in plain PyTorch: what `cpu.py` is measured against.

Shapes: N = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
SHIFT = 128
"""oneDNN multiplies unsigned inputs by signed weights, so inputs are moved up. (It takes signed ones as well, by plain
loops a thousand times slower.)"""


def round_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """round(x / s) + 128 as unsigned bytes, and s of each row, (N, 1): its largest |x| / 127."""
    scale_N1 = scales(x_NI)
    # the conversion to unsigned bytes is several times slower than this one; flipping the first bit adds 128
    return (x_NI * (1 / scale_N1)).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(SHIFT), scale_N1


def scale_rows_(y_NO: Tensor, scale_N1: Tensor, bias_O: Tensor | None) -> Tensor:
    """y s + b, in place."""
    y_NO.mul_(scale_N1)
    return y_NO if bias_O is None else y_NO.add_(bias_O)


def scales(x_NI: Tensor) -> Tensor:
    """Of each row, (N, 1); a row of zeros has some scale too."""
    low_N1, high_N1 = x_NI.amin(-1, keepdim=True), x_NI.amax(-1, keepdim=True)
    return torch.maximum(-low_N1, high_N1).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
