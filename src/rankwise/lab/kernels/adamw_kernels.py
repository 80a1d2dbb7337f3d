"""The kernel of `adamw.py`; its letters are those of Adam: gradient g, first moment m, second moment v."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rankwise.kernels.device import on

BLOCK = 1024


@triton.jit
def _one_less_power(log_beta, step):
    """1 - beta^step = 1 - exp(x), by its series near zero, where the difference would lose its digits."""
    x = step * log_beta
    near = tl.maximum(x, -0.5)
    series = 1.0 + near / 9.0
    series = 1.0 + near / 8.0 * series
    series = 1.0 + near / 7.0 * series
    series = 1.0 + near / 6.0 * series
    series = 1.0 + near / 5.0 * series
    series = 1.0 + near / 4.0 * series
    series = 1.0 + near / 3.0 * series
    series = 1.0 + near / 2.0 * series
    return tl.where(x > -0.5, -near * series, 1.0 - tl.exp(x))


@triton.jit
def adamw_kernel(
    p_p,
    p_g,
    p_m,
    p_v,
    p_step,
    p_lr,
    p_coefficient,
    beta1,
    rest1,
    log_beta1,
    beta2,
    rest2,
    log_beta2,
    weight_decay,
    eps,
    N,
    CLIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_in = o < N
    step = tl.load(p_step)
    lr = tl.load(p_lr)
    b_p = tl.load(p_p + o, mask=b_in, other=0.0)
    b_g = tl.load(p_g + o, mask=b_in, other=0.0)
    b_m = tl.load(p_m + o, mask=b_in, other=0.0)
    b_v = tl.load(p_v + o, mask=b_in, other=0.0)
    if CLIPS:
        b_g *= tl.load(p_coefficient)
    b_m = beta1 * b_m + rest1 * b_g
    b_v = beta2 * b_v + rest2 * b_g * b_g
    b_size = tl.sqrt(b_v) / tl.sqrt(_one_less_power(log_beta2, step)) + eps
    b_p -= lr * weight_decay * b_p
    b_p -= lr / _one_less_power(log_beta1, step) * b_m / b_size
    tl.store(p_p + o, b_p, mask=b_in)
    tl.store(p_m + o, b_m, mask=b_in)
    tl.store(p_v + o, b_v, mask=b_in)


def update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, group: dict[str, Any], coefficient: Tensor | None
) -> None:
    """One parameter after its count of steps has gone up; `group` holds the settings, as PyTorch names them."""
    assert m.is_contiguous() and v.is_contiguous()
    settings = [float(x) for beta in group["betas"] for x in (beta, 1 - beta, math.log(beta) if beta else -1e3)]
    with on(p):
        adamw_kernel[(triton.cdiv(p.numel(), BLOCK),)](
            p,
            g,
            m,
            v,
            step,
            group["lr"],
            step if coefficient is None else coefficient,
            *settings,
            float(group["weight_decay"]),
            float(group["eps"]),
            p.numel(),
            CLIPS=coefficient is not None,
            BLOCK=BLOCK,
        )
