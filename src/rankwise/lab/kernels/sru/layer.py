"""A layer in a stack on a GPU: the recurrence fused with the layer norm and the low-rank pair after it.

Beyond `triton.sru`, `recurrence` gives what a layer norm after it needs, drops out what leaves a stack, and takes apart
the three ways by which the gradient comes back to the output: from the highway and from the product of the next layer,
and through 1 / sigma of each row. `normed_pair` never makes a normalized copy of x:

    y = z (Q (gamma (x - mean x) rstd + beta))            u = P y

`rstd`, one over the standard deviation of each row, is an argument: it is computed where x is computed, so that the
gradient of x through it can be added there. z and `active` are those of a gated pair: only the components named by
`active` are computed, each times its z. `normed_pair_reference` is the same in plain PyTorch.

With A = diag(z) Q diag(gamma), (x - mean x) A^T = x C^T, where the rows of C are those of A less their mean. So

    y = rstd (x C^T) + t,   t = z (Q beta),   u = y P^T

and what is left of the norm is one factor per row in the narrow middle of the pair. C, t and their gradients are those
of small matrices. README.md derives the gradients. A pointer that is None is an input that does not exist.

Shapes: those of `reference.py`; N = rows, D = inputs, R = components, K = those that are computed, O = outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on
from rankwise.kernels.linear import MULTIPLE, product
from rankwise.kernels.linear_kernels import find_places, put_columns, select_columns, stack_sums
from rankwise.lab.kernels.dropout import draw
from rankwise.lab.kernels.sru.triton import Arrivals, backward, forward
from rankwise.modules import Pair

ELEMENTS, ELEMENTS_BACKWARD = 8192, 16384
"""Numbers that one program of the kernels on rows of the rank's width holds: the fastest on an H200."""
PROGRAMS = 256
"""Programs of the backward pass of folding: each sums up the gradients of the norm over its components."""


def normed_pair_reference(
    x_ND: Tensor, rstd_N: Tensor, q_RD: Tensor, p_OR: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor,
    z_R: Tensor | None = None, active: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """u (N, O) in the dtype of x, differentiable in every tensor of numbers."""
    if active is not None:
        q_RD, p_OR = q_RD.index_select(0, active), p_OR.index_select(1, active)
        z_R = None if z_R is None else z_R.index_select(0, active)
    dtype = x_ND.dtype
    precise = x_ND.to(rstd_N.dtype)
    normed_ND = (precise - precise.mean(-1, keepdim=True)) * rstd_N.unsqueeze(-1) * norm_weight_D + norm_bias_D
    y_NR = F.linear(normed_ND.to(dtype), q_RD.to(dtype))
    return F.linear(y_NR if z_R is None else y_NR * z_R.to(dtype), p_OR.to(dtype))


@triton.jit
def row_stats_kernel(p_x, p_mean, p_rstd, eps, D, BLOCK_D: tl.constexpr):
    i_n = tl.cast(tl.program_id(0), tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    b_x = tl.load(p_x + i_n * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    mean = tl.sum(b_x, 0) / D
    b_x = tl.where(o_d < D, b_x - mean, 0.0)
    tl.store(p_mean + i_n, mean)
    tl.store(p_rstd + i_n, tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps))


@triton.jit
def fold_kernel(p_q, p_gamma, p_beta, p_z, p_active, p_c, p_t, D, BLOCK_D: tl.constexpr):
    i_k = tl.program_id(0)
    i_r = tl.load(p_active + i_k) if p_active is not None else i_k
    o_d = tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_q = tl.load(p_q + i_r * D + o_d, mask=b_in, other=0.0).to(tl.float32)
    if p_z is not None:
        b_q *= tl.load(p_z + i_r).to(tl.float32)
    b_a = b_q * tl.load(p_gamma + o_d, mask=b_in, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o_d, mask=b_in, other=0.0).to(tl.float32)
    tl.store(p_c + i_k * D + o_d, b_a - tl.sum(b_a, 0) / D, mask=b_in)
    tl.store(p_t + i_k, tl.sum(b_q * b_beta, 0))


@triton.jit
def fold_bwd_kernel(
    p_dc, p_dt_blocks, p_q, p_gamma, p_beta, p_z, p_active, p_places, p_dq, p_dz, p_sums, R, K, D, NUM_BLOCKS,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows of Q and of z, and what these rows add to those of gamma and beta.

    A component that took no part adds nothing, and its gradients are zero.
    """
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_gamma = tl.load(p_gamma + o_d, mask=b_in, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o_d, mask=b_in, other=0.0).to(tl.float32)
    b_dgamma = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_dbeta = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i_r in range(i_program, R, num_programs):
        i_k, b_read, b_blocks = i_r, b_in, o_t < NUM_BLOCKS
        if p_active is not None:
            i_k, found = find_places(p_places, p_active, i_r, K)
            b_read, b_blocks = o_d < tl.where(found, D, 0), o_t < tl.where(found, NUM_BLOCKS, 0)
        b_dc = tl.load(p_dc + i_k * D + o_d, mask=b_read, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + i_r * D + o_d, mask=b_read, other=0.0).to(tl.float32)
        dt = tl.sum(tl.load(p_dt_blocks + o_t * K + i_k, mask=b_blocks, other=0.0), 0)
        b_dc -= tl.sum(b_dc, 0) / D
        b_g = b_dc * b_gamma + dt * b_beta
        if p_z is not None:
            z = tl.load(p_z + i_r).to(tl.float32)
            tl.store(p_dz + i_r, tl.sum(b_q * b_g, 0))
            b_g *= z
            b_q *= z
        tl.store(p_dq + i_r * D + o_d, b_g, mask=b_in)
        b_dgamma += b_q * b_dc
        b_dbeta += b_q * dt
    tl.store(p_sums + i_program * D + o_d, b_dgamma, mask=b_in)
    tl.store(p_sums + (num_programs + i_program) * D + o_d, b_dbeta, mask=b_in)


@triton.jit
def scale_rows_kernel(p_y, p_rstd, p_t, N, R, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, BLOCK_R)
    b_in = (o_n < N)[:, None] & (o_r < R)[None, :]
    p_y += o_n.to(tl.int64)[:, None] * R + o_r[None, :]
    b_rstd = tl.load(p_rstd + o_n, mask=o_n < N, other=0.0)
    b_t = tl.load(p_t + o_r, mask=o_r < R, other=0.0)
    b_y = tl.load(p_y, mask=b_in, other=0.0).to(tl.float32)
    tl.store(p_y, b_rstd[:, None] * b_y + b_t[None, :], mask=b_in)


@triton.jit
def scale_rows_bwd_kernel(p_dy, p_y, p_rstd, p_t, p_drstd, p_dt, N, R, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.arange(0, BLOCK_R)
    b_in = (o_n < N)[:, None] & (o_r < R)[None, :]
    o_nr = o_n.to(tl.int64)[:, None] * R + o_r[None, :]
    b_rstd = tl.load(p_rstd + o_n, mask=o_n < N, other=1.0)
    b_t = tl.load(p_t + o_r, mask=o_r < R, other=0.0)
    b_dy = tl.load(p_dy + o_nr, mask=b_in, other=0.0).to(tl.float32)
    b_y = tl.load(p_y + o_nr, mask=b_in, other=0.0).to(tl.float32)
    tl.store(p_drstd + o_n, tl.sum(b_dy * (b_y - b_t[None, :]), 1) / b_rstd, mask=o_n < N)
    tl.store(p_dt + tl.program_id(0) * R + o_r, tl.sum(b_dy, 0), mask=o_r < R)
    tl.store(p_dy + o_nr, b_dy * b_rstd[:, None], mask=b_in)


def row_stats(x_ND: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(var + eps) of each row, in float32."""
    width = x_ND.shape[-1]
    mean = x_ND.new_empty(x_ND.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    with on(x_ND):
        row_stats_kernel[(mean.numel(),)](
            x_ND.contiguous(), mean, rstd, eps, width, BLOCK_D=triton.next_power_of_2(width), num_warps=8
        )
    return mean, rstd


def normed_pair(
    x_ND: Tensor, rstd_N: Tensor, q_RD: Tensor, p_OR: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor,
    z_R: Tensor | None = None, active: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`normed_pair_reference`, which runs instead for a pair with no components at all."""
    rank = (q_RD if active is None else active).shape[0]
    if active is None and x_ND.dtype.itemsize == 2 and (more := -rank % MULTIPLE):
        # components of zero, so that the rows of the middle are a multiple of 16 bytes: far faster products
        q_RD, p_OR = F.pad(q_RD, (0, 0, 0, more)), F.pad(p_OR, (0, more))
        z_R = None if z_R is None else F.pad(z_R, (0, more))
    run = _NormedPair.apply if rank else normed_pair_reference
    u_NO: Tensor = run(x_ND, rstd_N, q_RD, p_OR, norm_weight_D, norm_bias_D, z_R, active)
    return u_NO


class _NormedPair(torch.autograd.Function):
    """The backward pass is written out: autograd would keep, cast and add more than is needed."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, rstd_N: Tensor, q_RD: Tensor, p_OR: Tensor, gamma_D: Tensor, beta_D: Tensor,
        z_R: Tensor | None, active: Tensor | None,
    ) -> Tensor:  # fmt: skip
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
    """C in `dtype` and t in float32, of the active components."""
    rank, width = (q_RD if active is None else active).shape[0], q_RD.shape[1]
    c_RD = q_RD.new_empty(rank, width, dtype=dtype)
    t_R = q_RD.new_empty(rank, dtype=torch.float32)
    with on(q_RD):
        fold_kernel[(rank,)](
            q_RD, gamma_D, beta_D, z_R, active, c_RD, t_R, width, BLOCK_D=triton.next_power_of_2(width), num_warps=8
        )
    return c_RD, t_R


def _fold_bwd(
    dc_RD: Tensor, dt_blocks: Tensor, q_RD: Tensor, gamma_D: Tensor, beta_D: Tensor, z_R: Tensor | None,
    active: Tensor | None, places_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of Q, gamma, beta and z, zero for components that are not active; `dt_blocks` add up to that of t."""
    rank, width = q_RD.shape
    dq_RD, dz_R = torch.empty_like(q_RD), None if z_R is None else torch.empty_like(z_R)
    num_blocks, programs = dt_blocks.shape[0], min(PROGRAMS, rank)
    sums = dc_RD.new_empty(2, programs, width, dtype=torch.float32)
    inputs = (dc_RD, dt_blocks, q_RD, gamma_D, beta_D, z_R, active, places_R)
    with on(q_RD):
        fold_bwd_kernel[(programs,)](
            *(*inputs, dq_RD, dz_R, sums, rank, dc_RD.shape[0], width, num_blocks),
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
    """The rows and components that one program holds."""
    block_r = triton.next_power_of_2(rank)
    return max(1, elements // block_r), block_r


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
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        *inputs, eps, dropout = arguments
        u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD, ctx.scale = inputs
        ctx.dropout, ctx.c0_dtype = draw(dropout, u_TBKD.device), c0_BD.dtype
        h_TBD, c_BD, states_TBD = forward(*inputs, keeps_states=any(ctx.needs_input_grad), dropout=ctx.dropout)
        mean_TB, rstd_TB = (None, None) if eps is None else row_stats(h_TBD, eps)
        ctx.save_for_backward(u_TBKD, x_TBD, weight_c_GD, bias_GD, states_TBD, mask_BD, mean_TB, rstd_TB)
        ctx.set_materialize_grads(False)
        return h_TBD, None if eps is None else h_TBD.detach(), rstd_TB, c_BD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dh_TBD: Tensor | None, dproduct_TBD: Tensor | None, drstd_TB: Tensor | None, dc_BD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, mean_TB, rstd_TB = ctx.saved_tensors
        _, _, weight_c_GD, bias_GD, states_TBD, _ = tensors
        inputs = (*tensors, ctx.scale)
        if dh_TBD is None:
            dh_TBD, dproduct_TBD = dproduct_TBD, None
        if dh_TBD is None:
            dh_TBD = torch.zeros_like(states_TBD)
        rows = None if drstd_TB is None else (drstd_TB, rstd_TB, mean_TB)
        arrivals = Arrivals(dh_TBD, dc_BD, dproduct_TBD, rows)
        du, dx, dgates_4D, dc0, dmask = backward(arrivals, *inputs, dropout=ctx.dropout)
        dgates = dgates_4D[:2].to(weight_c_GD.dtype), dgates_4D[2:].to(bias_GD.dtype)
        return du, dx, *dgates, dc0.to(ctx.c0_dtype), dmask, None, None, None
