"""The Triton kernels of `loss.py`: a program holds some rows of logits at a time.

Shapes: N = targets, D = width, V = words, W = words padded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on
from rankwise.kernels.linear import padded, product

ELEMENTS = 4096
"""Logits that a program holds at a time."""
PROGRAMS = 512
"""Each sums up over its rows."""


@triton.jit
def _softmax(p_logits, p_bias, p_targets, o_n, o_v, N, V, W, ignored):
    """Log of the softmax of some rows, where the targets are, and which rows count."""
    b_in = (o_n < N)[:, None] & (o_v < V)[None, :]
    b_logits = tl.load(p_logits + o_n[:, None] * W + o_v[None, :], mask=b_in, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_logits += tl.load(p_bias + o_v, mask=o_v < V, other=0.0).to(tl.float32)[None, :]
    b_logits = tl.where((o_v < V)[None, :], b_logits, float("-inf"))
    b_logits -= tl.max(b_logits, 1)[:, None]
    b_logits -= tl.log(tl.sum(tl.exp(b_logits), 1))[:, None]
    b_target = tl.load(p_targets + o_n, mask=o_n < N, other=ignored)
    return b_logits, b_target[:, None] == o_v[None, :], b_target != ignored


@triton.jit
def loss_fwd_kernel(
    p_logits,
    p_bias,
    p_targets,
    p_sums,
    N,
    V,
    W,
    ignored,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_v = tl.arange(0, BLOCK_V)
    b_loss = tl.zeros([BLOCK_N], dtype=tl.float32)
    b_count = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i_n in range(i_program * BLOCK_N, N, num_programs * BLOCK_N):
        o_n = tl.cast(i_n, tl.int64) + tl.arange(0, BLOCK_N)
        b_log, b_is_target, b_counts = _softmax(p_logits, p_bias, p_targets, o_n, o_v, N, V, W, ignored)
        b_found = tl.sum(tl.where(b_is_target, b_log, 0.0), 1)
        b_loss -= tl.where(b_counts, b_found, 0.0)
        b_count += tl.where(b_counts, 1.0, 0.0)
    tl.store(p_sums + i_program, tl.sum(b_loss, 0))
    tl.store(p_sums + num_programs + i_program, tl.sum(b_count, 0))


@triton.jit
def loss_bwd_kernel(
    p_dloss,
    p_total,
    p_logits,
    p_bias,
    p_targets,
    p_dlogits,
    p_dbias,
    N,
    V,
    W,
    ignored,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The gradient of the logits, zero in the columns that fill up, and its sums over the rows of this program."""
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    o_v = tl.arange(0, BLOCK_V)
    b_dbias = tl.zeros([BLOCK_V], dtype=tl.float32)
    scale = tl.load(p_dloss).to(tl.float32) / tl.load(p_total + 1)
    for i_n in range(i_program * BLOCK_N, N, num_programs * BLOCK_N):
        o_n = tl.cast(i_n, tl.int64) + tl.arange(0, BLOCK_N)
        b_log, b_is_target, b_counts = _softmax(p_logits, p_bias, p_targets, o_n, o_v, N, V, W, ignored)
        b_d = (tl.exp(b_log) - tl.where(b_is_target, 1.0, 0.0)) * scale
        b_d = tl.where(b_counts[:, None], b_d, 0.0)
        b_dbias += tl.sum(b_d, 0)
        tl.store(p_dlogits + o_n[:, None] * W + o_v[None, :], b_d, mask=(o_n < N)[:, None] & (o_v < W)[None, :])
    tl.store(p_dbias + i_program * V + o_v, b_dbias, mask=o_v < V)


class OutputLoss(torch.autograd.Function):
    """The mean cross entropy of h W^T + bias over the targets that are not `ignored`."""

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
        x_ND, w_WD, targets_N = padded(h_ND, dtype), padded(weight_VD, dtype, rows=True), targets_N.contiguous()
        logits_NW = x_ND @ w_WD.t()
        programs, blocks = _cut(logits_NW)
        ctx.sizes, ctx.h_dtype = (len(h_ND), len(weight_VD), len(w_WD), ignored), h_ND.dtype
        parts = logits_NW.new_empty(2, programs, dtype=torch.float32)
        with on(logits_NW):
            loss_fwd_kernel[(programs,)](logits_NW, bias_V, targets_N, parts, *ctx.sizes, **blocks)
        # the sum of the losses, and the number of targets that count
        sums = parts.sum(1)
        ctx.save_for_backward(x_ND, w_WD, bias_V, targets_N, logits_NW, sums)
        ctx.width = weight_VD.shape[1]
        return sums[0] / sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, w_WD, bias_V, targets_N, logits_NW, sums = ctx.saved_tensors
        programs, blocks = _cut(logits_NW)
        num_words = ctx.sizes[1]
        dlogits_NW = torch.empty_like(logits_NW)
        dbias = logits_NW.new_empty(programs, num_words, dtype=torch.float32)
        given = (dloss, sums, logits_NW, bias_V, targets_N, dlogits_NW, dbias)
        with on(logits_NW):
            loss_bwd_kernel[(programs,)](*given, *ctx.sizes, **blocks)
        dh_ND = (dlogits_NW @ w_WD)[:, : ctx.width].to(ctx.h_dtype) if ctx.needs_input_grad[0] else None
        dweight_VD = product(dlogits_NW.t(), x_ND)[:num_words, : ctx.width]
        return dh_ND, dweight_VD, None if bias_V is None else dbias.sum(0), None, None, None


def _cut(logits_NW: Tensor) -> tuple[int, dict[str, int]]:
    """Programs, and the block of each."""
    num_rows, width = logits_NW.shape
    block_v = triton.next_power_of_2(width)
    block_n = max(1, ELEMENTS // block_v)
    programs = min(PROGRAMS, triton.cdiv(num_rows, block_n))
    return programs, {"BLOCK_N": block_n, "BLOCK_V": block_v}
