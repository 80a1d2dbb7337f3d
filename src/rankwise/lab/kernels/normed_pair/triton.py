"""Layer norm folded into the pair after it, in Triton: no normalized copy of x is ever made.

With A = diag(z) Q diag(gamma), (x - mean x) A^T = x C^T, where the rows of C are those of A less their mean. So

    y = rstd (x C^T) + t,   t = z (Q beta),   u = y P^T

and what is left of the norm is one factor per row in the narrow middle of the pair. C, t and their gradients are those
of small matrices. README.md of `kernels/sru` derives the gradients. Shapes as in `reference.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on
from rankwise.kernels.linear import MULTIPLE, product
from rankwise.kernels.linear_kernels import put_columns, select_columns, stack_sums
from rankwise.lab.kernels.normed_pair import reference
from rankwise.lab.kernels.normed_pair.triton_kernels import (
    fold_bwd_kernel,
    fold_kernel,
    row_stats_kernel,
    scale_rows_bwd_kernel,
    scale_rows_kernel,
)

ELEMENTS, ELEMENTS_BACKWARD = 8192, 16384
"""Numbers that one program of the kernels on rows of the rank's width holds: the fastest on an H200."""
PROGRAMS = 256
"""Of the backward pass of folding: each sums up the gradients of the norm over its components."""


def row_stats(x_ND: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and `reference.row_rstd` of each row."""
    width = x_ND.shape[-1]
    mean = x_ND.new_empty(x_ND.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    with on(x_ND):
        row_stats_kernel[(mean.numel(),)](
            x_ND.contiguous(), mean, rstd, eps, width, BLOCK_D=triton.next_power_of_2(width), num_warps=8
        )
    return mean, rstd


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
    """`reference.normed_pair`, to which a pair with no components at all is left."""
    rank = (q_RD if active is None else active).shape[0]
    if active is None and x_ND.dtype.itemsize == 2 and (more := -rank % MULTIPLE):
        # components of zero, so that the rows of the middle are a multiple of 16 bytes: far faster products
        q_RD, p_OR = F.pad(q_RD, (0, 0, 0, more)), F.pad(p_OR, (0, more))
        z_R = None if z_R is None else F.pad(z_R, (0, more))
    run = _NormedPair.apply if rank else reference.normed_pair
    u_NO: Tensor = run(x_ND, rstd_N, q_RD, p_OR, norm_weight_D, norm_bias_D, z_R, active)
    return u_NO


class _NormedPair(torch.autograd.Function):
    """The backward pass is written out: autograd would keep, cast and add more than is needed."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        rstd_N: Tensor,
        q_RD: Tensor,
        p_OR: Tensor,
        gamma_D: Tensor,
        beta_D: Tensor,
        z_R: Tensor | None,
        active: Tensor | None,
    ) -> Tensor:
        x_ND, q_RD = x_ND.contiguous(), q_RD.contiguous()
        c_RD, t_R = _fold(q_RD, gamma_D, beta_D, z_R, active, x_ND.dtype)
        if active is None:
            kept_OR, places_R = p_OR.to(x_ND.dtype), None
        else:
            kept_OR, places_R = select_columns(p_OR, active, x_ND.dtype)
        y_NR = _scale_rows(x_ND @ c_RD.t(), rstd_N, t_R)
        ctx.save_for_backward(
            x_ND, rstd_N, q_RD, p_OR, gamma_D, beta_D, z_R, active, places_R, c_RD, t_R, kept_OR, y_NR
        )
        return y_NR @ kept_OR.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, rstd_N, q_RD, p_OR, gamma_D, beta_D, z_R, active, places_R, c_RD, t_R, kept_OR, y_NR = ctx.saved_tensors
        dp_OR = product(du_NO.t(), y_NR).to(p_OR.dtype)
        if active is not None:
            dp_OR = put_columns(dp_OR, p_OR, active, places_R)
        dy_NR, drstd_N, dt_blocks = _scale_rows_bwd(du_NO @ kept_OR, y_NR, rstd_N, t_R)
        dc_RD = product(dy_NR.t(), x_ND)
        dq, dgamma, dbeta, dz = _fold_bwd(dc_RD, dt_blocks, q_RD, gamma_D, beta_D, z_R, active, places_R)
        return dy_NR @ c_RD, drstd_N, dq, dp_OR, dgamma, dbeta, dz, None


def _fold(
    q_RD: Tensor, gamma_D: Tensor, beta_D: Tensor, z_R: Tensor | None, active: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """C in `dtype` and t in float32, of the components that take part."""
    rank, width = (q_RD if active is None else active).shape[0], q_RD.shape[1]
    c_RD = q_RD.new_empty(rank, width, dtype=dtype)
    t_R = q_RD.new_empty(rank, dtype=torch.float32)
    with on(q_RD):
        fold_kernel[(rank,)](
            q_RD,
            gamma_D,
            beta_D,
            t_R if z_R is None else z_R,
            t_R if active is None else active,
            c_RD,
            t_R,
            width,
            HAS_Z=z_R is not None,
            HAS_ACTIVE=active is not None,
            BLOCK_D=triton.next_power_of_2(width),
            num_warps=8,
        )
    return c_RD, t_R


def _fold_bwd(
    dc_RD: Tensor,
    dt_blocks: Tensor,
    q_RD: Tensor,
    gamma_D: Tensor,
    beta_D: Tensor,
    z_R: Tensor | None,
    active: Tensor | None,
    places_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of Q, gamma, beta and z; zero at the components that took no part.

    That of t comes in parts, one a row of `dt_blocks`.
    """
    rank, width = q_RD.shape
    dq_RD, dz_R = torch.empty_like(q_RD), None if z_R is None else torch.empty_like(z_R)
    num_blocks, programs = dt_blocks.shape[0], min(PROGRAMS, rank)
    sums = dc_RD.new_empty(2, programs, width, dtype=torch.float32)
    with on(q_RD):
        fold_bwd_kernel[(programs,)](
            dc_RD,
            dt_blocks,
            q_RD,
            gamma_D,
            beta_D,
            sums if z_R is None else z_R,
            sums if active is None else active,
            sums if places_R is None else places_R,
            dq_RD,
            sums if dz_R is None else dz_R,
            sums,
            rank,
            dc_RD.shape[0],
            width,
            num_blocks,
            HAS_Z=z_R is not None,
            HAS_ACTIVE=active is not None,
            BLOCK_T=triton.next_power_of_2(num_blocks),
            BLOCK_D=triton.next_power_of_2(width),
            num_warps=8,
        )
    dgamma_D, dbeta_D = stack_sums(sums)
    return dq_RD, dgamma_D.to(gamma_D.dtype), dbeta_D.to(beta_D.dtype), dz_R


def _scale_rows(y_NR: Tensor, rstd_N: Tensor, t_R: Tensor) -> Tensor:
    """rstd y + t, in the memory of y."""
    num_rows, rank = y_NR.shape
    block_n, block_r = _cut(rank, ELEMENTS)
    with on(y_NR):
        scale_rows_kernel[(triton.cdiv(num_rows, block_n),)](
            y_NR, rstd_N, t_R, num_rows, rank, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=8
        )
    return y_NR


def _scale_rows_bwd(dy_NR: Tensor, y_NR: Tensor, rstd_N: Tensor, t_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the product (in the memory of dy), of rstd, and what blocks of rows add to that of t."""
    num_rows, rank = y_NR.shape
    block_n, block_r = _cut(rank, ELEMENTS_BACKWARD)
    num_blocks = triton.cdiv(num_rows, block_n)
    drstd_N = torch.empty_like(rstd_N)
    dt_blocks = dy_NR.new_empty(num_blocks, rank, dtype=torch.float32)
    with on(y_NR):
        scale_rows_bwd_kernel[(num_blocks,)](
            dy_NR, y_NR, rstd_N, t_R, drstd_N, dt_blocks, num_rows, rank, BLOCK_N=block_n, BLOCK_R=block_r, num_warps=8
        )
    return dy_NR, drstd_N, dt_blocks


def _cut(rank: int, elements: int) -> tuple[int, int]:
    """Rows and components of a program."""
    block_r = triton.next_power_of_2(rank)
    return max(1, elements // block_r), block_r
