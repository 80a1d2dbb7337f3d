"""Matrix products by the fastest way there is.

In half precision a GPU multiplies matrices several times slower when their rows are no multiple of 16 bytes, such as
the 205 characters of enwik8. Here they are filled up with zeros first. On a CPU, oneDNN multiplies 256 rows of
float32 4 to 24% faster than the library that `F.linear` calls (MKL, on one thread of an AMD EPYC), so inference goes
there; with few rows and narrow matrices it is slower.

Shapes: B = any batch dimensions, I = inputs, O = outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.modules import is_observed

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
    num_outputs, num_inputs = weight_OI.shape
    more_out, more_in = -num_outputs % MULTIPLE, -num_inputs % MULTIPLE
    if not (more_out or more_in) or (dtype := half_dtype(x_BI)) is None:
        return F.linear(x_BI, weight_OI, bias_O)
    x_BI = F.pad(x_BI.to(dtype), (0, more_in)) if more_in else x_BI
    weight_OI = F.pad(weight_OI.to(dtype), (0, more_in, 0, more_out))
    if not more_out:
        return F.linear(x_BI, weight_OI, bias_O)
    bias_O = None if bias_O is None else F.pad(bias_O.to(dtype), (0, more_out))
    return F.linear(x_BI, weight_OI, bias_O)[..., :num_outputs]


def call(module: nn.Module, x_BI: Tensor) -> Tensor:
    """`module(x)`; plain linear layers, one after the other too, by `linear`."""
    if is_observed(module):
        y: Tensor = module(x_BI)
        return y
    if type(module) is nn.Linear:
        return linear(x_BI, module.weight, module.bias)
    if type(module) is nn.Sequential:
        for part in module:
            x_BI = call(part, x_BI)
        return x_BI
    y = module(x_BI)
    return y


def _suits_onednn(x_BI: Tensor, weight_OI: Tensor) -> bool:
    """Whether this is inference in float32 on a CPU, of enough rows to pay for the weight's new layout."""
    return (
        x_BI.device.type == "cpu"
        and x_BI.dtype == weight_OI.dtype == torch.float32
        and x_BI.numel() >= MIN_ROWS * weight_OI.shape[1] > 0
        and weight_OI.shape[0] > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and HAS_ONEDNN
    )


def half_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of two bytes that a product with x is computed in on a GPU, if it is one of two bytes."""
    if x.device.type != "cuda":
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype.itemsize == 2 else None
