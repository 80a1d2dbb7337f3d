"""Dropout inside Triton kernels: drawn from a seed on the device, and drawn again in the backward pass.

`relu_dropout` is relu and dropout in one pass over memory: its output holds all that the gradient needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import on

BLOCK = 2048
"""Numbers that one program of `relu_dropout` computes."""


class Dropout(NamedTuple):
    """The arguments of a kernel that applies dropout; the seed is None where nothing is dropped."""

    seed: Tensor | None
    rate: float


NO_DROPOUT = Dropout(None, 0.0)


def draw(rate: float, device: torch.device) -> Dropout:
    """Dropout with a seed from the device's own generator, which a checkpoint keeps."""
    if rate == 0:
        return NO_DROPOUT
    return Dropout(torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device), rate)


@triton.jit
def kept(seed, offset, dropout):
    """Whether a number survives dropout: a hash of its place."""
    bits = offset.to(tl.uint32) ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout


@triton.jit
def relu_fwd_kernel(p_x, p_seed, dropout, p_y, N, BLOCK: tl.constexpr):
    o_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_y = tl.maximum(tl.load(p_x + o_n, mask=o_n < N, other=0.0).to(tl.float32), 0.0)
    if p_seed is not None:
        b_y = tl.where(kept(tl.load(p_seed), o_n, dropout), b_y / (1 - dropout), 0.0)
    tl.store(p_y + o_n, b_y, mask=o_n < N)


@triton.jit
def relu_bwd_kernel(p_dy, p_y, p_dx, dropout, N, BLOCK: tl.constexpr):
    o_n = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_y = tl.load(p_y + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    # where y is zero, relu or dropout has closed the way
    tl.store(p_dx + o_n, tl.where(b_y > 0, b_dy / (1 - dropout), 0.0), mask=o_n < N)


class ReluDropout(torch.autograd.Function):
    """dropout(relu(x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        with on(x):
            relu_fwd_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, *draw(dropout, x.device), y, x.numel(), BLOCK=BLOCK)
        ctx.dropout = dropout
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        with on(y):
            relu_bwd_kernel[(triton.cdiv(y.numel(), BLOCK),)](
                dy.contiguous(), y, dx, ctx.dropout, y.numel(), BLOCK=BLOCK
            )
        return dx, None


def relu_dropout(x: Tensor, dropout: float) -> Tensor:
    """`F.dropout(F.relu(x), dropout)`."""
    y: Tensor = ReluDropout.apply(x, dropout)  # type: ignore[no-untyped-call]
    return y
