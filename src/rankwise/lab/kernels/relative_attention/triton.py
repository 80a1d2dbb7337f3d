"""Relative attention in Triton: scores by content and their softmax never leave the chip.

Scores by distance are one batched product, s = (q + w) r^T, of which the kernels read s_{i, S-1-d} where they need it:
with M + i - j for d that is column j + T - 1 - i, so a row moves by one place from query to query, and no shifted copy
is made. One program takes a block of queries, or of keys, of one head of one sequence. Softmax goes by powers of 2,
which the hardware has; `lse` is the logarithm to base 2 of its sum. Products are of blocks in the dtype of q, summed up
in float32. Letters and shapes as in `reference.py`; N = B T.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Launch(NamedTuple):
    """The blocks, warps and pipeline stages of a kernel."""

    block_t: int
    block_s: int
    num_warps: int
    stages: int


FORWARD, BACKWARD = Launch(64, 64, 4, 1), Launch(64, 64, 4, 1)
"""`benchmarks/lm_speed.py kernels` compares others: the forward pass is fastest so on an H200 (22 x 8 heads of 64, 512
queries, 1024 keys), and the backward pass was before it wrote the gradients of scores too."""
ROWS = 64
"""How many rows one program of `row_products` holds."""


@triton.jit
def _dot(b_x, b_y):
    """b_x b_y in float32; numbers of four bytes are not cut down to tensor cores' own."""
    return tl.dot(b_x, b_y, input_precision="ieee")


@triton.jit
def _load_rows(p_rows, o_n, o_e, stride, N):
    """Rows o_n of a head."""
    return tl.load(p_rows + o_n[:, None] * stride + o_e[None, :], mask=(o_n < N)[:, None], other=0.0)


@triton.jit
def _load_queries(p_q, p_bias, o_t, o_e, stride, T):
    """q + u."""
    b_q = _load_rows(p_q, o_t, o_e, stride, T)
    return (b_q.to(tl.float32) + tl.load(p_bias + o_e).to(tl.float32)[None, :]).to(b_q.dtype)


@triton.jit
def _seen(o_t, o_s, T, S, window):
    """Whether query o_t attends to key o_s."""
    o_distance = (S - T) + o_t[:, None] - o_s[None, :]
    b_seen = (o_t < T)[:, None] & (o_distance >= 0)
    if window is not None:
        b_seen = b_seen & (o_distance < window)
    return b_seen


@triton.jit
def _scores(b_q, b_k, p_places, o_s, b_seen, MASKED: tl.constexpr):
    """Scores before they are scaled down; `p_places` are those by distance, for a key 0 of each query."""
    if MASKED:
        b_positions = tl.load(p_places + o_s[None, :], mask=b_seen, other=0.0)
    else:
        b_positions = tl.load(p_places + o_s[None, :])
    return _dot(b_q, tl.trans(b_k)) + b_positions.to(tl.float32)


@triton.jit
def _places(p_scores, o_t, T, S):
    """Pointers to the scores by distance for key 0, by query; rows beyond the last query repeat the last."""
    return p_scores + (tl.minimum(o_t, T - 1) * (S - 1) + (T - 1))[:, None]


@triton.jit
def _head(H):
    """Sequence and head of this program."""
    return tl.cast(tl.program_id(1) // H, tl.int64), tl.cast(tl.program_id(1) % H, tl.int64)


@triton.jit
def _heads_of(p_qkv, i_b, i_h, T, S, H, E: tl.constexpr):
    """Where the queries, keys and values of a head begin; their rows are 3 H E apart."""
    p_head = p_qkv + (i_b * S * 3 * H + i_h) * E
    return p_head + tl.cast(S - T, tl.int64) * 3 * H * E, p_head + H * E, p_head + 2 * H * E


@triton.jit
def _attend(
    b_q, p_k, p_v, p_places, i_s, o_t, o_e, b_max, b_sum, b_y, scale, T, S, H, window,
    E: tl.constexpr, MASKED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the softmax: its largest score so far, its sum, and the sum of values."""
    o_s = i_s + tl.arange(0, BLOCK_S)
    b_k = _load_rows(p_k, o_s, o_e, 3 * H * E, S)
    b_v = _load_rows(p_v, o_s, o_e, 3 * H * E, S)
    b_seen = _seen(o_t, o_s, T, S, window)
    b_s = _scores(b_q, b_k, p_places, o_s, b_seen, MASKED)
    if MASKED:
        b_s = tl.where(b_seen, b_s, -1e30)
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_p = tl.exp2(b_s * (scale * LOG2_E) - (b_new * (scale * LOG2_E))[:, None])
    if window is not None:
        # a block may hide every key from a query, and then all its scores are the same
        b_p = tl.where(b_seen, b_p, 0.0)
    b_less = tl.exp2((b_max - b_new) * (scale * LOG2_E))
    b_sum = b_sum * b_less + tl.sum(b_p, 1)
    b_y = b_y * b_less[:, None] + _dot(b_p.to(b_v.dtype), b_v)
    return b_new, b_sum, b_y


@triton.jit
def attention_fwd_kernel(
    p_qkv, p_bias, p_scores, B, T, S, H, window, scale, p_y, p_lse,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h = _head(H)
    p_q, p_k, p_v = _heads_of(p_qkv, i_b, i_h, T, S, H, E)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, E)
    b_q = _load_queries(p_q, p_bias + i_h * E, o_t, o_e, 3 * H * E, T)
    p_scores += (i_h * B + i_b) * T * S
    p_places = _places(p_scores, o_t, T, S)
    b_max = tl.full([BLOCK_T], -1e30, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_T], dtype=tl.float32)
    b_y = tl.zeros([BLOCK_T, E], dtype=tl.float32)
    last = tl.minimum(S, S - T + (tl.program_id(0) + 1) * BLOCK_T)
    # keys, in whole blocks, that every query of this program sees: no mask is needed for them
    whole = 0
    if window is None:
        whole = (S - T + tl.program_id(0) * BLOCK_T + 1) // BLOCK_S * BLOCK_S
    for i_s in tl.range(0, whole, BLOCK_S, num_stages=STAGES):
        b_max, b_sum, b_y = _attend(
            b_q, p_k, p_v, p_places, i_s, o_t, o_e, b_max, b_sum, b_y, scale, T, S, H, None, E, False, BLOCK_S
        )
    for i_s in tl.range(whole, last, BLOCK_S, num_stages=STAGES):
        b_max, b_sum, b_y = _attend(
            b_q, p_k, p_v, p_places, i_s, o_t, o_e, b_max, b_sum, b_y, scale, T, S, H, window, E, True, BLOCK_S
        )
    # rows beyond the last query have seen nothing
    b_sum = tl.where(o_t < T, b_sum, 1.0)
    b_y = b_y / b_sum[:, None]
    tl.store(p_y + ((i_b * T + o_t[:, None]) * H + i_h) * E + o_e[None, :], b_y, mask=(o_t < T)[:, None])
    tl.store(p_lse + (i_b * H + i_h) * T + o_t, b_max * (scale * LOG2_E) + tl.log2(b_sum), mask=o_t < T)


@triton.jit
def attention_delta_kernel(p_dy, p_y, p_delta, T, H, E: tl.constexpr, BLOCK_T: tl.constexpr):
    """delta_i = dy_i . y_i."""
    i_b, i_h = _head(H)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, E)
    o_rows = (i_b * T * H + i_h) * E
    b_dy = _load_rows(p_dy + o_rows, o_t, o_e, H * E, T).to(tl.float32)
    b_y = _load_rows(p_y + o_rows, o_t, o_e, H * E, T).to(tl.float32)
    tl.store(p_delta + (i_b * H + i_h) * T + o_t, tl.sum(b_dy * b_y, 1), mask=o_t < T)


@triton.jit
def _slope_of_keys(
    b_k, b_v, b_dk, b_dv, p_q, p_bias, p_dy, p_lse, p_delta, p_scores, p_dscores, p_dby_key,
    i_t, o_s, o_e, scale, T, S, H, window, E: tl.constexpr, MASKED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries says of keys and values, and write the gradient of scores: by distance, by key."""
    o_t = i_t + tl.arange(0, BLOCK_T)
    b_q = _load_queries(p_q, p_bias, o_t, o_e, 3 * H * E, T)
    b_dy = _load_rows(p_dy, o_t, o_e, H * E, T)
    # beyond the last query nothing is open
    b_lse = tl.load(p_lse + o_t, mask=o_t < T, other=1e30)
    b_delta = tl.load(p_delta + o_t, mask=o_t < T, other=0.0)
    b_seen = _seen(o_t, o_s, T, S, window)
    p_places = _places(p_scores, o_t, T, S)
    b_s = _scores(b_q, b_k, p_places, o_s, b_seen, MASKED) * (scale * LOG2_E) - b_lse[:, None]
    if MASKED:
        b_s = tl.where(b_seen, b_s, -1e30)
    b_p = tl.exp2(b_s)
    # the gradient of the scores after they are scaled down
    b_ds = (b_p * (_dot(b_dy, tl.trans(b_v)) - b_delta[:, None])).to(b_q.dtype)
    b_stored = (o_t < T)[:, None] & (o_s < S)[None, :]
    tl.store(p_dby_key + o_t[:, None] * S + o_s[None, :], b_ds, mask=b_stored)
    if MASKED:
        # also where a window hides a key: the place is one of this row
        b_stored = _seen(o_t, o_s, T, S, None)
    tl.store(_places(p_dscores, o_t, T, S) + o_s[None, :], b_ds, mask=b_stored)
    b_dv += _dot(tl.trans(b_p.to(b_dy.dtype)), b_dy)
    b_dk += _dot(tl.trans(b_ds), b_q)
    return b_dk, b_dv


@triton.jit
def attention_bwd_kernel(
    p_qkv, p_bias, p_scores, B, T, S, H, window, scale, p_dy, p_lse, p_delta, p_dqkv, p_dscores, p_dby_key,
    E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_b, i_h = _head(H)
    p_q, p_k, p_v = _heads_of(p_qkv, i_b, i_h, T, S, H, E)
    o_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    o_e = tl.arange(0, E)
    p_scores += (i_h * B + i_b) * T * S
    p_dscores += (i_h * B + i_b) * T * S
    p_dby_key += (i_b * H + i_h) * T * S
    p_lse += (i_b * H + i_h) * T
    p_delta += (i_b * H + i_h) * T
    p_dy += (i_b * T * H + i_h) * E
    b_k = _load_rows(p_k, o_s, o_e, 3 * H * E, S)
    b_v = _load_rows(p_v, o_s, o_e, 3 * H * E, S)
    b_dk = tl.zeros([BLOCK_S, E], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_S, E], dtype=tl.float32)
    # queries before see none of these keys; from `whole` on they see all of them
    i_s = tl.program_id(0) * BLOCK_S
    first = tl.maximum(i_s - (S - T), 0) // BLOCK_T * BLOCK_T
    whole = tl.minimum(tl.cdiv(tl.maximum(i_s + BLOCK_S - 1 - (S - T), 0), BLOCK_T) * BLOCK_T, T)
    if window is not None or i_s + BLOCK_S > S:
        whole = tl.cdiv(T, BLOCK_T) * BLOCK_T
    b_zero = tl.zeros([BLOCK_T, BLOCK_S], dtype=b_k.dtype)
    for i_t in range(0, first, BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        tl.store(p_dby_key + o_t[:, None] * S + o_s[None, :], b_zero, mask=(o_t < T)[:, None] & (o_s < S)[None, :])
    # columns of distances beyond the first key
    for i_t in range(0, T - 1 - i_s, BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        b_beyond = o_s[None, :] < T - 1 - o_t[:, None]
        tl.store(p_dscores + o_t[:, None] * S + o_s[None, :], b_zero, mask=b_beyond)
    for i_t in tl.range(first, whole, BLOCK_T, num_stages=STAGES):
        b_dk, b_dv = _slope_of_keys(
            b_k, b_v, b_dk, b_dv, p_q, p_bias + i_h * E, p_dy, p_lse, p_delta, p_scores, p_dscores, p_dby_key,
            i_t, o_s, o_e, scale, T, S, H, window, E, True, BLOCK_T,
        )  # fmt: skip
    for i_t in tl.range(whole, T, BLOCK_T, num_stages=STAGES):
        b_dk, b_dv = _slope_of_keys(
            b_k, b_v, b_dk, b_dv, p_q, p_bias + i_h * E, p_dy, p_lse, p_delta, p_scores, p_dscores, p_dby_key,
            i_t, o_s, o_e, scale, T, S, H, None, E, False, BLOCK_T,
        )  # fmt: skip
    b_dk *= scale
    _, p_dk, p_dv = _heads_of(p_dqkv, i_b, i_h, T, S, H, E)
    o_rows = o_s[:, None] * 3 * H * E + o_e[None, :]
    tl.store(p_dk + o_rows, b_dk, mask=(o_s < S)[:, None])
    tl.store(p_dv + o_rows, b_dv, mask=(o_s < S)[:, None])


@triton.jit
def attention_merge_kernel(
    p_dcontent, p_dposition, p_dqkv, p_sums, scale, B, T, S, H,
    E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """The gradient of q: its two parts where there are queries, zero in the memory; and their sums, for the biases."""
    i_program, num_programs, A = tl.program_id(0), tl.num_programs(0), H * E
    o_n = i_program * BLOCK_N + tl.arange(0, BLOCK_N)
    o_a = tl.arange(0, BLOCK_A)
    o_b, o_t = o_n // S, o_n % S - (S - T)
    b_in = (o_n < B * S)[:, None] & (o_a < A)[None, :]
    b_query = b_in & (o_t >= 0)[:, None]
    # both parts are stored by head and by query
    o_content = ((o_b[:, None] * H + (o_a // E)[None, :]) * T + o_t[:, None]).to(tl.int64) * E + (o_a % E)[None, :]
    o_position = ((o_a // E)[None, :] * (B * T) + (o_b * T + o_t)[:, None]).to(tl.int64) * E + (o_a % E)[None, :]
    b_dcontent = tl.load(p_dcontent + o_content, mask=b_query, other=0.0).to(tl.float32) * scale
    b_dposition = tl.load(p_dposition + o_position, mask=b_query, other=0.0).to(tl.float32) * scale
    tl.store(p_dqkv + o_n.to(tl.int64)[:, None] * 3 * A + o_a[None, :], b_dcontent + b_dposition, mask=b_in)
    tl.store(p_sums + i_program * A + o_a, tl.sum(b_dcontent, 0), mask=o_a < A)
    tl.store(p_sums + (num_programs + i_program) * A + o_a, tl.sum(b_dposition, 0), mask=o_a < A)


def fits(head_width: int) -> bool:
    """Whether the kernels can run heads of this width."""
    return 16 <= head_width <= 128 and head_width & (head_width - 1) == 0


def relative_attention(
    qkv_BSJHE: Tensor, r_SHE: Tensor, content_bias_HE: Tensor, position_bias_HE: Tensor, num_queries: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """`reference.relative_attention`."""
    y_BTHE: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        qkv_BSJHE, r_SHE, content_bias_HE, position_bias_HE, num_queries, window
    )
    return y_BTHE


class _Attention(torch.autograd.Function):
    """The backward pass is written out: gradients of q, k and v go where they lay, without sums and copies between."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BSJHE: Tensor, r_SHE: Tensor, content_bias_HE: Tensor, position_bias_HE: Tensor,
        num_queries: int, window: int | None,
    ) -> Tensor:  # fmt: skip
        dtype = qkv_BSJHE.dtype
        qkv_BSJHE, r_SHE = qkv_BSJHE.contiguous(), r_SHE.to(dtype)
        q_BTHE = qkv_BSJHE[:, -num_queries:, 0]
        position_NHE = (q_BTHE + position_bias_HE.to(dtype)).flatten(0, 1)
        scores_HNS = torch.bmm(position_NHE.transpose(0, 1), r_SHE.permute(1, 2, 0))
        y_BTHE, lse_BHT = forward(qkv_BSJHE, content_bias_HE, scores_HNS, num_queries, window)
        ctx.window, ctx.dtypes = window, (content_bias_HE.dtype, position_bias_HE.dtype)
        ctx.save_for_backward(qkv_BSJHE, r_SHE, content_bias_HE, position_NHE, scores_HNS, y_BTHE, lse_BHT)
        return y_BTHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTHE: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BSJHE, r_SHE, content_bias_HE, position_NHE, scores_HNS, y_BTHE, lse_BHT = ctx.saved_tensors
        dy_BTHE = dy_BTHE.contiguous()
        inputs = (dy_BTHE, qkv_BSJHE, content_bias_HE, scores_HNS)
        delta_BHT = row_products(dy_BTHE, y_BTHE)
        dqkv_BSJHE, dscores_HNS, dby_key_BHTS = backward(*inputs, lse_BHT, delta_BHT, ctx.window)
        scale = 1 / math.sqrt(dy_BTHE.shape[3])
        dr_HSE = torch.bmm(dscores_HNS.transpose(1, 2), position_NHE.transpose(0, 1)).mul_(scale)
        dposition_HNE = torch.bmm(dscores_HNS, r_SHE.transpose(0, 1))
        dcontent_BHTE = dby_key_BHTS @ qkv_BSJHE[:, :, 1].transpose(1, 2)
        dbiases = merge(dcontent_BHTE, dposition_HNE, dqkv_BSJHE, scale)
        dbiases_HE = (dbias.to(dtype) for dbias, dtype in zip(dbiases, ctx.dtypes, strict=True))
        return dqkv_BSJHE, dr_HSE.transpose(0, 1), *dbiases_HE, None, None


def forward(
    qkv_BSJHE: Tensor, content_bias_HE: Tensor, scores_HNS: Tensor, num_queries: int, window: int | None,
    launch: Launch = FORWARD,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and the logarithm to base 2 of the sum of each softmax, (B, H, T)."""
    size_B, _, _, size_H, width = qkv_BSJHE.shape
    y_BTHE = qkv_BSJHE.new_empty(size_B, num_queries, size_H, width)
    lse_BHT = qkv_BSJHE.new_empty(size_B, size_H, num_queries, dtype=torch.float32)
    with on(qkv_BSJHE):
        attention_fwd_kernel[(triton.cdiv(num_queries, launch.block_t), size_B * size_H)](
            *_inputs(qkv_BSJHE, content_bias_HE, scores_HNS, num_queries, window),
            *(y_BTHE, lse_BHT),
            **_constants(width, launch),
        )
    return y_BTHE, lse_BHT


def row_products(dy_BTHE: Tensor, y_BTHE: Tensor) -> Tensor:
    """dy . y of each query, (B, H, T)."""
    size_B, num_queries, size_H, width = dy_BTHE.shape
    delta_BHT = dy_BTHE.new_empty(size_B, size_H, num_queries, dtype=torch.float32)
    with on(dy_BTHE):
        attention_delta_kernel[(triton.cdiv(num_queries, ROWS), size_B * size_H)](
            dy_BTHE, y_BTHE, delta_BHT, num_queries, size_H, E=width, BLOCK_T=ROWS
        )
    return delta_BHT


def backward(
    dy_BTHE: Tensor, qkv_BSJHE: Tensor, content_bias_HE: Tensor, scores_HNS: Tensor, lse_BHT: Tensor,
    delta_BHT: Tensor, window: int | None, launch: Launch = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of k and v, that of q left open; and of the scaled scores, by distance and by key (B, H, T, S)."""
    size_B, num_queries, size_H, width = dy_BTHE.shape
    num_keys = qkv_BSJHE.shape[1]
    dqkv_BSJHE, dscores_HNS = torch.empty_like(qkv_BSJHE), torch.empty_like(scores_HNS)
    dby_key_BHTS = scores_HNS.new_empty(size_B, size_H, num_queries, num_keys)
    with on(dy_BTHE):
        attention_bwd_kernel[(triton.cdiv(num_keys, launch.block_s), size_B * size_H)](
            *_inputs(qkv_BSJHE, content_bias_HE, scores_HNS, num_queries, window),
            *(dy_BTHE, lse_BHT, delta_BHT, dqkv_BSJHE, dscores_HNS, dby_key_BHTS),
            **_constants(width, launch),
        )
    return dqkv_BSJHE, dscores_HNS, dby_key_BHTS


def merge(dcontent_BHTE: Tensor, dposition_HNE: Tensor, dqkv_BSJHE: Tensor, scale: float) -> Tensor:
    """Write the gradient of q, the sum of its two parts, into that of q, k and v; the sums of each part, (2, H, E)."""
    size_B, size_H, num_queries, width = dcontent_BHTE.shape
    num_keys, size_A = dqkv_BSJHE.shape[1], size_H * width
    blocks = {"BLOCK_N": 16, "BLOCK_A": triton.next_power_of_2(size_A)}
    programs = triton.cdiv(size_B * num_keys, blocks["BLOCK_N"])
    sums = dqkv_BSJHE.new_empty(2, programs, size_A, dtype=torch.float32)
    with on(dqkv_BSJHE):
        attention_merge_kernel[(programs,)](
            *(dcontent_BHTE.contiguous(), dposition_HNE, dqkv_BSJHE, sums, scale),
            *(size_B, num_queries, num_keys, size_H, width),
            num_warps=8,
            **blocks,
        )
    return sums.sum(1).view(2, size_H, width)


def _inputs(
    qkv_BSJHE: Tensor, content_bias_HE: Tensor, scores_HNS: Tensor, num_queries: int, window: int | None
) -> tuple[Any, ...]:
    """The first arguments of the forward and the backward kernel."""
    size_B, num_keys, _, size_H, width = qkv_BSJHE.shape
    sizes = (size_B, num_queries, num_keys, size_H)
    return qkv_BSJHE, content_bias_HE.contiguous(), scores_HNS, *sizes, window, 1 / math.sqrt(width)


def _constants(width: int, launch: Launch) -> dict[str, Any]:
    blocks = {"BLOCK_T": launch.block_t, "BLOCK_S": launch.block_s, "STAGES": launch.stages}
    return {"E": width, **blocks, "num_warps": launch.num_warps}
