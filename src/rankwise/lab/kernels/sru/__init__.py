"""The SRU recurrence: one signature, several implementations; `sru` runs the one for the device of its input.

`reference.py` defines what they compute, with shapes and equations. Fast implementations are torch operators, so that
`torch.compile` can call them; `register_operator` makes one of a forward and a backward function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rankwise.errors import InvalidValueError
from rankwise.kernels.device import HAS_TRITON
from rankwise.lab.kernels.sru import reference

Recurrence = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, float],
    tuple[Tensor, Tensor],
]
"""The signature that every implementation shares: that of `reference.sru`."""


def sru(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor,
    mask_BD: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.sru` by the implementation for the device of `u_TBKD`; refuses shapes that do not fit together."""
    _check(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD)
    run = _implementation(u_TBKD.device.type)
    return run(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD, scale)


def _implementation(device_type: str) -> Recurrence:
    if device_type == "cpu":
        from rankwise.lab.kernels.sru import cpu

        if cpu.READY:
            return cpu.sru
    if device_type == "cuda" and HAS_TRITON:
        from rankwise.lab.kernels.sru import triton

        return triton.sru
    return reference.sru


def _check(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor, mask_BD: Tensor | None
) -> None:
    if u_TBKD.dim() != 4 or u_TBKD.shape[0] < 1 or u_TBKD.shape[2] not in (3, 4):
        raise InvalidValueError(
            f"`u_TBKD` must be (steps, batch, 3 or 4, width) with a step or more, but is {tuple(u_TBKD.shape)} instead."
        )
    steps, batch, num_projections, width = u_TBKD.shape
    if (x_TBD is None) != (num_projections == 4):
        raise InvalidValueError(
            "`x_TBD` must be given with 3 projections, and be None with 4 (the highway is the fourth), "
            f"but is {'None' if x_TBD is None else 'given'} with {num_projections}."
        )
    for name, tensor, shape in (
        ("x_TBD", x_TBD, (steps, batch, width)),
        ("weight_c_GD", weight_c_GD, (2, width)),
        ("bias_GD", bias_GD, (2, width)),
        ("c0_BD", c0_BD, (batch, width)),
        ("mask_BD", mask_BD, (batch, width)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise InvalidValueError(f"`{name}` must be {shape}, but is {tuple(tensor.shape)} instead.")


_INPUTS = "Tensor u, Tensor? x, Tensor weight_c, Tensor bias, Tensor c0, Tensor? mask, float scale"


def register_operator(
    name: str, device: str, forward: Callable[..., Any], backward: Callable[..., Any], *, keeps_states: bool
) -> Any:
    """The torch operator `rankwise::name`, differentiable by a second one.

    Args:
        device: the device type that it runs on; "default" for any.
        forward: `(u, x, weight_c, bias, c0, mask, scale, learns) -> (h, c, states)`.
        backward: `(dh, dc, u, x, weight_c, bias, c0, mask, scale, states) -> (du, dx, dgates, dc0, dmask)`, where
            `dgates` (4, D) is the gradient of weight_c and of bias. An operator cannot return None, so what has no
            gradient is an empty tensor.
        keeps_states: `states` are those before every step if `learns`; otherwise it is empty.
    """

    def forward_shapes(u: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        T, B, _, D = u.shape
        num_states = T if keeps_states and inputs[-1] else 0
        return u.new_empty(T, B, D), u.new_empty(B, D, dtype=torch.float32), u.new_empty(num_states, B, D)

    def backward_shapes(dh: Tensor, dc: Tensor, u: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        x, _, _, c0, mask, _, _ = inputs
        dx, dmask = (u.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in (x, mask))
        dgates = u.new_empty(4, u.shape[3], dtype=torch.float32)
        return u.new_empty(u.shape), dx, dgates, c0.new_empty(c0.shape, dtype=torch.float32), dmask

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale, _ = inputs
        ctx.save_for_backward(*tensors, output[2])

    def differentiate(ctx: Any, dh: Tensor, dc: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, states = ctx.saved_tensors
        _, x, weight_c, bias, c0, mask = tensors
        du, dx, dgates, dc0, dmask = backward_operator(dh, dc, *tensors, ctx.scale, states)
        gates = dgates[:2].to(weight_c.dtype), dgates[2:].to(bias.dtype)
        return du, None if x is None else dx, *gates, dc0.to(c0.dtype), None if mask is None else dmask, None, None

    def differentiate_twice(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(
            "The fast kernels of the SRU have first derivatives only. "
            "For second ones use `rankwise.lab.kernels.sru.reference.sru`, or float64."
        )

    # `torch.library.custom_op` would import the compiler on the first call, which takes a second
    first, second = f"rankwise::{name}", f"rankwise::{name}_backward"
    torch.library.define(first, f"({_INPUTS}, bool learns) -> (Tensor, Tensor, Tensor)")
    torch.library.define(second, f"(Tensor dh, Tensor dc, {_INPUTS}, Tensor states) -> ({', '.join(['Tensor'] * 5)})")
    for operator, run, shapes in ((first, forward, forward_shapes), (second, backward, backward_shapes)):
        torch.library.impl(operator, device, run)
        torch.library.register_fake(operator, shapes)
    torch.library.register_autograd(first, differentiate, setup_context=save)
    torch.library.register_autograd(second, differentiate_twice)
    backward_operator = getattr(torch.ops.rankwise, f"{name}_backward").default
    return getattr(torch.ops.rankwise, name).default
