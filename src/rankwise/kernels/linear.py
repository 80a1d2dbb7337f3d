"""Matrix products by the fastest way there is.

In half precision a GPU multiplies matrices several times slower when their rows are no multiple of 16 bytes, such as
the 205 characters of enwik8: they are filled up with zeros first. The backward pass is explicit, and gradients of
weights are summed up and written in float32, so that nothing is cast after the product. On a CPU, oneDNN multiplies 256
rows of float32 4 to 24% faster than the library that `F.linear` calls (MKL, on one thread of an AMD EPYC), so inference
goes there; with few rows and narrow matrices it is slower.

Shapes: B = any batch dimensions, N = their product, I = inputs, O = outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import can_fuse, infers_on_cpu
from rankwise.modules import is_observed, runs_in_order

MULTIPLE = 8
"""Numbers of two bytes in 16."""
MIN_ROWS = 128
HAS_ONEDNN = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Measured with AVX512 alone."""


def linear(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`; x is multiplied as it lies in memory, time first or batch first."""
    if x_BI.dim() == 3 and not x_BI.is_contiguous() and x_BI.transpose(0, 1).is_contiguous():
        return linear(x_BI.transpose(0, 1), weight_OI, bias_O).transpose(0, 1)
    if _suits_onednn(x_BI, weight_OI):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x_BI, weight_OI, bias_O, "none", [], "")
        return y
    if (dtype := half_dtype(x_BI)) is None or not weight_OI.numel():
        return F.linear(x_BI, weight_OI, bias_O)
    if can_fuse(x_BI) and weight_OI.dtype == torch.float32:
        y_BO: Tensor = _Linear.apply(x_BI, weight_OI, bias_O, dtype)  # type: ignore[no-untyped-call]
        return y_BO
    num_outputs, num_inputs = weight_OI.shape
    more_out, more_in = -num_outputs % MULTIPLE, -num_inputs % MULTIPLE
    if more_in:
        x_BI = F.pad(x_BI.to(dtype), (0, more_in))
    if more_in or more_out:
        weight_OI = F.pad(weight_OI, (0, more_in, 0, more_out))
        bias_O = None if bias_O is None else F.pad(bias_O, (0, more_out))
    return F.linear(x_BI, weight_OI, bias_O)[..., :num_outputs]


class _Linear(torch.autograd.Function):
    """x W^T + bias of parameters in float32, computed in half precision."""

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        x_NI = filled_up(x_BI.reshape(-1, x_BI.shape[-1]), dtype)
        w_OI = filled_up(weight_OI, dtype, rows=True)
        ctx.save_for_backward(x_NI, w_OI)
        ctx.shape, ctx.x_dtype, ctx.weight_shape = x_BI.shape, x_BI.dtype, weight_OI.shape
        bias_O = None if bias_O is None else filled_up(bias_O[None], dtype)[0]
        y_NO = F.linear(x_NI, w_OI, bias_O)[:, : weight_OI.shape[0]]
        return y_NO.view(*x_BI.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, w_OI = ctx.saved_tensors
        (num_outputs, num_inputs), needs = ctx.weight_shape, ctx.needs_input_grad
        dy_NO = filled_up(dy_BO.reshape(-1, dy_BO.shape[-1]), w_OI.dtype)
        dx = (dy_NO @ w_OI)[:, :num_inputs].view(ctx.shape).to(ctx.x_dtype) if needs[0] else None
        dweight = product(dy_NO.t(), x_NI)[:num_outputs, :num_inputs] if needs[1] else None
        return dx, dweight, column_sums(dy_NO)[:num_outputs] if needs[2] else None, None


def filled_up(x_NI: Tensor, dtype: torch.dtype, *, rows: bool = False) -> Tensor:
    """x in `dtype`, its columns filled up with zeros to a multiple of 16 bytes, and with `rows` their number too."""
    num_rows, width = x_NI.shape
    more_rows, more = -num_rows % MULTIPLE if rows else 0, -width % MULTIPLE
    if not (more or more_rows):
        return x_NI.to(dtype)
    wide = x_NI.new_empty(num_rows + more_rows, width + more, dtype=dtype)
    wide[:num_rows, :width].copy_(x_NI)
    if more:
        wide[:num_rows, width:].zero_()
    if more_rows:
        wide[num_rows:].zero_()
    return wide


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y in float32 at least."""
    if x.dtype.itemsize > 2:
        return x @ y
    if x.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(x, y, out_dtype=torch.float32)
    return (x @ y).float()


def column_sums(x_NO: Tensor) -> Tensor:
    """The sum of every column, in float32."""
    if not can_fuse(x_NO):
        return x_NO.sum(0, dtype=torch.float32)
    from rankwise.kernels.linear_kernels import column_sums

    return column_sums(x_NO)


def call(module: nn.Module, x_BI: Tensor) -> Tensor:
    """`module(x)`; plain linear layers, one after the other too, by `linear`."""
    if is_observed(module):
        y: Tensor = module(x_BI)
        return y
    if type(module) is nn.Linear:
        return linear(x_BI, module.weight, module.bias)
    if runs_in_order(module) and isinstance(module, nn.Sequential):
        for part in module:
            x_BI = call(part, x_BI)
        return x_BI
    y = module(x_BI)
    return y


def _suits_onednn(x_BI: Tensor, weight_OI: Tensor) -> bool:
    """Whether this is inference in float32 on a CPU, of enough rows to pay for the weight's new layout."""
    return (
        infers_on_cpu(x_BI)
        and x_BI.dtype == weight_OI.dtype == torch.float32
        and x_BI.numel() >= MIN_ROWS * weight_OI.shape[1] > 0
        and weight_OI.shape[0] > 0
        and HAS_ONEDNN
    )


def half_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of two bytes that a product with x is computed in on a GPU, if it is one of two bytes."""
    if x.device.type != "cuda":
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype.itemsize == 2 else None
