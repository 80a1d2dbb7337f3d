"""Relative attention in plain PyTorch, which the fused kernels are tested against.

Query i of a segment of T (position M + i of S = M + T) attends to key j <= M + i, at the distance d = M + i - j:

    s_ij = ((q_i + u) . k_j + (q_i + w) . r_d) / sqrt(E)        y_i = sum_j softmax_j(s_i) v_j

With a window, distances of `window` and more are hidden.

Shapes: B = batch, T = queries, S = keys, J = 3 (queries, keys, values), H = heads, E = head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_attention(
    qkv_BSJHE: Tensor, r_SHE: Tensor, content_bias_HE: Tensor, position_bias_HE: Tensor, num_queries: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """y (B, T, H, E) of the last T positions; row c of `r_SHE` belongs to the distance S - 1 - c."""
    q_BSHE, k_BSHE, v_BSHE = qkv_BSJHE.unbind(2)
    q_BTHE = q_BSHE[:, -num_queries:]
    num_keys, width = k_BSHE.shape[1], k_BSHE.shape[3]
    query_T1 = torch.arange(num_queries, device=q_BTHE.device)[:, None]
    distance_TS = num_keys - num_queries + query_T1 - torch.arange(num_keys, device=q_BTHE.device)
    hidden_TS = distance_TS < 0
    if window is not None:
        hidden_TS = hidden_TS | (distance_TS >= window)

    content_BHTS = torch.einsum("bthe,bshe->bhts", q_BTHE + content_bias_HE, k_BSHE)
    by_distance_BHTS = torch.einsum("bthe,she->bhts", q_BTHE + position_bias_HE, r_SHE)
    column_TS = (num_keys - 1 - distance_TS).clamp(max=num_keys - 1)
    position_BHTS = by_distance_BHTS.gather(3, column_TS.expand(by_distance_BHTS.shape))
    scores_BHTS = ((content_BHTS + position_BHTS) / math.sqrt(width)).masked_fill(hidden_TS, -math.inf)
    return torch.einsum("bhts,bshe->bthe", scores_BHTS.softmax(-1), v_BSHE)
