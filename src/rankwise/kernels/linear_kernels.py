"""The Triton kernels of `linear.py`: sums of columns; components selected from a pair, and put back.

Shapes: N = rows, D = width, S = matrices, O = outputs, I = inputs, R = components, K = active ones, W = inputs padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.kernels.device import on
from rankwise.kernels.linear import MULTIPLE

SPLITS = 512
"""How many programs sum up the rows of one column."""


@triton.jit
def column_sums_kernel(p_x, p_sums, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i_n in range(tl.program_id(1) * BLOCK_N, N, tl.num_programs(1) * BLOCK_N):
        o_n = tl.cast(i_n, tl.int64) + tl.arange(0, BLOCK_N)
        b_in = (o_n < N)[:, None] & (o_d < D)[None, :]
        b_sum += tl.sum(tl.load(p_x + o_n[:, None] * D + o_d[None, :], mask=b_in, other=0.0).to(tl.float32), 0)
    tl.store(p_sums + tl.program_id(1) * D + o_d, b_sum, mask=o_d < D)


@triton.jit
def stack_sums_kernel(p_x, p_sums, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    i_s = tl.program_id(1)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    b_sum = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for i_n in range(0, N, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_in = (o_n < N)[:, None] & (o_d < D)[None, :]
        o_nd = (i_s * N + o_n).to(tl.int64)[:, None] * D + o_d[None, :]
        b_sum += tl.load(p_x + o_nd, mask=b_in, other=0.0)
    tl.store(p_sums + i_s * D + o_d, tl.sum(b_sum, 0), mask=o_d < D)


@triton.jit
def select_rows_kernel(p_q, p_z, p_active, p_c, D, W, BLOCK_D: tl.constexpr):
    """C = (z Q)[active], its rows padded with zeros to W."""
    i_k = tl.program_id(0)
    i_r = tl.load(p_active + i_k)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b_q = tl.load(p_q + i_r * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    if p_z is not None:
        b_q *= tl.load(p_z + i_r).to(tl.float32)
    tl.store(p_c + tl.cast(i_k, tl.int64) * W + o_d, b_q, mask=o_d < W)


@triton.jit
def find_places(p_places, p_active, o_r, K):
    """The position of component r among the K active ones, and whether it is active.

    `places` is only written for active components: what it holds for others is arbitrary, and `active` disproves it.
    """
    b_k = tl.load(p_places + o_r)
    b_found = (b_k >= 0) & (b_k < K)
    b_k = tl.where(b_found, b_k, 0)
    return b_k, b_found & (tl.load(p_active + b_k) == o_r)


@triton.jit
def put_rows_kernel(p_dc, p_q, p_z, p_active, p_places, p_dq, p_dz, D, W, K, BLOCK_D: tl.constexpr):
    """dQ[active] = z dC, dz[active] = the sums of Q dC over rows; zero elsewhere."""
    i_r = tl.program_id(0)
    i_k, found = find_places(p_places, p_active, i_r, K)
    z = tl.load(p_z + i_r).to(tl.float32) if p_z is not None else 1.0
    b_dz = tl.zeros([BLOCK_D], dtype=tl.float32)
    num_read = tl.where(found, D, 0)
    for i_d in range(0, D, BLOCK_D):
        o_d = i_d + tl.arange(0, BLOCK_D)
        b_dc = tl.load(p_dc + tl.cast(i_k, tl.int64) * W + o_d, mask=o_d < num_read, other=0.0)
        o_rd = tl.cast(i_r, tl.int64) * D + o_d
        if p_z is not None:
            b_dz += b_dc * tl.load(p_q + o_rd, mask=o_d < num_read, other=0.0).to(tl.float32)
        tl.store(p_dq + o_rd, b_dc * z, mask=o_d < D)
    if p_z is not None:
        tl.store(p_dz + i_r, tl.sum(b_dz, 0))


@triton.jit
def select_columns_kernel(p_p, p_active, p_kept, p_places, N, R, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """P[:, active], and the place of each component in `active`."""
    o_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    o_r = tl.load(p_active + o_k, mask=o_k < K, other=0)
    b_in = (o_n < N)[:, None] & (o_k < K)[None, :]
    b_p = tl.load(p_p + o_n[:, None] * R + o_r[None, :], mask=b_in, other=0.0)
    tl.store(p_kept + o_n[:, None] * K + o_k[None, :], b_p, mask=b_in)
    if tl.program_id(0) == 0:
        tl.store(p_places + o_r, o_k, mask=o_k < K)


@triton.jit
def put_columns_kernel(p_dkept, p_active, p_places, p_dp, N, R, K, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """dP[:, active] = dkept; zero elsewhere."""
    o_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    b_in = (o_n < N)[:, None] & (o_r < R)[None, :]
    b_k, b_found = find_places(p_places, p_active, tl.minimum(o_r, R - 1), K)
    b_dp = tl.load(p_dkept + o_n[:, None] * K + b_k[None, :], mask=b_in & b_found[None, :], other=0.0)
    tl.store(p_dp + o_n[:, None] * R + o_r[None, :], b_dp, mask=b_in)


def column_sums(x_NO: Tensor) -> Tensor:
    """The sum of every column, in float32."""
    x_NO = x_NO.contiguous()
    num_rows, width = x_NO.shape
    splits = min(SPLITS, triton.cdiv(num_rows, 32))
    sums = x_NO.new_empty(splits, width, dtype=torch.float32)
    with on(x_NO):
        column_sums_kernel[(triton.cdiv(width, 128), splits)](x_NO, sums, num_rows, width, BLOCK_N=32, BLOCK_D=128)
    return sums.sum(0)


def stack_sums(x_SND: Tensor) -> Tensor:
    """The sums over rows (S, D) of S matrices of few rows, in float32."""
    num_stacked, num_rows, width = x_SND.shape
    sums_SD = x_SND.new_empty(num_stacked, width)
    with on(x_SND):
        stack_sums_kernel[(triton.cdiv(width, 32), num_stacked)](
            x_SND, sums_SD, num_rows, width, BLOCK_N=64, BLOCK_D=32
        )
    return sums_SD


def select_rows(q_RI: Tensor, z_R: Tensor | None, active_K: Tensor, dtype: torch.dtype) -> Tensor:
    """(z Q)[active] in `dtype`, its rows padded with zeros to a multiple of `MULTIPLE`."""
    q_RI = q_RI.contiguous()
    num_kept, num_inputs = active_K.numel(), q_RI.shape[1]
    width = num_inputs + -num_inputs % MULTIPLE
    c_KW = q_RI.new_empty(num_kept, width, dtype=dtype)
    with on(q_RI):
        select_rows_kernel[(num_kept, triton.cdiv(width, 1024))](
            q_RI, z_R, active_K, c_KW, num_inputs, width, BLOCK_D=1024
        )
    return c_KW


def put_rows(
    dc_KW: Tensor, q_RI: Tensor, z_R: Tensor | None, active_K: Tensor, places_R: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of Q and z, zero for components that are not active."""
    q_RI = q_RI.contiguous()
    dq_RI, dz_R = torch.empty_like(q_RI), None if z_R is None else torch.empty_like(z_R)
    with on(q_RI):
        put_rows_kernel[(q_RI.shape[0],)](
            *(dc_KW.contiguous(), q_RI, z_R, active_K, places_R, dq_RI, dz_R),
            *(q_RI.shape[1], dc_KW.shape[1], active_K.numel()),
            BLOCK_D=1024,
        )
    return dq_RI, dz_R


def select_columns(p_OR: Tensor, active_K: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """P[:, active] in `dtype`, and the position in `active` of each active component."""
    p_OR, num_kept = p_OR.contiguous(), active_K.numel()
    kept_OK = p_OR.new_empty(p_OR.shape[0], num_kept, dtype=dtype)
    places_R = p_OR.new_empty(p_OR.shape[1], dtype=torch.int32)
    block_k = triton.next_power_of_2(num_kept)
    block_o = max(1, 2048 // block_k)
    with on(p_OR):
        select_columns_kernel[(triton.cdiv(p_OR.shape[0], block_o),)](
            p_OR, active_K, kept_OK, places_R, *p_OR.shape, num_kept, BLOCK_N=block_o, BLOCK_K=block_k
        )
    return kept_OK, places_R


def put_columns(dkept_OK: Tensor, p_OR: Tensor, active_K: Tensor, places_R: Tensor) -> Tensor:
    """The gradient of P, zero for components that are not active."""
    dp_OR = torch.empty_like(p_OR, memory_format=torch.contiguous_format)
    num_outputs, rank = p_OR.shape
    block_r = min(512, triton.next_power_of_2(rank))
    block_o = 4096 // block_r
    with on(dp_OR):
        put_columns_kernel[(triton.cdiv(num_outputs, block_o), triton.cdiv(rank, block_r))](
            *(dkept_OK.contiguous(), active_K, places_R, dp_OR, num_outputs, rank, active_K.numel()),
            BLOCK_N=block_o,
            BLOCK_R=block_r,
        )
    return dp_OR
