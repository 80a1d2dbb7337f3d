"""Layer norm and a low-rank pair in plain PyTorch: the truth that the fused kernels are measured against.

    y = z (Q (gamma (x - mean x) rstd + beta))            u = P y

`rstd`, one over the standard deviation of each row, is an argument: whoever makes x makes it too, so that the gradient
of x through it can be added where x is made. z and `active` are those of a gated pair: only the components named by
`active` take part, each times its z.

Shapes: N = rows, D = inputs, R = components, O = outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def row_rstd(x_ND: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var x + eps) of each row, in float32 at least."""
    x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
    return torch.rsqrt(x_ND.var(-1, correction=0) + eps)


def normed_pair(
    x_ND: Tensor,
    rstd_N: Tensor,
    q_RD: Tensor,
    p_OR: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor,
    z_R: Tensor | None = None,
    active: Tensor | None = None,
) -> Tensor:
    """u (N, O) in the dtype of x, differentiable in every tensor of numbers."""
    if active is not None:
        q_RD, p_OR = q_RD.index_select(0, active), p_OR.index_select(1, active)
        z_R = None if z_R is None else z_R.index_select(0, active)
    dtype = x_ND.dtype
    precise = x_ND.to(rstd_N.dtype)
    normed_ND = (precise - precise.mean(-1, keepdim=True)) * rstd_N.unsqueeze(-1) * norm_weight_D + norm_bias_D
    y_NR = F.linear(normed_ND.to(dtype), q_RD.to(dtype))
    return F.linear(y_NR if z_R is None else y_NR * z_R.to(dtype), p_OR.to(dtype))
