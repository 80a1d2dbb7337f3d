"""The kernels of `triton.py`: one program takes a block of queries, or of keys, of one head of one sequence.

Letters as in `reference.py`. Softmax goes by powers of 2, which the hardware has; `lse` is the logarithm to base 2 of
its sum. Products are of blocks in the dtype of q, summed up in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _seen(o_t, o_s, T, S, window, HAS_WINDOW: tl.constexpr):
    """Whether query o_t attends to key o_s."""
    o_distance = (S - T) + o_t[:, None] - o_s[None, :]
    b_seen = (o_t < T)[:, None] & (o_distance >= 0)
    if HAS_WINDOW:
        b_seen = b_seen & (o_distance < window)
    return b_seen


@triton.jit
def _load_positions(p_scores, o_t, o_s, b_seen, T, S):
    """Scores by distance of the queries o_t for the keys o_s."""
    o_place = o_t[:, None] * (S - 1) + (T - 1) + o_s[None, :]
    return tl.load(p_scores + o_place, mask=b_seen, other=0.0).to(tl.float32)


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
def attention_fwd_kernel(
    p_qkv,
    p_bias,
    p_scores,
    B,
    T,
    S,
    H,
    window,
    scale,
    p_y,
    p_lse,
    E: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_b, i_h = _head(H)
    p_q, p_k, p_v = _heads_of(p_qkv, i_b, i_h, T, S, H, E)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, E)
    b_q = _load_queries(p_q, p_bias + i_h * E, o_t, o_e, 3 * H * E, T)
    p_scores += (i_h * B + i_b) * T * S
    scale_2 = scale * 1.4426950408889634
    b_max = tl.full([BLOCK_T], -1e30, dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_T], dtype=tl.float32)
    b_y = tl.zeros([BLOCK_T, E], dtype=tl.float32)
    last = tl.minimum(S, S - T + (tl.program_id(0) + 1) * BLOCK_T)
    for i_s in tl.range(0, last, BLOCK_S, num_stages=STAGES):
        o_s = i_s + tl.arange(0, BLOCK_S)
        b_k = _load_rows(p_k, o_s, o_e, 3 * H * E, S)
        b_v = _load_rows(p_v, o_s, o_e, 3 * H * E, S)
        b_seen = _seen(o_t, o_s, T, S, window, HAS_WINDOW)
        b_s = _dot(b_q, tl.trans(b_k)) + _load_positions(p_scores, o_t, o_s, b_seen, T, S)
        b_s = tl.where(b_seen, b_s * scale_2, -1e30)
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        if HAS_WINDOW:
            # a block may hide every key from a query, and then all its scores are the same
            b_p = tl.where(b_seen, b_p, 0.0)
        b_less = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_less + tl.sum(b_p, 1)
        b_y = b_y * b_less[:, None] + _dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new
    # rows beyond the last query have seen nothing
    b_sum = tl.where(o_t < T, b_sum, 1.0)
    b_y = b_y / b_sum[:, None]
    tl.store(p_y + ((i_b * T + o_t[:, None]) * H + i_h) * E + o_e[None, :], b_y, mask=(o_t < T)[:, None])
    tl.store(p_lse + (i_b * H + i_h) * T + o_t, b_max + tl.log2(b_sum), mask=o_t < T)


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
def _slopes(b_q, b_k, b_v, b_dy, b_lse, b_delta, p_scores, o_t, o_s, b_seen, T, S, scale):
    """P, and the gradient of scores before they are scaled down."""
    b_s = _dot(b_q, tl.trans(b_k)) + _load_positions(p_scores, o_t, o_s, b_seen, T, S)
    b_p = tl.exp2(tl.where(b_seen, b_s * (scale * 1.4426950408889634) - b_lse[:, None], -1e30))
    b_dp = _dot(b_dy, tl.trans(b_v))
    return b_p, b_p * (b_dp - b_delta[:, None]) * scale


@triton.jit
def attention_bwd_queries_kernel(
    p_qkv,
    p_bias,
    p_scores,
    B,
    T,
    S,
    H,
    window,
    scale,
    p_dy,
    p_lse,
    p_delta,
    p_dq,
    p_dscores,
    E: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_b, i_h = _head(H)
    p_q, p_k, p_v = _heads_of(p_qkv, i_b, i_h, T, S, H, E)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, E)
    o_scores = (i_h * B + i_b) * T * S
    p_scores += o_scores
    p_dscores += o_scores
    # columns of distances beyond the first key
    first = T - 1 - tl.program_id(0) * BLOCK_T
    for i_c in range(0, first, BLOCK_S):
        o_c = i_c + tl.arange(0, BLOCK_S)
        b_beyond = (o_t < T)[:, None] & (o_c[None, :] < T - 1 - o_t[:, None])
        tl.store(p_dscores + o_t[:, None] * S + o_c[None, :], tl.zeros([BLOCK_T, BLOCK_S], tl.float32), mask=b_beyond)

    b_q = _load_queries(p_q, p_bias + i_h * E, o_t, o_e, 3 * H * E, T)
    o_rows = (i_b * T * H + i_h) * E
    b_dy = _load_rows(p_dy + o_rows, o_t, o_e, H * E, T)
    o_bht = (i_b * H + i_h) * T + o_t
    b_lse = tl.load(p_lse + o_bht, mask=o_t < T, other=0.0)
    b_delta = tl.load(p_delta + o_bht, mask=o_t < T, other=0.0)
    b_dq = tl.zeros([BLOCK_T, E], dtype=tl.float32)
    last = tl.minimum(S, S - T + (tl.program_id(0) + 1) * BLOCK_T)
    for i_s in tl.range(0, last, BLOCK_S, num_stages=STAGES):
        o_s = i_s + tl.arange(0, BLOCK_S)
        b_k = _load_rows(p_k, o_s, o_e, 3 * H * E, S)
        b_v = _load_rows(p_v, o_s, o_e, 3 * H * E, S)
        b_seen = _seen(o_t, o_s, T, S, window, HAS_WINDOW)
        _, b_ds = _slopes(b_q, b_k, b_v, b_dy, b_lse, b_delta, p_scores, o_t, o_s, b_seen, T, S, scale)
        b_ds = b_ds.to(b_k.dtype)
        o_place = o_t[:, None] * (S - 1) + (T - 1) + o_s[None, :]
        # also where a window hides a key: the place is one of this row
        tl.store(p_dscores + o_place, b_ds, mask=_seen(o_t, o_s, T, S, window, False))
        b_dq += _dot(b_ds, b_k)
    tl.store(p_dq + o_rows + o_t[:, None] * H * E + o_e[None, :], b_dq, mask=(o_t < T)[:, None])


@triton.jit
def attention_bwd_keys_kernel(
    p_qkv,
    p_bias,
    p_scores,
    B,
    T,
    S,
    H,
    window,
    scale,
    p_dy,
    p_lse,
    p_delta,
    p_dqkv,
    E: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_b, i_h = _head(H)
    p_q, p_k, p_v = _heads_of(p_qkv, i_b, i_h, T, S, H, E)
    o_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    o_e = tl.arange(0, E)
    p_scores += (i_h * B + i_b) * T * S
    p_lse += (i_b * H + i_h) * T
    p_delta += (i_b * H + i_h) * T
    p_dy += (i_b * T * H + i_h) * E
    b_k = _load_rows(p_k, o_s, o_e, 3 * H * E, S)
    b_v = _load_rows(p_v, o_s, o_e, 3 * H * E, S)
    b_dk = tl.zeros([BLOCK_S, E], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_S, E], dtype=tl.float32)
    # queries before see none of these keys
    first = tl.maximum(tl.program_id(0) * BLOCK_S - (S - T), 0) // BLOCK_T * BLOCK_T
    for i_t in tl.range(first, T, BLOCK_T, num_stages=STAGES):
        o_t = i_t + tl.arange(0, BLOCK_T)
        b_q = _load_queries(p_q, p_bias + i_h * E, o_t, o_e, 3 * H * E, T)
        b_dy = _load_rows(p_dy, o_t, o_e, H * E, T)
        b_lse = tl.load(p_lse + o_t, mask=o_t < T, other=0.0)
        b_delta = tl.load(p_delta + o_t, mask=o_t < T, other=0.0)
        b_seen = _seen(o_t, o_s, T, S, window, HAS_WINDOW)
        b_p, b_ds = _slopes(b_q, b_k, b_v, b_dy, b_lse, b_delta, p_scores, o_t, o_s, b_seen, T, S, scale)
        b_dv += _dot(tl.trans(b_p.to(b_dy.dtype)), b_dy)
        b_dk += _dot(tl.trans(b_ds.to(b_q.dtype)), b_q)
    _, p_dk, p_dv = _heads_of(p_dqkv, i_b, i_h, T, S, H, E)
    o_rows = o_s[:, None] * 3 * H * E + o_e[None, :]
    tl.store(p_dk + o_rows, b_dk, mask=(o_s < S)[:, None])
    tl.store(p_dv + o_rows, b_dv, mask=(o_s < S)[:, None])
