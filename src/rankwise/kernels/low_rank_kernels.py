"""The Triton kernels of `low_rank.py`: both products for a single row of input, and the second one for a few rows.

For a single row the time is that of reading the weights. A program of the first product reads one row of Q at once; if
rows are long, it reads a span of them, so that a matrix of few rows still keeps the whole GPU busy, and the second
product adds up the spans, in a fixed order. Where the GPU can launch a dependent kernel early (from compute capability
9.0), the second one reads its first weights while the first one is still running.

Shapes: S = spans of inputs, M = rows, I = inputs, R = components, O = outputs, N = rows of second factors. Inside of a
kernel D is the number of inputs and W that of outputs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankwise.kernels.low_rank import ALIGNMENT, LARGE_TILE, TILE

WHOLE = 4096
"""A program of the first product reads a whole row of Q with up to this many inputs, all at once."""
ROWS, INNER, SPAN = 2, 1024, 2048
"""Of longer rows: how many one program reads, inputs that it reads at a time, and about how many in all."""
FEW_TILES = 512
"""Programs of fewer tiles read more weights at a time."""
COPIED = 256
"""Components that one program copies."""


@triton.jit
def first_product_kernel(p_x, p_q, p_h, R, D, SPAN, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, EARLY: tl.constexpr):
    """h[s] = Q x over the s-th span of inputs."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    i_s = tl.program_id(1)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_q = o_r.to(tl.int64)[:, None] * D
    last = tl.minimum(D, (i_s + 1) * SPAN)
    b_sum = tl.zeros([BLOCK_R, BLOCK_I], dtype=tl.float32)
    for i_i in range(i_s * SPAN, last, BLOCK_I):
        o_i = i_i + tl.arange(0, BLOCK_I)
        b_x = tl.load(p_x + o_i, mask=o_i < last, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + o_q + o_i[None, :], mask=(o_r < R)[:, None] & (o_i < last)[None, :], other=0.0)
        b_sum += b_q.to(tl.float32) * b_x[None, :]
    tl.store(p_h + i_s * R + o_r, tl.sum(b_sum, 1), mask=o_r < R)


@triton.jit
def summed(p_h, o_h, b_in, S, stride):
    """h, summed over the spans of inputs."""
    b_h = tl.load(p_h + o_h, mask=b_in, other=0.0)
    for i_s in range(1, S):
        b_h += tl.load(p_h + i_s * stride + o_h, mask=b_in, other=0.0)
    return b_h


@triton.jit
def copy_components(p_h, p_targets, p_bias, p_y, i_r, M, R, S, W, N, BLOCK: tl.constexpr):
    """The components that are outputs themselves, in the pivot layout."""
    o_r = i_r * BLOCK + tl.arange(0, BLOCK)
    o_o = tl.load(p_targets + N + o_r, mask=o_r < R, other=-1)
    for i_m in range(M):
        b_y = summed(p_h, i_m * R + o_r, o_r < R, S, M * R).to(tl.float32)
        if p_bias is not None:
            b_y += tl.load(p_bias + o_o, mask=o_o >= 0, other=0.0).to(tl.float32)
        tl.store(p_y + i_m * W + o_o, b_y.to(p_y.dtype.element_ty), mask=o_o >= 0)


@triton.jit
def read_tile(p_tiles, i_t, ALIGNED: tl.constexpr):
    """Where the weights of a tile start, its first row, the number of its rows, its first component, and its rank."""
    p_tiles += 5 * i_t
    weights = tl.multiple_of(tl.load(p_tiles), ALIGNED)
    first, rank = tl.multiple_of(tl.load(p_tiles + 3), ALIGNED), tl.multiple_of(tl.load(p_tiles + 4), ALIGNED)
    return weights, tl.load(p_tiles + 1), tl.load(p_tiles + 2), first, rank


@triton.jit
def read_targets(p_targets, p_bias, row, o_n, b_n):
    """The output that each row of a tile gives, and its bias."""
    o_o = row + o_n
    if p_targets is not None:
        o_o = tl.load(p_targets + row + o_n, mask=b_n, other=0)
    b_bias = tl.zeros_like(o_n).to(tl.float32)
    if p_bias is not None:
        b_bias += tl.load(p_bias + o_o, mask=b_n, other=0.0).to(tl.float32)
    return o_o, b_bias


@triton.jit
def second_product_kernel(
    p_h, p_p, p_tiles, p_targets, p_bias, p_y, R, S, W, N, T,
    BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = P h + bias of a single row, for the rows of one tile."""
    i_t = tl.program_id(0)
    if p_targets is not None:  # noqa: SIM102  (known when the kernel is compiled; the next one is not)
        if i_t >= T:
            if EARLY:
                tl.extra.cuda.gdc_wait()
            copy_components(p_h, p_targets, p_bias, p_y, i_t - T, 1, R, S, W, N, COPY)
            return
    weights, row, num_rows, first, rank = read_tile(p_tiles, i_t, ALIGNED)
    o_n, o_r = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_R)
    b_n = o_n < num_rows
    o_o, b_bias = read_targets(p_targets, p_bias, row, o_n, b_n)
    o_p = weights + o_n[:, None] * rank
    b_p = tl.load(p_p + o_p + o_r[None, :], mask=b_n[:, None] & (o_r < rank)[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    b_sum = b_p.to(tl.float32) * summed(p_h, first + o_r, o_r < rank, S, R)[None, :]
    for i_r in range(BLOCK_R, rank, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        b_p = tl.load(p_p + o_p + o_r[None, :], mask=b_n[:, None] & (o_r < rank)[None, :], other=0.0)
        b_sum += b_p.to(tl.float32) * summed(p_h, first + o_r, o_r < rank, S, R)[None, :]
    tl.store(p_y + o_o, (tl.sum(b_sum, 1) + b_bias).to(p_y.dtype.element_ty), mask=b_n)


@triton.jit
def second_product_of_rows_kernel(
    p_h, p_p, p_tiles, p_targets, p_bias, p_y, M, R, W, N, T,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """y = P h + bias of a few rows, for the rows of one tile."""
    i_t, i_m = tl.program_id(0), tl.program_id(1)
    if p_targets is not None:  # noqa: SIM102  (known when the kernel is compiled; the next one is not)
        if i_t >= T:
            if i_m == 0:
                copy_components(p_h, p_targets, p_bias, p_y, i_t - T, M, R, 1, W, N, COPY)
            return
    weights, row, num_rows, first, rank = read_tile(p_tiles, i_t, ALIGNED)
    o_n, o_m = tl.arange(0, BLOCK_O), i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_n = o_n < num_rows
    o_o, b_bias = read_targets(p_targets, p_bias, row, o_n, b_n)
    b_sum = tl.zeros([BLOCK_O, BLOCK_M], dtype=tl.float32)
    for i_r in range(0, rank, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        o_p = weights + o_n[:, None] * rank + o_r[None, :]
        b_p = tl.load(p_p + o_p, mask=b_n[:, None] & (o_r < rank)[None, :], other=0.0)
        o_h = o_m[None, :] * R + first + o_r[:, None]
        b_h = tl.load(p_h + o_h, mask=(o_m < M)[None, :] & (o_r < rank)[:, None], other=0.0)
        b_sum = tl.dot(b_p, b_h, b_sum, input_precision="ieee")
    b_y = (b_sum + b_bias[:, None]).to(p_y.dtype.element_ty)
    tl.store(p_y + o_m[None, :] * W + o_o[:, None], b_y, mask=b_n[:, None] & (o_m < M)[None, :])


@lru_cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel on `device` can start before the one that it depends on has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def single_row(
    x_I: Tensor, q_RI: Tensor, p: Tensor, tiles: Tensor, targets: Tensor | None, bias_O: Tensor | None, num_outputs: int
) -> Tensor:
    """The outputs of a group for a single row of input."""
    rank, num_inputs = q_RI.shape
    rows, inner, span = 1, triton.next_power_of_2(num_inputs), num_inputs
    if num_inputs > WHOLE:
        rows, inner, span = ROWS, INNER, triton.cdiv(num_inputs, round(num_inputs / SPAN))
    spans, early = triton.cdiv(num_inputs, span), launches_early(x_I.device)
    h_SR = x_I.new_empty(spans, rank, dtype=torch.float32)
    first_product_kernel[(triton.cdiv(rank, rows), spans)](
        x_I, q_RI, h_SR, rank, num_inputs, span, rows, inner, early, num_warps=4
    )
    y_O = x_I.new_empty(num_outputs)
    stored, copies = _copies(targets, rank)
    second_product_kernel[(len(tiles) + copies,)](
        *(h_SR, p, tiles, targets, bias_O, y_O, rank, spans, num_outputs, stored, len(tiles)),
        *(TILE, 256 if len(tiles) > FEW_TILES else 512, COPIED, ALIGNMENT, early),
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
    return y_O


def second_of_rows(
    h_MR: Tensor, p: Tensor, tiles: Tensor, targets: Tensor | None, bias_O: Tensor | None, num_outputs: int
) -> Tensor:
    """The outputs of a group for a few rows, from Q x."""
    num_rows, rank = h_MR.shape
    block = max(16, min(64, triton.next_power_of_2(num_rows)))
    y_MO = h_MR.new_empty(num_rows, num_outputs)
    stored, copies = _copies(targets, rank)
    second_product_of_rows_kernel[(len(tiles) + copies, triton.cdiv(num_rows, block))](
        *(h_MR, p, tiles, targets, bias_O, y_MO, num_rows, rank, num_outputs, stored, len(tiles)),
        *(block, LARGE_TILE, 64, COPIED, ALIGNMENT),
        num_warps=4,
        num_stages=4,
    )
    return y_MO


def _copies(targets: Tensor | None, rank: int) -> tuple[int, int]:
    """The rows of second factors, and the programs that copy components; 0 without pivots."""
    return (0, 0) if targets is None else (len(targets) - rank, triton.cdiv(rank, COPIED))
