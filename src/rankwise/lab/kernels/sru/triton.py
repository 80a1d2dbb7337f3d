"""The SRU recurrence in Triton, for GPUs: `reference.sru`, and its parts for layers that are fused further.

Shapes as in `reference.py`; the kernels are in `triton_kernels.py`, their gradients in README.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rankwise.kernels.device import on
from rankwise.kernels.linear_kernels import stack_sums
from rankwise.lab.kernels.dropout import Dropout
from rankwise.lab.kernels.sru import reference
from rankwise.lab.kernels.sru.triton_kernels import sru_bwd_kernel, sru_fwd_kernel


class Launch(NamedTuple):
    """How a kernel is cut into programs."""

    block_d: int
    num_warps: int
    stages: int
    """Steps that loads run ahead of their use, and one."""


FORWARD, BACKWARD = Launch(256, 2, 4), Launch(256, 2, 3)
"""The fastest on an H200 for 64 x 3056 units, all of whose programs are then resident in one wave.

`benchmarks/lm_speed.py kernels` compares others.
"""


class Arrivals(NamedTuple):
    """Gradients that reach the outputs of a layer.

    The output feeds the highway and the product of the next layer, and its rows are normalized there by 1 / sigma: the
    three gradients are summed up in the kernel, which saves a pass over memory for each.
    """

    dh_TBD: Tensor
    dc_BD: Tensor | None = None
    dh_product_TBD: Tensor | None = None
    rows: tuple[Tensor, Tensor, Tensor] | None = None
    """Gradient of 1 / sigma, 1 / sigma and the mean of each row, all (T, B)."""


class Gradients(NamedTuple):
    """Of the inputs; None where there was no such input."""

    du_TBKD: Tensor
    dx_TBD: Tensor | None
    dweight_c_GD: Tensor
    dbias_GD: Tensor
    dc0_BD: Tensor
    dmask_BD: Tensor | None


def forward(
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None,
    scale: float,
    *,
    keeps_states: bool,
    dropout: Dropout | None = None,
    launch: Launch = FORWARD,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (T, B, D), the last state (B, D) and the state before each step (T, B, D; none if not kept)."""
    steps, batch, num_projections, width = u_TBKD.shape
    u_TBKD, x_TBD, mask_BD = u_TBKD.contiguous(), _contiguous(x_TBD), _contiguous(mask_BD)
    h_TBD = u_TBKD.new_empty(steps, batch, width)
    states_TBD = u_TBKD.new_empty(steps if keeps_states else 0, batch, width)
    c_BD = u_TBKD.new_empty(batch, width, dtype=torch.float32)
    grid = (triton.cdiv(width, launch.block_d), batch)
    with on(u_TBKD):
        sru_fwd_kernel[grid](
            u_TBKD,
            u_TBKD if x_TBD is None else x_TBD,
            weight_c_GD.contiguous(),
            bias_GD.contiguous(),
            c0_BD.contiguous(),
            c_BD if mask_BD is None else mask_BD,
            c_BD if dropout is None else dropout.seed,
            h_TBD,
            states_TBD if keeps_states else h_TBD,
            c_BD,
            scale,
            0.0 if dropout is None else dropout.rate,
            steps,
            batch,
            width,
            K=num_projections,
            HAS_MASK=mask_BD is not None,
            DROPS=dropout is not None,
            KEEPS_STATES=keeps_states,
            BLOCK_D=launch.block_d,
            STAGES=launch.stages,
            num_warps=launch.num_warps,
        )
    return h_TBD, c_BD, states_TBD


def backward(
    arrivals: Arrivals,
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    states_TBD: Tensor,
    mask_BD: Tensor | None,
    scale: float,
    *,
    dropout: Dropout | None = None,
    launch: Launch = BACKWARD,
) -> Gradients:
    """Gradients of every input from those of the outputs."""
    assert dropout is None or arrivals.rows is None, "statistics are of rows without dropout"
    steps, batch, num_projections, width = u_TBKD.shape
    u_TBKD, x_TBD, mask_BD = u_TBKD.contiguous(), _contiguous(x_TBD), _contiguous(mask_BD)
    dh_TBD, dh_product_TBD = arrivals.dh_TBD.contiguous(), _contiguous(arrivals.dh_product_TBD)
    dc_BD = _contiguous(arrivals.dc_BD)
    rows = (dh_TBD,) * 3 if arrivals.rows is None else [row.contiguous() for row in arrivals.rows]

    du_TBKD = torch.empty_like(u_TBKD)
    dx_TBD = None if x_TBD is None else torch.empty_like(x_TBD)
    dgates_4BD = u_TBKD.new_empty(4, batch, width, dtype=torch.float32)
    dc0_BD = u_TBKD.new_empty(batch, width, dtype=torch.float32)
    dmask_BD = None if mask_BD is None else torch.empty_like(mask_BD)
    grid = (triton.cdiv(width, launch.block_d), batch)
    with on(u_TBKD):
        sru_bwd_kernel[grid](
            u_TBKD,
            u_TBKD if x_TBD is None else x_TBD,
            weight_c_GD.contiguous(),
            bias_GD.contiguous(),
            states_TBD,
            dc0_BD if mask_BD is None else mask_BD,
            dc0_BD if dropout is None else dropout.seed,
            dh_TBD,
            dh_TBD if dh_product_TBD is None else dh_product_TBD,
            *rows,
            dc0_BD if dc_BD is None else dc_BD,
            du_TBKD,
            du_TBKD if dx_TBD is None else dx_TBD,
            dgates_4BD,
            dc0_BD,
            dc0_BD if dmask_BD is None else dmask_BD,
            scale,
            0.0 if dropout is None else dropout.rate,
            steps,
            batch,
            width,
            K=num_projections,
            HAS_MASK=mask_BD is not None,
            DROPS=dropout is not None,
            HAS_PRODUCT=dh_product_TBD is not None,
            HAS_ROWS=arrivals.rows is not None,
            HAS_DC=dc_BD is not None,
            BLOCK_D=launch.block_d,
            STAGES=launch.stages,
            num_warps=launch.num_warps,
        )
    dgates_GGD = stack_sums(dgates_4BD).view(2, 2, width)
    return Gradients(du_TBKD, dx_TBD, dgates_GGD[0], dgates_GGD[1], dc0_BD, dmask_BD)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def sru(
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.sru`, to which float64 is left: it is for checks."""
    tensors = (u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD)
    if u_TBKD.dtype == torch.float64:
        return reference.sru(*tensors, scale)
    learns = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    h_TBD, c_BD, _ = torch.ops.rankwise.sru(*tensors, scale, learns)
    return h_TBD, c_BD


@torch.library.custom_op(
    "rankwise::sru",
    mutates_args=(),
    schema="(Tensor u, Tensor? x, Tensor weight_c, Tensor bias, Tensor c0, Tensor? mask, float scale, bool learns)"
    " -> (Tensor, Tensor, Tensor)",
)
def _sru(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor,
    bias: Tensor,
    c0: Tensor,
    mask: Tensor | None,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(u, x, weight_c, bias, c0, mask, scale, keeps_states=learns)


@_sru.register_fake
def _(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor,
    bias: Tensor,
    c0: Tensor,
    mask: Tensor | None,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, _, width = u.shape
    c = u.new_empty(batch, width, dtype=torch.float32)
    return u.new_empty(steps, batch, width), c, u.new_empty(steps if learns else 0, batch, width)


@torch.library.custom_op(
    "rankwise::sru_backward",
    mutates_args=(),
    schema="(Tensor dh, Tensor dc, Tensor u, Tensor? x, Tensor weight_c, Tensor bias, Tensor states, Tensor? mask,"
    " float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _sru_backward(
    dh: Tensor,
    dc: Tensor,
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor,
    bias: Tensor,
    states: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    found = backward(Arrivals(dh, dc), u, x, weight_c, bias, states, mask, scale)
    # an op returns tensors, and no two of one memory
    dweight_c, dbias = found.dweight_c_GD.clone(), found.dbias_GD.clone()
    dx, dmask = (u.new_empty(0) if d is None else d for d in (found.dx_TBD, found.dmask_BD))
    return found.du_TBKD, dx, dweight_c, dbias, found.dc0_BD, dmask


@_sru_backward.register_fake
def _(
    dh: Tensor,
    dc: Tensor,
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor,
    bias: Tensor,
    states: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    gates = torch.empty_like(weight_c, dtype=torch.float32), torch.empty_like(bias, dtype=torch.float32)
    dx, dmask = (u.new_empty(0) if t is None else torch.empty_like(t) for t in (x, mask))
    return torch.empty_like(u), dx, *gates, torch.empty_like(dc, dtype=torch.float32), dmask


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, x, weight_c, bias, c0, mask, ctx.scale, _ = inputs
    ctx.c0_dtype = c0.dtype
    ctx.save_for_backward(u, x, weight_c, bias, output[2], mask)


def _differentiate(ctx: Any, dh: Tensor, dc: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    u, x, weight_c, bias, states, mask = ctx.saved_tensors
    du, dx, dweight_c, dbias, dc0, dmask = torch.ops.rankwise.sru_backward(
        dh, dc, u, x, weight_c, bias, states, mask, ctx.scale
    )
    return (
        du,
        None if x is None else dx,
        dweight_c.to(weight_c.dtype),
        dbias.to(bias.dtype),
        dc0.to(ctx.c0_dtype),
        None if mask is None else dmask,
        None,
        None,
    )


_sru.register_autograd(_differentiate, setup_context=_keep_inputs)
