"""Linear layers, and gated low-rank pairs in their place, by the fastest kernels there are.

In half precision a GPU multiplies matrices several times slower when their rows are not a multiple of 16 bytes, such as
the 205 characters of enwik8: they are padded with zeros first. The backward pass is explicit, and gradients of
weights are summed up and written in float32, so that nothing is cast after the product. On a CPU, oneDNN multiplies 256
rows of float32 4 to 24% faster than the library that `F.linear` calls (MKL, on one thread of an AMD EPYC), so inference
goes there; with few rows and narrow matrices it is slower.

Shapes: B = any batch dimensions, N = their product, I = inputs, O = outputs, R = components of a pair, K = active ones,
W = inputs padded to a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rankwise.kernels.device import can_fuse, infers_on_cpu
from rankwise.modules import Pair, is_observed, runs_in_order

MULTIPLE = 8
"""How many numbers of two bytes fit into 16 bytes."""
MIN_ROWS = 128
HAS_ONEDNN = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Only with AVX512, where it was measured."""


def linear(x_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, without copying an x whose first two dimensions are transposed."""
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
        x_NI = padded(x_BI.reshape(-1, x_BI.shape[-1]), dtype)
        w_OI = padded(weight_OI, dtype, rows=True)
        ctx.save_for_backward(x_NI, w_OI)
        ctx.shape, ctx.x_dtype, ctx.weight_shape = x_BI.shape, x_BI.dtype, weight_OI.shape
        bias_O = None if bias_O is None else padded(bias_O[None], dtype)[0]
        y_NO = F.linear(x_NI, w_OI, bias_O)[:, : weight_OI.shape[0]]
        return y_NO.view(*x_BI.shape[:-1], weight_OI.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, w_OI = ctx.saved_tensors
        (num_outputs, num_inputs), needs = ctx.weight_shape, ctx.needs_input_grad
        dy_NO = padded(dy_BO.reshape(-1, dy_BO.shape[-1]), w_OI.dtype)
        dx = (dy_NO @ w_OI)[:, :num_inputs].view(ctx.shape).to(ctx.x_dtype) if needs[0] else None
        dweight = product(dy_NO.t(), x_NI)[:num_outputs, :num_inputs] if needs[1] else None
        return dx, dweight, column_sums(dy_NO)[:num_outputs] if needs[2] else None, None


def padded(x_NI: Tensor, dtype: torch.dtype, *, rows: bool = False) -> Tensor:
    """x in `dtype`, its columns padded with zeros to a multiple of 16 bytes, and with `rows` its rows too."""
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
    """x y, at least in float32."""
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
    """`module(x)`, by `linear` where the module is a plain linear layer or a chain of them."""
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
    """Whether this is inference in float32 on a CPU with enough rows to pay for laying out the weight."""
    return (
        infers_on_cpu(x_BI)
        and x_BI.dtype == weight_OI.dtype == torch.float32
        and x_BI.numel() >= MIN_ROWS * weight_OI.shape[1] > 0
        and weight_OI.shape[0] > 0
        and HAS_ONEDNN
    )


def half_dtype(x: Tensor) -> torch.dtype | None:
    """The half-precision dtype in which a product with x is computed on a GPU; None if it is not half precision."""
    if x.device.type != "cuda":
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return dtype if dtype.itemsize == 2 else None


def pair_linear(x_BI: Tensor, pair: Pair, bias_O: Tensor | None) -> Tensor:
    """`pair_reference`, by fewer kernels where x is on a GPU and multiplied in half precision."""
    if not _can_fuse_pair(x_BI, pair):
        return pair_reference(x_BI, pair, bias_O)
    y_BO: Tensor = _PairLinear.apply(x_BI, *pair, bias_O, half_dtype(x_BI))  # type: ignore[no-untyped-call]
    return y_BO


def pair_reference(x_BI: Tensor, pair: Pair, bias_O: Tensor | None) -> Tensor:
    """y = P[:, active] (z Q)[active] x + bias in plain PyTorch, where only the active components are multiplied."""
    q_RI, p_OR, z_R, active = pair
    if active is not None:
        p_OR, q_RI = p_OR.index_select(1, active), q_RI.index_select(0, active)
        z_R = None if z_R is None else z_R.index_select(0, active)
    # z times Q, which has fewer rows than Q x: those are the words of a batch
    q_RI = q_RI if z_R is None else (q_RI * z_R.unsqueeze(1)).to(q_RI.dtype)
    return linear(linear(x_BI, q_RI), p_OR, bias_O)


def _can_fuse_pair(x_BI: Tensor, pair: Pair) -> bool:
    if pair.active is None or not can_fuse(x_BI) or half_dtype(x_BI) is None or pair.q_RI.dtype != torch.float32:
        return False
    sizes = (pair.active.numel(), pair.p_OR.shape[0])
    return all(size and size % MULTIPLE == 0 for size in sizes)


class _PairLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BI: Tensor,
        q_RI: Tensor,
        p_OR: Tensor,
        z_R: Tensor | None,
        active_K: Tensor,
        bias_O: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        from rankwise.kernels.linear_kernels import select_columns, select_rows

        x_NW = padded(x_BI.reshape(-1, x_BI.shape[-1]), dtype)
        c_KW = select_rows(q_RI, z_R, active_K, dtype)
        kept_OK, places_R = select_columns(p_OR, active_K, dtype)
        h_NK = x_NW @ c_KW.t()
        y_NO = F.linear(h_NK, kept_OK, None if bias_O is None else bias_O.to(dtype))
        ctx.save_for_backward(x_NW, q_RI, p_OR, z_R, active_K, places_R, c_KW, kept_OK, h_NK)
        ctx.shape, ctx.x_dtype = x_BI.shape, x_BI.dtype
        return y_NO.view(*x_BI.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        from rankwise.kernels.linear_kernels import put_columns, put_rows

        x_NW, q_RI, p_OR, z_R, active_K, places_R, c_KW, kept_OK, h_NK = ctx.saved_tensors
        dy_NO = dy_BO.reshape(-1, dy_BO.shape[-1])
        dh_NK = dy_NO @ kept_OK
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dh_NK @ c_KW)[:, : q_RI.shape[1]].view(ctx.shape).to(ctx.x_dtype)
        dp_OR = put_columns(product(dy_NO.t(), h_NK), p_OR, active_K, places_R)
        dq_RI, dz_R = put_rows(product(dh_NK.t(), x_NW), q_RI, z_R, active_K, places_R)
        return dx, dq_RI, dp_OR, dz_R, None, column_sums(dy_NO) if ctx.needs_input_grad[5] else None, None
