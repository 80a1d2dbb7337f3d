"""The last product before the recurrence, and the recurrence, in one kernel for inference on a CPU: `projected.c`.

The product's output u, three or four times as large as anything else in a layer, is used while it is in the cache.

Shapes: those of `reference.py`; R = inputs of the product.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor, nn

from rankwise.kernels import native
from rankwise.kernels.device import infers_on_cpu
from rankwise.kernels.int8 import cpu as rows
from rankwise.kernels.int8.layer import Int8Linear
from rankwise.modules import PivotLinear, is_observed, linear, runs_in_order

MANY = 96
"""Rows that are worth laying out a weight for."""

_SOURCE = Path(__file__).with_name("projected.c")


def take_last(projection: nn.Module, x_TBN: Tensor) -> tuple[list[nn.Module], nn.Linear | Int8Linear] | None:
    """The layers of a chain before the last one, and this one, if the kernel can take its place for such an input."""
    if not infers_on_cpu(x_TBN) or x_TBN.dtype != torch.float32 or x_TBN.shape[:2].numel() < MANY:
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
    if is_observed(factor) or not native.is_ready(_SOURCE, "the SRU"):
        return False
    if isinstance(factor, Int8Linear):
        has_bytes = bool(native.library(_SOURCE).sru_projected_has_bytes())
        return factor.bias is None and has_bytes and rows.is_ready()
    return type(factor) is nn.Linear and factor.bias is None and factor.weight.dtype == torch.float32


class _Arguments(ctypes.Structure):
    """`Arguments` of `projected.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("T", "B", "R", "K", "D", "stride", "bytes")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("x", "w", "x_scale", "w_scale", "highway", "weight", "bias", "c0")),
        *((name, ctypes.c_void_p) for name in ("h", "c", "rooms")),
        ("room", ctypes.c_long),
    )


def sru(
    x_TBR: Tensor,
    factor: nn.Linear | Int8Linear,
    highway_TBD: Tensor | None,
    weight_c_GD: Tensor,
    bias_GD: Tensor,
    c0_BD: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.sru` of u = factor(x), where `take_last` gave it; no gradients."""
    size_T, size_B, size_R = x_TBR.shape
    size_D = c0_BD.shape[1]
    size_K = factor.out_features // size_D
    assert size_K == (3 if highway_TBD is not None else 4)
    h_TBD, c_BD = x_TBR.new_empty(size_T, size_B, size_D), x_TBR.new_empty(size_B, size_D)
    tensors = {"highway": highway_TBD, "weight": weight_c_GD, "bias": bias_GD, "c0": c0_BD}
    if isinstance(factor, Int8Linear):
        # rows of whole numbers of four bytes: what fills them up meets a weight of zero
        bytes_NR, scale_N1 = rows.round_rows(x_TBR.reshape(-1, size_R), multiple=4)
        tensors |= {"x": bytes_NR, "w": factor.weight_OI, "x_scale": scale_N1, "w_scale": factor.scale}
        stride = bytes_NR.shape[1] // 4
    else:
        tensors |= {"x": x_TBR, "w": factor.weight}
        stride = size_R
    # a dense copy of an input must live until the call is over
    dense = {name: _plain(tensor) for name, tensor in tensors.items() if tensor is not None}
    arguments = _Arguments(size_T, size_B, size_R, size_K, size_D, stride, isinstance(factor, Int8Linear), scale)
    for name, tensor in {**dense, "h": h_TBD, "c": c_BD}.items():
        setattr(arguments, name, tensor.data_ptr())

    library, num_threads = native.library(_SOURCE), torch.get_num_threads()
    arguments.room = library.sru_projected_room(ctypes.byref(arguments))
    room = x_TBR.new_empty(num_threads * arguments.room)
    arguments.rooms = room.data_ptr()
    library.sru_projected(ctypes.byref(arguments), native.parallel(), num_threads)
    return h_TBD, c_BD


def _plain(tensor: Tensor) -> Tensor:
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
