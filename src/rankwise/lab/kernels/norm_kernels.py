"""The Triton kernels of `norm.py`. Statistics are computed again in the backward pass: a row is read in any case."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on
from rankwise.lab.kernels.dropout import draw, kept

ELEMENTS = 4096
"""Numbers that a program holds at a time."""
PROGRAMS = 2048
"""Programs of the backward pass: each sums up the gradients of weight and bias over its rows."""


@triton.jit
def _normalize(p_x, p_addend, p_seed, dropout, o_nd, b_in, eps, D):
    """Rows less their mean, over their standard deviation, and one over the latter."""
    b_x = tl.load(p_x + o_nd, mask=b_in, other=0.0).to(tl.float32)
    if p_addend is not None:
        b_addend = tl.load(p_addend + o_nd, mask=b_in, other=0.0).to(tl.float32)
        if p_seed is not None:
            b_addend = tl.where(kept(tl.load(p_seed), o_nd, dropout), b_addend / (1 - dropout), 0.0)
        b_x += b_addend
    b_x = tl.where(b_in, b_x - (tl.sum(b_x, 1) / D)[:, None], 0.0)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    return b_x * b_rstd[:, None], b_rstd


@triton.jit
def norm_fwd_kernel(
    p_x,
    p_addend,
    p_seed,
    dropout,
    p_weight,
    p_bias,
    p_y,
    eps,
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_nd = o_n[:, None] * D + o_d[None, :]
    b_in = (o_n < N)[:, None] & (o_d < D)[None, :]
    b_x, _ = _normalize(p_x, p_addend, p_seed, dropout, o_nd, b_in, eps, D)
    b_weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    tl.store(p_y + o_nd, b_x * b_weight[None, :] + b_bias[None, :], mask=b_in)


@triton.jit
def norm_bwd_kernel(
    p_dy,
    p_x,
    p_addend,
    p_seed,
    dropout,
    p_weight,
    p_dx,
    p_daddend,
    p_sums,
    eps,
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    o_d = tl.arange(0, BLOCK_D)
    b_weight = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_dweight = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_dbias = tl.zeros([BLOCK_D], dtype=tl.float32)
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    for i_n in range(i_program * BLOCK_N, N, num_programs * BLOCK_N):
        o_n = tl.cast(i_n, tl.int64) + tl.arange(0, BLOCK_N)
        o_nd = o_n[:, None] * D + o_d[None, :]
        b_in = (o_n < N)[:, None] & (o_d < D)[None, :]
        b_x, b_rstd = _normalize(p_x, p_addend, p_seed, dropout, o_nd, b_in, eps, D)
        b_dy = tl.load(p_dy + o_nd, mask=b_in, other=0.0).to(tl.float32)
        b_dweight += tl.sum(b_dy * b_x, 0)
        b_dbias += tl.sum(b_dy, 0)
        b_g = b_dy * b_weight[None, :]
        b_dx = b_g - (tl.sum(b_g, 1) / D)[:, None] - b_x * (tl.sum(b_g * b_x, 1) / D)[:, None]
        b_dx *= b_rstd[:, None]
        tl.store(p_dx + o_nd, b_dx, mask=b_in)
        if p_seed is not None:
            b_dx = tl.where(kept(tl.load(p_seed), o_nd, dropout), b_dx / (1 - dropout), 0.0)
            tl.store(p_daddend + o_nd, b_dx, mask=b_in)
    tl.store(p_sums + i_program * D + o_d, b_dweight, mask=o_d < D)
    tl.store(p_sums + (num_programs + i_program) * D + o_d, b_dbias, mask=o_d < D)


class LayerNorm(torch.autograd.Function):
    """The normalized rows of x + dropout(addend), in `dtype`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor,
        eps: float,
        dtype: torch.dtype,
        dropout: float,
    ) -> Tensor:
        x, addend = x.contiguous(), None if addend is None else addend.contiguous()
        ctx.eps, ctx.dropout = eps, draw(dropout, x.device)
        ctx.save_for_backward(x, addend, weight_D)
        num_rows, width, blocks = _cut(x)
        y = torch.empty_like(x, dtype=dtype)
        with on(x):
            norm_fwd_kernel[(triton.cdiv(num_rows, blocks["BLOCK_N"]),)](
                *(x, addend, *ctx.dropout, weight_D, bias_D, y, eps, num_rows, width), **blocks
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, addend, weight_D = ctx.saved_tensors
        num_rows, width, blocks = _cut(x)
        programs = min(PROGRAMS, triton.cdiv(num_rows, blocks["BLOCK_N"]))
        dx, sums = torch.empty_like(x), x.new_empty(2, programs, width, dtype=torch.float32)
        drops = addend is not None and ctx.dropout.seed is not None
        daddend = torch.empty_like(addend) if drops else None
        with on(x):
            norm_bwd_kernel[(programs,)](
                *(dy.contiguous(), x, addend, *ctx.dropout, weight_D, dx, daddend, sums, ctx.eps, num_rows, width),
                num_warps=8,
                **blocks,
            )
        if addend is not None and not drops:
            # without dropout the gradient of the addend is that of x
            daddend = dx.to(addend.dtype)
        dweight_D, dbias_D = sums.sum(1).to(weight_D.dtype)
        return dx, daddend, dweight_D, dbias_D, None, None, None


def _cut(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Rows, width, and the block of a program."""
    width = x.shape[-1]
    block_d = triton.next_power_of_2(width)
    return x.numel() // width, width, {"BLOCK_N": max(1, ELEMENTS // block_d), "BLOCK_D": block_d}
