"""The SRU recurrence on a CPU, in C: `cpu.c` as a torch operator, and `projected.c` with the product before it.

The forward pass of the operator keeps nothing for the backward pass, which computes the states again: so inference and
training are one operator, and training holds no states. Threads are those of torch, as many as
`torch.get_num_threads()`; their number changes no bit of a result.

For inference the last product before the recurrence is part of the kernel: its output u, three or four times as large
as anything else in a layer, is used while it is in the cache.

Shapes: those of `reference.py`; R = inputs of the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.kernels import int8, native
from rankwise.kernels.device import infers_on_cpu
from rankwise.kernels.int8 import Int8Linear
from rankwise.lab.kernels.sru import reference, register_operator
from rankwise.modules import PivotLinear, is_observed, linear, runs_in_order

READY: bool
"""Whether the recurrence could be built; found out when first asked for."""

_SOURCE = Path(__file__).with_name("cpu.c")
_PROJECTED_SOURCE = Path(__file__).with_name("projected.c")
# lanes of a block: long enough rows for the memory, short enough for the L1 cache
_MAX_WIDTH, _MIN_WIDTH = 512, 64
# what the backward pass keeps of a block should stay in the L2 cache
_MAX_KEPT = 2**18
# units times steps, at about a nanosecond each, below which another thread is not asked for
_GRAIN = 2**13
# rows below which laying out a weight for the product costs more than it saves
_MIN_ROWS = 96


def sru(
    u_TBKD: Tensor, x_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor, c0_BD: Tensor,
    mask_BD: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.sru`, which runs instead where u is float64. Needs `READY`."""
    if u_TBKD.dtype == torch.float64:
        return reference.sru(u_TBKD, x_TBD, weight_c_GD, bias_GD, c0_BD, mask_BD, scale)
    x_TBD = None if x_TBD is None else _float_or_bfloat(x_TBD)
    mask_BD = None if mask_BD is None else mask_BD.float()
    h_TBD, c_BD, _ = _operator(
        _float_or_bfloat(u_TBKD), x_TBD, weight_c_GD.float(), bias_GD.float(), c0_BD.float(), mask_BD, scale, False
    )
    return h_TBD.to(u_TBKD.dtype), c_BD


def _float_or_bfloat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()


def __getattr__(name: str) -> Any:
    """Build the kernel to answer `READY`: torch.compile can read an attribute where it could not follow a build."""
    if name != "READY":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = native.is_ready(_SOURCE, "the SRU")
    return globals()[name]


def _forward(u_TBKD: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, scale, _ = inputs
    T, B, _, D = u_TBKD.shape
    h_TBD, c_BD = u_TBKD.new_empty(T, B, D), u_TBKD.new_empty(B, D, dtype=torch.float32)
    named = dict(zip(("u", "x", "weight", "bias", "c0", "mask"), (u_TBKD, *others), strict=True))
    _run("sru_forward", scale, named | {"h": h_TBD, "c": c_BD})
    return h_TBD, c_BD, u_TBKD.new_empty(0, B, D)


def _backward(dh_TBD: Tensor, dc_BD: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *tensors, scale, _ = inputs
    named = dict(zip(("u", "x", "weight", "bias", "c0", "mask"), tensors, strict=True))
    u_TBKD, *others = (named[name] for name in ("u", "x", "c0", "mask"))
    du, dx, dc0, dmask = (u_TBKD.new_empty(0) if t is None else t.new_empty(t.shape) for t in (u_TBKD, *others))
    dgates_B4D = u_TBKD.new_empty(u_TBKD.shape[1], 4, u_TBKD.shape[3], dtype=torch.float32)
    outputs = {"du": du, "dx": dx, "dgates": dgates_B4D, "dc0": dc0, "dmask": dmask}
    _run("sru_backward", scale, named | {"dh": dh_TBD, "dc": dc_BD} | outputs)
    return du, dx, dgates_B4D.sum(0), dc0, dmask


_operator = register_operator("sru_cpu", "cpu", _forward, _backward, keeps_states=False)


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


def split_projection(projection: nn.Module, x_TBN: Tensor) -> tuple[list[nn.Module], nn.Linear | Int8Linear] | None:
    """The last layer of a chain, and those before it, if the kernel can replace the last one for such an input."""
    if not infers_on_cpu(x_TBN) or x_TBN.dtype != torch.float32 or x_TBN.shape[:2].numel() < _MIN_ROWS:
        return None
    before: list[nn.Module] = []
    last = projection
    while runs_in_order(last) and last._modules and not is_observed(last):
        *others, last = last.children()
        before += others
    if isinstance(last, PivotLinear) and not is_observed(last):
        last = linear(nn.Parameter(last.weight, requires_grad=False), last.bias)
    return (before, last) if _can_replace(last) else None  # type: ignore[return-value]


def _can_replace(factor: nn.Module) -> bool:
    if is_observed(factor) or not native.is_ready(_PROJECTED_SOURCE, "the SRU"):
        return False
    if isinstance(factor, Int8Linear):
        has_bytes = bool(native.library(_PROJECTED_SOURCE).sru_projected_has_bytes())
        return factor.bias is None and has_bytes and int8.is_ready()
    return type(factor) is nn.Linear and factor.bias is None and factor.weight.dtype == torch.float32


class _ProjectedArguments(ctypes.Structure):
    """`Arguments` of `projected.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("T", "B", "R", "K", "D", "stride", "bytes")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("x", "w", "x_scale", "w_scale", "highway", "weight", "bias", "c0")),
        *((name, ctypes.c_void_p) for name in ("h", "c", "rooms")),
        ("room", ctypes.c_long),
    )


def projected_sru(
    x_TBR: Tensor, factor: nn.Linear | Int8Linear, highway_TBD: Tensor | None, weight_c_GD: Tensor, bias_GD: Tensor,
    c0_BD: Tensor, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.sru` of u = factor(x), where `split_projection` gave `factor`; no gradients."""
    size_T, size_B, size_R = x_TBR.shape
    size_D = c0_BD.shape[1]
    size_K = factor.out_features // size_D
    assert size_K == (3 if highway_TBD is not None else 4)
    h_TBD, c_BD = x_TBR.new_empty(size_T, size_B, size_D), x_TBR.new_empty(size_B, size_D)
    tensors = {"highway": highway_TBD, "weight": weight_c_GD, "bias": bias_GD, "c0": c0_BD}
    if isinstance(factor, Int8Linear):
        # rows of whole numbers of four bytes: what fills them up meets a weight of zero
        bytes_NR, scale_N1 = int8.round_rows(x_TBR.reshape(-1, size_R), multiple=4)
        tensors |= {"x": bytes_NR, "w": factor.weight_OI, "x_scale": scale_N1, "w_scale": factor.scale}
        stride = bytes_NR.shape[1] // 4
    else:
        tensors |= {"x": x_TBR, "w": factor.weight}
        stride = size_R
    # a dense copy of an input must live until the call is over
    dense = {name: _plain(tensor) for name, tensor in tensors.items() if tensor is not None}
    arguments = _ProjectedArguments(
        size_T, size_B, size_R, size_K, size_D, stride, isinstance(factor, Int8Linear), scale
    )
    for name, tensor in {**dense, "h": h_TBD, "c": c_BD}.items():
        setattr(arguments, name, tensor.data_ptr())

    library, num_threads = native.library(_PROJECTED_SOURCE), torch.get_num_threads()
    arguments.room = library.sru_projected_room(ctypes.byref(arguments))
    room = x_TBR.new_empty(num_threads * arguments.room)
    arguments.rooms = room.data_ptr()
    library.sru_projected(ctypes.byref(arguments), native.parallel(), num_threads)
    return h_TBD, c_BD


def _plain(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
