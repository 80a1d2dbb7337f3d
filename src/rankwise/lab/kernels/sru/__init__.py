"""The SRU recurrence: one signature, several implementations; which one runs is chosen once, when first used.

`reference.py` defines what they compute, with shapes and equations.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rankwise.errors import InvalidValueError
from rankwise.kernels.device import HAS_TRITON

Recurrence = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None, float],
    tuple[Tensor, Tensor],
]
"""The signature that every implementation shares: that of `reference.sru`."""


def sru(
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.sru` by the implementation for the device of `u_TBKD`; refuses shapes that do not fit together."""
    _check(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD)
    run = _implementation(u_TBKD.device.type)
    return run(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD, scale)


def _implementation(device_type: str) -> Recurrence:
    """The implementation for a kind of device."""
    from rankwise.lab.kernels.sru import reference

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
