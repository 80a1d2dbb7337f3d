"""A linear layer that multiplies bytes, four times as many at once as floats.

Weights are rounded per output, inputs per row as they come (a row is one token), both symmetrically:

    y = s_x s_W (round(x / s_x) round(W / s_W)^T) + b,    s = max |.| / 127

A scale per row keeps tokens apart: what a token gets does not depend on its neighbours, least of all on later ones, so
a text fed piece by piece gives what it gives in one piece. oneDNN multiplies; rows are rounded before and scaled after
by `int8.c` in one pass over memory each, or by the references in plain PyTorch.

Shapes: B = any batch dimensions, N = rows (B flat), I = inputs, O = outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels import native
from rankwise.lazy import lazy_weight

LARGEST = 127
SHIFT = 128
"""oneDNN multiplies unsigned inputs by signed weights, so inputs are shifted up. (It takes signed ones as well, by
plain loops a thousand times slower.)"""

_SOURCE = Path(__file__).with_name("int8.c")
# numbers below which another thread is not asked for
_GRAIN = 2**15


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8. It has no gradient."""

    weight_OI: Tensor
    scale: Tensor
    bias: Tensor | None
    zero: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # oneDNN packs bytes in the order in which they lie, whatever the strides
        weight_OI = layer.weight.detach().float().contiguous()
        scale_O = scales(weight_OI)
        self.register_buffer("weight_OI", (weight_OI / scale_O).round_().to(torch.int8))
        self.dtype = layer.weight.dtype
        self.register_buffer("scale", scale_O.flatten())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32), persistent=False)
        self._packed: Tensor | None = None
        """The weight as oneDNN lays it out, made when first needed."""

    @property
    def weight(self) -> Tensor:
        """The rounded weight in the dtype that the layer had before, O x I."""
        like = self.scale.new_empty(0, dtype=self.dtype)
        return lazy_weight(
            lambda: (self.weight_OI * self.scale.unsqueeze(1)).to(self.dtype), self.weight_OI.shape, like
        )

    @torch.no_grad()
    def forward(self, x_BI: Tensor) -> Tensor:
        x_NI = x_BI.reshape(-1, self.in_features)
        x_NI = x_NI if x_NI.dtype == torch.float32 else x_NI.float()
        bytes_NI, scale_N1 = (round_rows if can_run(x_NI) else round_rows_reference)(x_NI)
        y_NO = (self._fast if can_multiply_bytes() else self._plain)(bytes_NI)
        y_NO = (scale_rows_ if can_run(y_NO) else scale_rows_reference_)(y_NO, scale_N1, self.bias)
        return y_NO.to(x_BI.dtype).view(*x_BI.shape[:-1], self.out_features)

    def _fast(self, bytes_NI: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.weight_OI, None)
        y_NO: Tensor = torch.ops.onednn.qlinear_pointwise(
            bytes_NI, 1.0, SHIFT, self._packed, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y_NO

    def _plain(self, bytes_NI: Tensor) -> Tensor:
        """The same numbers: products of bytes, and sums of a thousand of them, are exact in float32."""
        return F.linear(bytes_NI.float() - SHIFT, self.weight_OI.float()) * self.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        scale, bias = self.scale, self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # products are scaled in float32, whatever the model around them is cast to
        self.scale = scale.to(self.scale.device)
        self.bias = None if bias is None else bias.to(self.scale.device)
        self._packed = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._packed = None

    def __getstate__(self) -> dict[str, Any]:
        # torch can neither copy nor write a packed weight
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_multiply_bytes() -> bool:
    """Whether this processor and this torch have fast products of bytes."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.onednn, "qlinear_pointwise") and _has_vnni()


def _has_vnni() -> bool:
    # without these instructions oneDNN may saturate sums of two products
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())


def scales(x_NI: Tensor) -> Tensor:
    """The scale of each row, (N, 1); that of a row of zeros is tiny, but not zero."""
    low_N1, high_N1 = x_NI.amin(-1, keepdim=True), x_NI.amax(-1, keepdim=True)
    return torch.maximum(-low_N1, high_N1).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)


def round_rows_reference(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """round(x / s) + 128 as unsigned bytes, and the scale s of each row, (N, 1)."""
    scale_N1 = scales(x_NI)
    # the conversion to unsigned bytes is several times slower than this one; flipping the first bit adds 128
    return (x_NI * (1 / scale_N1)).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(SHIFT), scale_N1


def scale_rows_reference_(y_NO: Tensor, scale_N1: Tensor, bias_O: Tensor | None) -> Tensor:
    """y s + b, in place."""
    y_NO.mul_(scale_N1)
    return y_NO if bias_O is None else y_NO.add_(bias_O)


def can_run(x: Tensor) -> bool:
    """Whether the C kernels take `x`, and could be built."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.stride(-1) == 1
    return fits and not torch.compiler.is_compiling() and is_ready()


def is_ready() -> bool:
    """Whether the C kernels could be built."""
    return native.is_ready(_SOURCE, "int8 layers")


class _Arguments(ctypes.Structure):
    """`Arguments` of `int8.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("N", "D", "stride", "bytes_stride")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "scale", "bytes")),
    )


def round_rows(x_NI: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """`round_rows_reference` in C. Rows are padded, by bytes of any value, to a multiple of `multiple`."""
    size_N, size_I = x_NI.shape
    bytes_NI = torch.empty(size_N, -(-size_I // multiple) * multiple, dtype=torch.uint8)
    scale_N1 = x_NI.new_empty(size_N, 1)
    strides = {"bytes_stride": bytes_NI.stride(0), "bytes": bytes_NI.data_ptr()}
    _run("round_rows", x_NI, _Arguments(scale=scale_N1.data_ptr(), **strides))
    return bytes_NI, scale_N1


def scale_rows_(y_NO: Tensor, scale_N1: Tensor, bias_O: Tensor | None) -> Tensor:
    """`scale_rows_reference_` in C."""
    bias = None if bias_O is None else bias_O.data_ptr()
    _run("scale_rows", y_NO, _Arguments(scale=scale_N1.data_ptr(), bias=bias))
    return y_NO


def _run(function: str, x: Tensor, arguments: _Arguments) -> None:
    arguments.N, arguments.D, arguments.stride = *x.shape, x.stride(0)
    arguments.x = x.data_ptr()
    num_threads = min(torch.get_num_threads(), 1 + x.numel() // _GRAIN)
    getattr(native.library(_SOURCE), function)(ctypes.byref(arguments), native.parallel(), num_threads)
