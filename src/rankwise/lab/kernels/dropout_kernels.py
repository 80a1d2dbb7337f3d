"""Dropout inside a kernel: drawn from a number on the device, and found again in the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(seed, offset, dropout):
    """Whether a number survives dropout: a hash of its place."""
    bits = offset.to(tl.uint32) ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout
