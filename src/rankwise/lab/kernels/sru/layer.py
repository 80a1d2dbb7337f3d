"""The recurrence of one layer in a stack on a GPU, fused with what stands around it.

Beyond `triton.sru` it gives what a layer norm after it needs, drops out what leaves a stack, and takes apart the three
ways by which the gradient comes back to the output: from the highway and from the product of the next layer, and
through 1 / sigma of each row, which the next layer multiplies by (`kernels/normed_pair`). Shapes as in `reference.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankwise.lab.kernels.dropout import draw
from rankwise.lab.kernels.normed_pair import normed_pair, row_stats
from rankwise.lab.kernels.sru.triton import Arrivals, backward, forward
from rankwise.modules import Pair


class Rows(NamedTuple):
    """The output of a layer for a product that is normalized by row."""

    h_TBD: Tensor
    """The output itself, sharing its memory, with a separate gradient."""
    rstd_TB: Tensor
    """1 / sigma of each row."""


def recurrence(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor, mask_BD: Tensor | None,
    scale: float, *, eps: float | None = None, dropout: float = 0.0,
) -> tuple[Tensor, Rows | None, Tensor]:  # fmt: skip
    """Outputs and last state of `reference.sru`, and between them the outputs as rows for the next layer.

    Args:
        eps: that of the layer norm that comes next; None without one, and then there are no rows.
        dropout: the dropout rate of the outputs; not with `eps`.
    """
    h_TBD, same_TBD, rstd_TB, c_BD = _Recurrence.apply(  # type: ignore[no-untyped-call]
        u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD, scale, eps, dropout
    )
    return h_TBD, None if eps is None else Rows(same_TBD, rstd_TB), c_BD


def normed_product(rows: Rows, norm: nn.LayerNorm, pair: Pair) -> Tensor:
    """W norm(h), (T, B, K D), where W is a pair."""
    steps, batch, _ = rows.h_TBD.shape
    h_ND, rstd_N = rows.h_TBD.flatten(0, 1), rows.rstd_TB.flatten()
    u = normed_pair(h_ND, rstd_N, pair.q_RI, pair.p_OR, norm.weight, norm.bias, pair.z_R, pair.active)
    return u.view(steps, batch, -1)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor,
        mask_BD: Tensor | None, scale: float, eps: float | None, dropout: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.dropout = draw(dropout, u_TBKD.device)
        ctx.scale, ctx.c0_dtype = scale, c0_BD.dtype
        h_TBD, c_BD, states_TBD = forward(
            u_TBKD,
            x_TBD,
            weight_c_GD,
            bias_GD,
            c0_BD,
            mask_BD,
            scale,
            keeps_states=any(ctx.needs_input_grad),
            dropout=ctx.dropout,
        )
        mean_TB, rstd_TB = (None, None) if eps is None else row_stats(h_TBD, eps)
        ctx.save_for_backward(u_TBKD, x_TBD, weight_c_GD, bias_GD, states_TBD, mask_BD, mean_TB, rstd_TB)
        ctx.set_materialize_grads(False)
        return h_TBD, None if eps is None else h_TBD.detach(), rstd_TB, c_BD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dh_TBD: Tensor | None, dproduct_TBD: Tensor | None, drstd_TB: Tensor | None, dc_BD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        u_TBKD, x_TBD, weight_c_GD, bias_GD, states_TBD, mask_BD, mean_TB, rstd_TB = ctx.saved_tensors
        if dh_TBD is None:
            dh_TBD, dproduct_TBD = dproduct_TBD, None
        if dh_TBD is None:
            dh_TBD = torch.zeros_like(states_TBD)
        rows = None if drstd_TB is None else (drstd_TB, rstd_TB, mean_TB)
        found = backward(
            Arrivals(dh_TBD, dc_BD, dproduct_TBD, rows),
            u_TBKD,
            x_TBD,
            weight_c_GD,
            bias_GD,
            states_TBD,
            mask_BD,
            ctx.scale,
            dropout=ctx.dropout,
        )
        return (
            found.du_TBKD,
            found.dx_TBD,
            found.dgates_4D[:2].to(weight_c_GD.dtype),
            found.dgates_4D[2:].to(bias_GD.dtype),
            found.dc0_BD.to(ctx.c0_dtype),
            found.dmask_BD,
            None,
            None,
            None,
        )
