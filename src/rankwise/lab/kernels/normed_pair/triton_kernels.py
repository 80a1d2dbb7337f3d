"""The kernels of `triton.py`; letters as there, C being the folded Q."""

from __future__ import annotations

import triton
import triton.language as tl

from rankwise.kernels.linear_kernels import find_places


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
def fold_kernel(
    p_q,
    p_gamma,
    p_beta,
    p_z,
    p_active,
    p_c,
    p_t,
    D,
    HAS_Z: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_k = tl.program_id(0)
    i_r = tl.load(p_active + i_k) if HAS_ACTIVE else i_k
    o_d = tl.arange(0, BLOCK_D)
    b_in = o_d < D
    b_q = tl.load(p_q + i_r * D + o_d, mask=b_in, other=0.0).to(tl.float32)
    if HAS_Z:
        b_q *= tl.load(p_z + i_r).to(tl.float32)
    b_a = b_q * tl.load(p_gamma + o_d, mask=b_in, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o_d, mask=b_in, other=0.0).to(tl.float32)
    tl.store(p_c + i_k * D + o_d, b_a - tl.sum(b_a, 0) / D, mask=b_in)
    tl.store(p_t + i_k, tl.sum(b_q * b_beta, 0))


@triton.jit
def fold_bwd_kernel(
    p_dc,
    p_dt_blocks,
    p_q,
    p_gamma,
    p_beta,
    p_z,
    p_active,
    p_places,
    p_dq,
    p_dz,
    p_sums,
    R,
    K,
    D,
    NUM_BLOCKS,
    HAS_Z: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
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
        if HAS_ACTIVE:
            i_k, found = find_places(p_places, p_active, i_r, K)
            b_read, b_blocks = o_d < tl.where(found, D, 0), o_t < tl.where(found, NUM_BLOCKS, 0)
        b_dc = tl.load(p_dc + i_k * D + o_d, mask=b_read, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + i_r * D + o_d, mask=b_read, other=0.0).to(tl.float32)
        dt = tl.sum(tl.load(p_dt_blocks + o_t * K + i_k, mask=b_blocks, other=0.0), 0)
        b_dc -= tl.sum(b_dc, 0) / D
        b_g = b_dc * b_gamma + dt * b_beta
        if HAS_Z:
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
