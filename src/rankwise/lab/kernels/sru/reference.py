"""The recurrence of the simple recurrent unit (SRU) in plain PyTorch, which fast kernels are tested against.

With W x_t = (v_t, p_t, q_t) from one large matrix product outside, one step is elementwise (Lei et al. 2018, "Simple
Recurrent Units for Highly Parallelizable Recurrence"):

    f_t = sigmoid(p_t + w_f c_{t-1} + b_f)                forget gate
    r_t = sigmoid(q_t + w_r c_{t-1} + b_r)                reset (highway) gate
    c_t = f_t c_{t-1} + (1 - f_t) v_t                     state
    h_t = x'_t + m r_t (c_t - x'_t)                       output

x' is what the highway carries: `scale` times the input where that has the width of the state (K = 3), otherwise a
fourth projection (K = 4). m is the variational dropout mask, one for all steps of a sequence.

Shapes: T = steps, B = batch, D = width of the state, K = projections per unit (3 or 4), G = gates (2: forget, reset).
Time comes first, so that a step is one block of memory; D comes last, so that neighbouring lanes of a kernel read
neighbouring numbers of one projection, which an order (D, K) would scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sru(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor,
    mask_BD: Tensor | None = None, scale: float = 1.0, *, scanned: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All outputs h (T, B, D) and the last state c (B, D), differentiable in every tensor.

    Args:
        u_TBKD: the projections v, p, q and, with K = 4, x'.
        x_TBD: with K = 3 the layer's input, for the highway; None with K = 4.
        weight_c_GD: w_f and w_r.
        bias_GD: b_f and b_r.
        c0_BD: state before the first step.
        mask_BD: m, zeros and 1 / (1 - p); None for no dropout.
        scale: factor of x_TBD on the highway.
        scanned: let a graph that is being captured hold one step and a loop over any number of them.

    The arithmetic and the state are in float32 at least, whatever the inputs are in; h comes back in the dtype of
    `u_TBKD`, c in that of the state.
    """
    dtype = torch.promote_types(u_TBKD.dtype, torch.float32)
    v_TBD, p_TBD, q_TBD, *projected = u_TBKD.to(dtype).unbind(2)
    w_f, w_r = weight_c_GD.to(dtype)
    b_f, b_r = bias_GD.to(dtype)

    states_TBD, last_BD = (_scan if scanned else _loop)(v_TBD, p_TBD + b_f, w_f, c0_BD.to(dtype))
    # no step waits for r or h, so they need no loop
    r_TBD = torch.sigmoid(torch.addcmul(q_TBD + b_r, w_r, states_TBD[:-1]))
    if mask_BD is not None:
        r_TBD = r_TBD * mask_BD.to(dtype)
    if x_TBD is None:
        (highway_TBD,) = projected
    else:
        highway_TBD = x_TBD.to(dtype) * scale
    h_TBD = torch.addcmul(highway_TBD, r_TBD, states_TBD[1:] - highway_TBD)
    return h_TBD.to(u_TBKD.dtype), last_BD


def _step(c_BD: Tensor, v_BD: Tensor, p_BD: Tensor, w_f_D: Tensor) -> Tensor:
    """f c + (1 - f) v"""
    return torch.lerp(v_BD, c_BD, torch.sigmoid(torch.addcmul(p_BD, w_f_D, c_BD)))


def _loop(v_TBD: Tensor, p_TBD: Tensor, w_f_D: Tensor, c0_BD: Tensor) -> tuple[Tensor, Tensor]:
    """The states before the first step and after each, (T + 1, B, D), and the last of them."""
    states = [c0_BD]
    for v_BD, p_BD in zip(v_TBD.unbind(), p_TBD.unbind(), strict=True):
        states.append(_step(states[-1], v_BD, p_BD, w_f_D))
    return torch.stack(states), states[-1]


def _scan(v_TBD: Tensor, p_TBD: Tensor, w_f_D: Tensor, c0_BD: Tensor) -> tuple[Tensor, Tensor]:
    # the public function compiles the step, which fixes the batch
    from torch._higher_order_ops.scan import scan_op

    def step(*given: Tensor) -> list[Tensor]:
        c_BD = _step(*given)
        return [c_BD, c_BD.clone()]

    last_BD, states_TBD = scan_op(step, [c0_BD], [v_TBD, p_TBD], (w_f_D,))
    return torch.cat([c0_BD.unsqueeze(0), states_TBD]), last_BD
