"""The SRU recurrence on a CPU: `cpu.c` as torch operators.

The forward pass keeps nothing for the backward pass, which computes the states again: so inference and training are one
operator, and training holds no states. Threads are those of torch, as many as `torch.get_num_threads()`; their number
changes no bit of a result.

Shapes: those of `reference.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels import native
from rankwise.lab.kernels.sru import reference

READY: bool
"""Whether the kernel could be built; found out when first asked for."""

_SOURCE = Path(__file__).with_name("cpu.c")
# lanes of a block: long enough rows for the memory, short enough for the L1 cache
_MAX_WIDTH, _MIN_WIDTH = 512, 64
# what the backward pass keeps of a block should stay in the L2 cache
_MAX_KEPT = 2**18
# units times steps, at about a nanosecond each, below which another thread is not asked for
_GRAIN = 2**13


def sru(
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.sru`, which takes over where u is float64. Needs `READY`."""
    if u_TBKD.dtype == torch.float64:
        return reference.sru(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD, scale)
    x_TBD = None if x_TBD is None else _float_or_bfloat(x_TBD)
    mask_BD = None if mask_BD is None else mask_BD.float()
    h_TBD, c_BD = torch.ops.rankwise.sru_cpu.default(
        _float_or_bfloat(u_TBKD), x_TBD, weight_c_GD.float(), bias_GD.float(), c0_BD.float(), mask_BD, scale
    )
    return h_TBD.to(u_TBKD.dtype), c_BD


def _float_or_bfloat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def __getattr__(name: str) -> Any:
    """`READY`, by building: torch.compile can read the attribute of a module where it could not follow a build."""
    if name != "READY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = native.is_ready(_SOURCE, "the SRU")
    return globals()[name]


def _forward(
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    h_TBD, c_BD = outputs = _forward_shapes(u_TBKD)
    inputs = {"u": u_TBKD, "x": x_TBD, "weight": weight_c_GD, "bias": bias_GD, "c0": c0_BD, "mask": mask_BD}
    _run("sru_forward", scale, inputs | {"h": h_TBD, "c": c_BD})
    return outputs


def _forward_shapes(u_TBKD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    T, B, _K, D = u_TBKD.shape
    return u_TBKD.new_empty(T, B, D), u_TBKD.new_empty(B, D, dtype=torch.float32)


def _backward(
    dh_TBD: Tensor,
    dc_BD: Tensor,
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, of x, of weight_c and bias in one tensor (4, D), of c0 and of the mask.

    An operator cannot return None, nor two views of the same memory: what has no gradient gets an empty tensor.
    """
    du_TBKD, dx_TBD, _, dc0_BD, dmask_BD = _backward_shapes(
        dh_TBD, dc_BD, u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD
    )
    dgates_B4D = u_TBKD.new_empty(u_TBKD.shape[1], 4, u_TBKD.shape[3], dtype=torch.float32)
    inputs = {"u": u_TBKD, "x": x_TBD, "weight": weight_c_GD, "bias": bias_GD, "c0": c0_BD, "mask": mask_BD}
    outputs = {"du": du_TBKD, "dx": dx_TBD, "dgates": dgates_B4D, "dc0": dc0_BD, "dmask": dmask_BD}
    _run("sru_backward", scale, inputs | {"dh": dh_TBD, "dc": dc_BD} | outputs)
    return du_TBKD, dx_TBD, dgates_B4D.sum(0), dc0_BD, dmask_BD


def _backward_shapes(
    dh_TBD: Tensor,
    dc_BD: Tensor,
    u_TBKD: Tensor,
    x_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    mask_BD: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None) -> Tensor:
        return u_TBKD.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    dgates_4D = weight_c_GD.new_empty(4, u_TBKD.shape[3])
    return like(u_TBKD), like(x_TBD), dgates_4D, like(c0_BD), like(mask_BD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dh_TBD: Tensor, dc_BD: Tensor) -> tuple[Tensor | None, ...]:
    _, x_TBD, *_, mask_BD = ctx.saved_tensors
    du_TBKD, dx_TBD, dgates_4D, dc0_BD, dmask_BD = torch.ops.rankwise.sru_cpu_backward.default(
        dh_TBD, dc_BD, *ctx.saved_tensors, ctx.scale
    )
    dx = None if x_TBD is None else dx_TBD
    dmask = None if mask_BD is None else dmask_BD
    return du_TBKD, dx, dgates_4D[:2], dgates_4D[2:], dc0_BD, dmask, None


def _differentiate_twice(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "The SRU kernel for CPUs has first derivatives only. "
        "For second ones use `rankwise.lab.kernels.sru.reference.sru`, or float64."
    )


# `torch.library.custom_op` would import the compiler on the first call, which takes a second
_INPUTS = "Tensor u, Tensor? x, Tensor weight_c, Tensor bias, Tensor c0, Tensor? mask, float scale"
torch.library.define("rankwise::sru_cpu", f"({_INPUTS}) -> (Tensor, Tensor)")
torch.library.impl("rankwise::sru_cpu", "cpu", _forward)
torch.library.register_fake("rankwise::sru_cpu", _forward_shapes)
torch.library.register_autograd("rankwise::sru_cpu", _differentiate, setup_context=_keep)
torch.library.define(
    "rankwise::sru_cpu_backward", f"(Tensor dh, Tensor dc, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
torch.library.impl("rankwise::sru_cpu_backward", "cpu", _backward)
torch.library.register_fake("rankwise::sru_cpu_backward", _backward_shapes)
torch.library.register_autograd("rankwise::sru_cpu_backward", _differentiate_twice)


class _Arguments(ctypes.Structure):
    """`Arguments` of `cpu.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("T", "B", "K", "D", "width", "u_is_half", "x_is_half")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("u", "x", "weight", "bias", "c0", "mask", "h", "c", "dh", "dc")),
        *((name, ctypes.c_void_p) for name in ("du", "dx", "dgates", "dc0", "dmask", "scratch")),
    )


def _run(function: str, scale: float, tensors: Mapping[str, Tensor | None]) -> None:
    # a new output is dense already; a dense copy of an input must live until the call is over
    dense = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    u_TBKD = dense["u"]
    T, B, K, D = u_TBKD.shape
    num_threads = min(torch.get_num_threads(), 1 + T * B * D // _GRAIN)
    num_kept = 2 * T if function == "sru_backward" else 0
    width = _MAX_WIDTH
    while width > _MIN_WIDTH and (B * -(-D // width) < 2 * num_threads or num_kept * width > _MAX_KEPT):
        width //= 2
    # blocks start at multiples of the least width, so that the lanes left over for a loop's end are always the same
    width = min(width, D)
    dense["scratch"] = u_TBKD.new_empty(num_threads * num_kept * width, dtype=torch.float32)
    u_is_half, x_is_half = (name in dense and dense[name].dtype == torch.bfloat16 for name in ("u", "x"))
    arguments = _Arguments(T, B, K, D, width, u_is_half, x_is_half, scale)
    for name, tensor in dense.items():
        setattr(arguments, name, tensor.data_ptr())
    getattr(native.library(_SOURCE), function)(ctypes.byref(arguments), native.parallel(), num_threads)
