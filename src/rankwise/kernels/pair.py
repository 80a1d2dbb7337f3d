"""A gated low-rank pair as a linear layer: only components that take part are multiplied.

    y = P[:, active] (z Q)[active] x + bias

Shapes: B = any batch dimensions, N = their product, I = inputs, O = outputs, R = components, K = those that take part,
W = inputs filled up to a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import can_fuse
from rankwise.kernels.linear import MULTIPLE, column_sums, filled_up, half_dtype, linear, product
from rankwise.modules import Pair


def pair_linear(x_BI: Tensor, pair: Pair, bias_O: Tensor | None) -> Tensor:
    """`reference`, by fewer kernels where x lies on a GPU and is multiplied in half precision."""
    if not _fits(x_BI, pair):
        return reference(x_BI, pair, bias_O)
    y_BO: Tensor = _PairLinear.apply(x_BI, *pair, bias_O, half_dtype(x_BI))  # type: ignore[no-untyped-call]
    return y_BO


def reference(x_BI: Tensor, pair: Pair, bias_O: Tensor | None) -> Tensor:
    """The layer in plain PyTorch."""
    q_RI, p_OR, z_R, active = pair
    if active is not None:
        p_OR, q_RI = p_OR.index_select(1, active), q_RI.index_select(0, active)
        z_R = None if z_R is None else z_R.index_select(0, active)
    # z times Q, and not times what Q gives: of those there are as many as words in a batch
    q_RI = q_RI if z_R is None else (q_RI * z_R.unsqueeze(1)).to(q_RI.dtype)
    return linear(linear(x_BI, q_RI), p_OR, bias_O)


def _fits(x_BI: Tensor, pair: Pair) -> bool:
    if pair.active is None or not can_fuse(x_BI) or half_dtype(x_BI) is None or pair.q_RI.dtype != torch.float32:
        return False
    sizes = (pair.active.numel(), pair.p_OR.shape[0])
    return all(size and size % MULTIPLE == 0 for size in sizes)


class _PairLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BI: Tensor,
        q_RI: Tensor,
        p_OR: Tensor,
        z_R: Tensor | None,
        active_K: Tensor,
        bias_O: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        from rankwise.kernels.linear_kernels import select_columns, select_rows

        x_NW = filled_up(x_BI.reshape(-1, x_BI.shape[-1]), dtype)
        c_KW = select_rows(q_RI, z_R, active_K, dtype)
        kept_OK, places_R = select_columns(p_OR, active_K, dtype)
        h_NK = x_NW @ c_KW.t()
        y_NO = torch.nn.functional.linear(h_NK, kept_OK, None if bias_O is None else bias_O.to(dtype))
        ctx.save_for_backward(x_NW, q_RI, p_OR, z_R, active_K, places_R, c_KW, kept_OK, h_NK)
        ctx.shape, ctx.x_dtype = x_BI.shape, x_BI.dtype
        return y_NO.view(*x_BI.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        from rankwise.kernels.linear_kernels import put_columns, put_rows

        x_NW, q_RI, p_OR, z_R, active_K, places_R, c_KW, kept_OK, h_NK = ctx.saved_tensors
        dy_NO = dy_BO.reshape(-1, dy_BO.shape[-1])
        dh_NK = dy_NO @ kept_OK
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dh_NK @ c_KW)[:, : q_RI.shape[1]].view(ctx.shape).to(ctx.x_dtype)
        dp_OR = put_columns(product(dy_NO.t(), h_NK), p_OR, active_K, places_R)
        dq_RI, dz_R = put_rows(product(dh_NK.t(), x_NW), q_RI, z_R, active_K, places_R)
        return dx, dq_RI, dp_OR, dz_R, None, column_sums(dy_NO) if ctx.needs_input_grad[5] else None, None
