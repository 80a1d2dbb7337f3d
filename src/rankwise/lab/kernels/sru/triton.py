"""The SRU recurrence in Triton, for GPUs: `reference.sru`, and its parts for layers that are fused further.

One program walks a block of units of one sequence through time. Letters and shapes are those of `reference.py`;
README.md derives the gradients and counts the bytes. What is kept for the backward pass is the state before each step,
in the dtype of u; gates are computed again. Each number is read and written once, and memory is the limit: loads run
some steps ahead of their use, by Triton's own pipeline (`num_stages`). A pointer that is None is an input or output
that does not exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.kernels.device import on
from rankwise.kernels.linear_kernels import stack_sums
from rankwise.lab.kernels.dropout import NO_DROPOUT, Dropout, kept
from rankwise.lab.kernels.sru import reference, register_operator


class Launch(NamedTuple):
    """How a kernel is cut into programs."""

    block_d: int
    num_warps: int
    stages: int
    """Steps that loads run ahead of their use, and one."""


FORWARD, BACKWARD = Launch(256, 2, 4), Launch(256, 2, 3)
"""The fastest on an H200 for 64 x 3056 units, all of whose programs are then resident in one wave.

`benchmarks/lm_speed.py kernels` compares others.
"""


class Arrivals(NamedTuple):
    """Gradients that reach the outputs of a layer.

    The output feeds the highway and the product of the next layer, and its rows are normalized there by 1 / sigma: the
    three gradients are summed up in the kernel, which saves a pass over memory for each.
    """

    dh_TBD: Tensor
    dc_BD: Tensor | None = None
    dh_product_TBD: Tensor | None = None
    rows: tuple[Tensor, Tensor, Tensor] | None = None
    """Gradient of 1 / sigma, 1 / sigma and the mean of each row, all (T, B)."""


class Gradients(NamedTuple):
    """The gradients of the inputs; None where there was no such input."""

    du_TBKD: Tensor
    dx_TBD: Tensor | None
    dgates_4D: Tensor
    """The gradients of weight_c and of bias, in float32."""
    dc0_BD: Tensor
    dmask_BD: Tensor | None


@triton.jit
def _row(i_t, B):
    """The number of this sequence's row at step i_t; a long text has more numbers than an int32 counts."""
    return tl.cast(i_t, tl.int64) * B + tl.program_id(1)


@triton.jit
def _load_block(p_row, o_d, b_in):
    """One block of a row, in float32."""
    return tl.load(p_row + o_d, mask=b_in, other=0.0).to(tl.float32)


@triton.jit
def _load_gates(p_weight_c, p_bias, o_d, b_in, D):
    """w_f, w_r, b_f and b_r of one block."""
    b_wf, b_wr = _load_block(p_weight_c, o_d, b_in), _load_block(p_weight_c + D, o_d, b_in)
    b_bf, b_br = _load_block(p_bias, o_d, b_in), _load_block(p_bias + D, o_d, b_in)
    return b_wf, b_wr, b_bf, b_br


@triton.jit
def _load_step(p_u, p_x, i_row, o_d, b_in, D, K: tl.constexpr):
    """v, p, q and the highway of one step, in the dtype of u."""
    p_u += i_row * K * D
    b_v = tl.load(p_u + o_d, mask=b_in, other=0.0)
    b_p = tl.load(p_u + D + o_d, mask=b_in, other=0.0)
    b_q = tl.load(p_u + 2 * D + o_d, mask=b_in, other=0.0)
    b_x = tl.load((p_u + 3 * D if K == 4 else p_x + i_row * D) + o_d, mask=b_in, other=0.0)
    return b_v, b_p, b_q, b_x


@triton.jit
def sru_fwd_kernel(
    p_u, p_x, p_weight_c, p_bias, p_c0, p_mask, p_seed, dropout, p_h, p_states, p_c, scale, T, B, D,
    K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_wf, b_wr, b_bf, b_br = _load_gates(p_weight_c, p_bias, o_d, b_in, D)
    b_c = _load_block(p_c0 + i_b * D, o_d, b_in)
    b_m = _load_block(p_mask + i_b * D, o_d, b_in) if p_mask is not None else b_c
    seed = tl.load(p_seed) if p_seed is not None else 0

    for i_t in tl.range(0, T, num_stages=STAGES):
        i_row = _row(i_t, B)
        b_v, b_p, b_q, b_x = _load_step(p_u, p_x, i_row, o_d, b_in, D, K)
        if p_states is not None:
            tl.store(p_states + i_row * D + o_d, b_c, mask=b_in)
        b_highway = b_x.to(tl.float32)
        if K == 3:
            b_highway *= scale
        b_value = b_v.to(tl.float32)
        b_f = tl.sigmoid(b_p.to(tl.float32) + b_wf * b_c + b_bf)
        b_r = tl.sigmoid(b_q.to(tl.float32) + b_wr * b_c + b_br)
        b_c = b_value + b_f * (b_c - b_value)
        if p_mask is not None:
            b_r *= b_m
        b_h = b_highway + b_r * (b_c - b_highway)
        if p_seed is not None:
            b_h = tl.where(kept(seed, (i_t * B + i_b) * D + o_d, dropout), b_h / (1 - dropout), 0.0)
        tl.store(p_h + i_row * D + o_d, b_h, mask=b_in)
    tl.store(p_c + i_b * D + o_d, b_c, mask=b_in)


@triton.jit
def _load_gradient(p_dh, p_dh_product, p_drstd, p_rstd, p_mean, i_row, o_d, b_in, D):
    """What reaches the output of one step: from the highway of the next layer, from its product, and through 1 / sigma
    of the row, as its slope by h - mean, and the mean."""
    b_dh = tl.load(p_dh + i_row * D + o_d, mask=b_in, other=0.0)
    b_product = b_dh
    if p_dh_product is not None:
        b_product = tl.load(p_dh_product + i_row * D + o_d, mask=b_in, other=0.0)
    slope, mean = 0.0, 0.0
    if p_drstd is not None:
        rstd = tl.load(p_rstd + i_row)
        slope = tl.load(p_drstd + i_row) * rstd * rstd * rstd / D
        mean = tl.load(p_mean + i_row)
    return b_dh, b_product, slope, mean


@triton.jit
def _store_step(p_du, p_dx, b_dv, b_dp, b_dq, b_dhighway, i_row, o_d, b_in, scale, D, K: tl.constexpr):
    """The gradients of v, p, q and the highway of one step."""
    p_du += i_row * K * D
    tl.store(p_du + o_d, b_dv, mask=b_in)
    tl.store(p_du + D + o_d, b_dp, mask=b_in)
    tl.store(p_du + 2 * D + o_d, b_dq, mask=b_in)
    if K == 4:
        tl.store(p_du + 3 * D + o_d, b_dhighway, mask=b_in)
    else:
        tl.store(p_dx + i_row * D + o_d, b_dhighway * scale, mask=b_in)


@triton.jit
def _store_sums(p_dgates, p_dmask, b_dwf, b_dwr, b_dbf, b_dbr, b_dm, o_bd, b_in, size):
    """What one sequence adds to the gradients of weights, biases and mask, in a row of its own: sums over sequences
    then have one order."""
    tl.store(p_dgates + o_bd, b_dwf, mask=b_in)
    tl.store(p_dgates + size + o_bd, b_dwr, mask=b_in)
    tl.store(p_dgates + 2 * size + o_bd, b_dbf, mask=b_in)
    tl.store(p_dgates + 3 * size + o_bd, b_dbr, mask=b_in)
    if p_dmask is not None:
        tl.store(p_dmask + o_bd, b_dm, mask=b_in)


@triton.jit
def sru_bwd_kernel(
    p_u, p_x, p_weight_c, p_bias, p_states, p_mask, p_seed, dropout, p_dh, p_dh_product, p_drstd, p_rstd, p_mean,
    p_dc, p_du, p_dx, p_dgates, p_dc0, p_dmask, scale, T, B, D,
    K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_wf, b_wr, b_bf, b_br = _load_gates(p_weight_c, p_bias, o_d, b_in, D)
    b_m = _load_block(p_mask + i_b * D, o_d, b_in) if p_mask is not None else b_wf
    seed = tl.load(p_seed) if p_seed is not None else 0
    b_zero = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_dc = _load_block(p_dc + i_b * D, o_d, b_in) if p_dc is not None else b_zero
    b_dwf, b_dwr, b_dbf, b_dbr, b_dm = b_zero, b_zero, b_zero, b_zero, b_zero

    for i_step in tl.range(0, T, num_stages=STAGES):
        i_t = T - 1 - i_step
        i_row = _row(i_t, B)
        b_v, b_p, b_q, b_x = _load_step(p_u, p_x, i_row, o_d, b_in, D, K)
        b_c = tl.load(p_states + i_row * D + o_d, mask=b_in, other=0.0)
        b_dh, b_product, slope, mean = _load_gradient(p_dh, p_dh_product, p_drstd, p_rstd, p_mean, i_row, o_d, b_in, D)
        b_before, b_value = b_c.to(tl.float32), b_v.to(tl.float32)
        b_highway = b_x.to(tl.float32)
        if K == 3:
            b_highway *= scale
        b_f = tl.sigmoid(b_p.to(tl.float32) + b_wf * b_before + b_bf)
        b_r = tl.sigmoid(b_q.to(tl.float32) + b_wr * b_before + b_br)
        b_change = b_value + b_f * (b_before - b_value) - b_highway
        b_open = b_r * b_m if p_mask is not None else b_r

        b_g = b_dh.to(tl.float32)
        if p_dh_product is not None:
            b_g += b_product.to(tl.float32)
        if p_drstd is not None:
            b_g -= slope * (b_highway + b_open * b_change - mean)
        if p_seed is not None:
            b_g = tl.where(kept(seed, (i_t * B + i_b) * D + o_d, dropout), b_g / (1 - dropout), 0.0)

        b_dhighway = b_g * (1 - b_open)
        b_dr = b_g * b_change
        if p_mask is not None:
            b_dm += b_dr * b_r
            b_dr *= b_m
        b_dq = b_dr * b_r * (1 - b_r)
        b_dc += b_g * b_open
        b_dp = b_dc * (b_before - b_value) * b_f * (1 - b_f)
        b_dwf += b_dp * b_before
        b_dwr += b_dq * b_before
        b_dbf += b_dp
        b_dbr += b_dq

        _store_step(p_du, p_dx, b_dc * (1 - b_f), b_dp, b_dq, b_dhighway, i_row, o_d, b_in, scale, D, K)
        b_dc = b_dc * b_f + b_dp * b_wf + b_dq * b_wr

    o_bd = i_b * D + o_d
    _store_sums(p_dgates, p_dmask, b_dwf, b_dwr, b_dbf, b_dbr, b_dm, o_bd, b_in, B * D)
    tl.store(p_dc0 + o_bd, b_dc, mask=b_in)


def forward(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor, mask_BD: Tensor | None,
    scale: float, *, keeps_states: bool, dropout: Dropout = NO_DROPOUT, launch: Launch = FORWARD,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs (T, B, D), the last state (B, D) and the state before each step (T, B, D; none if not kept)."""
    steps, batch, _, width = u_TBKD.shape
    h_TBD = u_TBKD.new_empty(steps, batch, width)
    states_TBD = u_TBKD.new_empty(steps if keeps_states else 0, batch, width)
    c_BD = u_TBKD.new_empty(batch, width, dtype=torch.float32)
    inputs = _dense(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD)
    outputs = (h_TBD, states_TBD if keeps_states else None, c_BD)
    _run(sru_fwd_kernel, launch, u_TBKD, *inputs, *dropout, *outputs, scale)
    return h_TBD, c_BD, states_TBD


def backward(
    arrivals: Arrivals, u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, states_TBD: Tensor,
    mask_BD: Tensor | None, scale: float, *, dropout: Dropout = NO_DROPOUT, launch: Launch = BACKWARD,
) -> Gradients:  # fmt: skip
    """Gradients of every input from those of the outputs."""
    assert dropout.seed is None or arrivals.rows is None, "statistics are of rows without dropout"
    _, batch, _, width = u_TBKD.shape
    inputs = _dense(u_TBKD, x_TBD, weight_c_GD, bias_GD, states_TBD, mask_BD)
    rows = arrivals.rows or (None, None, None)
    gradients = _dense(arrivals.dh_TBD, arrivals.dh_product_TBD, *rows, arrivals.dc_BD)
    du_TBKD = torch.empty_like(inputs[0])
    dx_TBD, dmask_BD = (None if inputs[i] is None else torch.empty_like(inputs[i]) for i in (1, 5))
    dgates_4BD = u_TBKD.new_empty(4, batch, width, dtype=torch.float32)
    dc0_BD = u_TBKD.new_empty(batch, width, dtype=torch.float32)
    outputs = (du_TBKD, dx_TBD, dgates_4BD, dc0_BD, dmask_BD)
    _run(sru_bwd_kernel, launch, u_TBKD, *inputs, *dropout, *gradients, *outputs, scale)
    return Gradients(du_TBKD, dx_TBD, stack_sums(dgates_4BD), dc0_BD, dmask_BD)


def _dense(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _run(kernel: Any, launch: Launch, u_TBKD: Tensor, *arguments: Any) -> None:
    steps, batch, num_projections, width = u_TBKD.shape
    sizes = (steps, batch, width, num_projections, launch.block_d, launch.stages)
    with on(u_TBKD):
        kernel[(triton.cdiv(width, launch.block_d), batch)](*arguments, *sizes, num_warps=launch.num_warps)


def sru(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor,
    mask_BD: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.sru`, which runs instead in float64."""
    tensors = (u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD)
    if u_TBKD.dtype == torch.float64:
        return reference.sru(*tensors, scale)
    learns = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    h_TBD, c_BD, _ = _operator(*tensors, scale, learns)
    return h_TBD, c_BD


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, learns = inputs
    return forward(*others, keeps_states=learns)


def _backward(dh: Tensor, dc: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    u, x, weight_c, bias, _, mask, scale, states = inputs
    found = backward(Arrivals(dh, dc), u, x, weight_c, bias, states, mask, scale)
    return tuple(u.new_empty(0) if gradient is None else gradient for gradient in found)


_operator = register_operator("sru", "default", _forward, _backward, keeps_states=True)
