"""The kernels of `triton.py`: one program walks a block of units of one sequence through time.

Letters and shapes are those of `reference.py`; README.md derives the gradients and counts the bytes. What is kept for
the backward pass is the state before each step, in the dtype of u; gates are computed again. Each number is read and
written once, and memory is the limit: loads run some steps ahead of their use, by Triton's own pipeline (`num_stages`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rankwise.lab.kernels.dropout_kernels import kept


@triton.jit
def _row(i_t, B):
    """The number of this sequence's row at step i_t; a long text has more numbers than an int32 counts."""
    return tl.cast(i_t, tl.int64) * B + tl.program_id(1)


@triton.jit
def _load_block(p_row, o_d, b_in):
    """One block of a row, in float32."""
    return tl.load(p_row + o_d, mask=b_in, other=0.0).to(tl.float32)


@triton.jit
def _load_step(p_u, p_x, i_row, o_d, b_in, D, K: tl.constexpr):
    """v, p, q and the highway of one step, as they lie in memory."""
    p_u += i_row * K * D
    b_v = tl.load(p_u + o_d, mask=b_in, other=0.0)
    b_p = tl.load(p_u + D + o_d, mask=b_in, other=0.0)
    b_q = tl.load(p_u + 2 * D + o_d, mask=b_in, other=0.0)
    b_x = tl.load((p_u + 3 * D if K == 4 else p_x + i_row * D) + o_d, mask=b_in, other=0.0)
    return b_v, b_p, b_q, b_x


@triton.jit
def sru_fwd_kernel(
    p_u,
    p_x,
    p_weight_c,
    p_bias,
    p_c0,
    p_mask,
    p_seed,
    p_h,
    p_states,
    p_c,
    scale,
    dropout,
    T,
    B,
    D,
    K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    DROPS: tl.constexpr,
    KEEPS_STATES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_wf = _load_block(p_weight_c, o_d, b_in)
    b_wr = _load_block(p_weight_c + D, o_d, b_in)
    b_bf = _load_block(p_bias, o_d, b_in)
    b_br = _load_block(p_bias + D, o_d, b_in)
    b_c = _load_block(p_c0 + i_b * D, o_d, b_in)
    b_m = _load_block(p_mask + i_b * D, o_d, b_in) if HAS_MASK else b_c
    seed = tl.load(p_seed) if DROPS else 0

    for i_t in tl.range(0, T, num_stages=STAGES):
        i_row = _row(i_t, B)
        b_v, b_p, b_q, b_x = _load_step(p_u, p_x, i_row, o_d, b_in, D, K)
        if KEEPS_STATES:
            tl.store(p_states + i_row * D + o_d, b_c, mask=b_in)
        b_highway = b_x.to(tl.float32)
        if K == 3:
            b_highway *= scale
        b_value = b_v.to(tl.float32)
        b_f = tl.sigmoid(b_p.to(tl.float32) + b_wf * b_c + b_bf)
        b_r = tl.sigmoid(b_q.to(tl.float32) + b_wr * b_c + b_br)
        b_c = b_value + b_f * (b_c - b_value)
        if HAS_MASK:
            b_r *= b_m
        b_h = b_highway + b_r * (b_c - b_highway)
        if DROPS:
            b_h = tl.where(kept(seed, (i_t * B + i_b) * D + o_d, dropout), b_h / (1 - dropout), 0.0)
        tl.store(p_h + i_row * D + o_d, b_h, mask=b_in)
    tl.store(p_c + i_b * D + o_d, b_c, mask=b_in)


@triton.jit
def _load_gradient(p_states, p_dh, p_dh_product, i_row, o_d, b_in, D, HAS_PRODUCT: tl.constexpr):
    """The state before one step, and what reaches its output: from the highway of the next layer, and its product."""
    b_c = tl.load(p_states + i_row * D + o_d, mask=b_in, other=0.0)
    b_dh = tl.load(p_dh + i_row * D + o_d, mask=b_in, other=0.0)
    b_product = b_dh
    if HAS_PRODUCT:
        b_product = tl.load(p_dh_product + i_row * D + o_d, mask=b_in, other=0.0)
    return b_c, b_dh, b_product


@triton.jit
def _load_row(p_drstd, p_rstd, p_mean, i_row, D, HAS_ROWS: tl.constexpr):
    """The slope of 1 / sigma by h - mean, and the mean, of the row of one step."""
    slope, mean = 0.0, 0.0
    if HAS_ROWS:
        rstd = tl.load(p_rstd + i_row)
        slope = tl.load(p_drstd + i_row) * rstd * rstd * rstd / D
        mean = tl.load(p_mean + i_row)
    return slope, mean


@triton.jit
def sru_bwd_kernel(
    p_u,
    p_x,
    p_weight_c,
    p_bias,
    p_states,
    p_mask,
    p_seed,
    p_dh,
    p_dh_product,
    p_drstd,
    p_rstd,
    p_mean,
    p_dc,
    p_du,
    p_dx,
    p_dgates,
    p_dc0,
    p_dmask,
    scale,
    dropout,
    T,
    B,
    D,
    K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    DROPS: tl.constexpr,
    HAS_PRODUCT: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_DC: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_d, i_b = tl.program_id(0), tl.program_id(1)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_wf = _load_block(p_weight_c, o_d, b_in)
    b_wr = _load_block(p_weight_c + D, o_d, b_in)
    b_bf = _load_block(p_bias, o_d, b_in)
    b_br = _load_block(p_bias + D, o_d, b_in)
    b_m = _load_block(p_mask + i_b * D, o_d, b_in) if HAS_MASK else b_wf
    seed = tl.load(p_seed) if DROPS else 0
    b_zero = tl.zeros([BLOCK_D], dtype=tl.float32)
    b_dc = _load_block(p_dc + i_b * D, o_d, b_in) if HAS_DC else b_zero
    b_dwf, b_dwr, b_dbf, b_dbr, b_dm = b_zero, b_zero, b_zero, b_zero, b_zero

    for i_step in tl.range(0, T, num_stages=STAGES):
        i_t = T - 1 - i_step
        i_row = _row(i_t, B)
        b_v, b_p, b_q, b_x = _load_step(p_u, p_x, i_row, o_d, b_in, D, K)
        b_c, b_dh, b_product = _load_gradient(p_states, p_dh, p_dh_product, i_row, o_d, b_in, D, HAS_PRODUCT)
        slope, mean = _load_row(p_drstd, p_rstd, p_mean, i_row, D, HAS_ROWS)

        b_before, b_value = b_c.to(tl.float32), b_v.to(tl.float32)
        b_highway = b_x.to(tl.float32)
        if K == 3:
            b_highway *= scale
        b_f = tl.sigmoid(b_p.to(tl.float32) + b_wf * b_before + b_bf)
        b_r = tl.sigmoid(b_q.to(tl.float32) + b_wr * b_before + b_br)
        b_change = b_value + b_f * (b_before - b_value) - b_highway
        b_open = b_r * b_m if HAS_MASK else b_r

        b_g = b_dh.to(tl.float32)
        if HAS_PRODUCT:
            b_g += b_product.to(tl.float32)
        if HAS_ROWS:
            b_g -= slope * (b_highway + b_open * b_change - mean)
        if DROPS:
            b_g = tl.where(kept(seed, (i_t * B + i_b) * D + o_d, dropout), b_g / (1 - dropout), 0.0)

        b_dhighway = b_g * (1 - b_open)
        b_dr = b_g * b_change
        if HAS_MASK:
            b_dm += b_dr * b_r
            b_dr *= b_m
        b_dq = b_dr * b_r * (1 - b_r)
        b_dc += b_g * b_open
        b_dp = b_dc * (b_before - b_value) * b_f * (1 - b_f)
        b_dwf += b_dp * b_before
        b_dwr += b_dq * b_before
        b_dbf += b_dp
        b_dbr += b_dq

        p_du_row = p_du + i_row * K * D
        tl.store(p_du_row + o_d, b_dc * (1 - b_f), mask=b_in)
        tl.store(p_du_row + D + o_d, b_dp, mask=b_in)
        tl.store(p_du_row + 2 * D + o_d, b_dq, mask=b_in)
        if K == 4:
            tl.store(p_du_row + 3 * D + o_d, b_dhighway, mask=b_in)
        else:
            tl.store(p_dx + i_row * D + o_d, b_dhighway * scale, mask=b_in)
        b_dc = b_dc * b_f + b_dp * b_wf + b_dq * b_wr

    # every sequence has a row of its own, so that the sum over them has one order
    o_bd = i_b * D + o_d
    tl.store(p_dgates + o_bd, b_dwf, mask=b_in)
    tl.store(p_dgates + B * D + o_bd, b_dwr, mask=b_in)
    tl.store(p_dgates + 2 * B * D + o_bd, b_dbf, mask=b_in)
    tl.store(p_dgates + 3 * B * D + o_bd, b_dbr, mask=b_in)
    tl.store(p_dc0 + o_bd, b_dc, mask=b_in)
    if HAS_MASK:
        tl.store(p_dmask + o_bd, b_dm, mask=b_in)
