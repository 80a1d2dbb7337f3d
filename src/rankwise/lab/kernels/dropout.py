"""Dropout inside Triton kernels: drawn from a seed on the device, and drawn again in the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


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
