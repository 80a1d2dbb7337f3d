"""Rows of floats as bytes, and products of bytes as floats: `cpu.c`, one pass over memory each.

Shapes: those of `reference.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from rankwise.kernels import native

_SOURCE = Path(__file__).with_name("cpu.c")
# numbers below which another thread is not asked for
_GRAIN = 2**15


def can_run(x: Tensor) -> bool:
    """Whether `x` is what the kernels take, and they could be built."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.stride(-1) == 1
    return fits and not torch.compiler.is_compiling() and is_ready()


def is_ready() -> bool:
    """Whether the kernels could be built."""
    return native.is_ready(_SOURCE, "int8 layers")


class _Arguments(ctypes.Structure):
    """`Arguments` of `cpu.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("N", "D", "stride", "bytes_stride")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "scale", "bytes")),
    )


def round_rows(x_NI: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """`reference.round_rows`; rows are longer, by bytes that mean nothing, where that makes them whole multiples."""
    size_N, size_I = x_NI.shape
    bytes_NI = torch.empty(size_N, -(-size_I // multiple) * multiple, dtype=torch.uint8)
    scale_N1 = x_NI.new_empty(size_N, 1)
    strides = {"bytes_stride": bytes_NI.stride(0), "bytes": bytes_NI.data_ptr()}
    _run("round_rows", x_NI, _Arguments(scale=scale_N1.data_ptr(), **strides))
    return bytes_NI, scale_N1


def scale_rows_(y_NO: Tensor, scale_N1: Tensor, bias_O: Tensor | None) -> Tensor:
    """`reference.scale_rows_`."""
    bias = None if bias_O is None else bias_O.data_ptr()
    _run("scale_rows", y_NO, _Arguments(scale=scale_N1.data_ptr(), bias=bias))
    return y_NO


def _run(function: str, x: Tensor, arguments: _Arguments) -> None:
    arguments.N, arguments.D, arguments.stride = *x.shape, x.stride(0)
    arguments.x = x.data_ptr()
    num_threads = min(torch.get_num_threads(), 1 + x.numel() // _GRAIN)
    getattr(native.library(_SOURCE), function)(ctypes.byref(arguments), native.parallel(), num_threads)
