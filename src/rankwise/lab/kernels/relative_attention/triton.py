"""Relative attention in Triton: scores by content and their softmax never leave the chip.

Scores by distance are one batched product, s = (q + w) r^T, of which the kernels read s_{i, S-1-d} where they need it:
with M + i - j for d that is column j + T - 1 - i, so a row moves by one place from query to query, and no shifted copy
is made. Shapes as in `reference.py`; N = B T.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on
from rankwise.lab.kernels.relative_attention.triton_kernels import (
    attention_bwd_kernel,
    attention_delta_kernel,
    attention_fwd_kernel,
    attention_merge_kernel,
)


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
        dcontent_HE, dposition_HE = merge(dcontent_BHTE, dposition_HNE, dqkv_BSJHE, scale)
        content_dtype, position_dtype = ctx.dtypes
        dbiases = dcontent_HE.to(content_dtype), dposition_HE.to(position_dtype)
        return dqkv_BSJHE, dr_HSE.transpose(0, 1), *dbiases, None, None


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
