"""int8 and bfloat16 on a CPU: linear layers multiply bytes, four times as many at once as floats, or halves.

In int8 weights are rounded per output, inputs per row as they come (a row is one token), both symmetrically:

    y = s_x s_W (round(x / s_x) round(W / s_W)^T) + b,    s = max |.| / 127

A scale per row keeps tokens apart: what a token gets does not depend on its neighbours, later ones least of all, so a
text fed piece by piece gives what it gives in one piece.

Shapes: B = any batch dimensions, N = rows (B flat), I = inputs, O = outputs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.adapters.readers import readers
from rankwise.errors import RankwiseError
from rankwise.kernels import rows


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8. It has no gradient."""

    weight_OI: Tensor
    weight: Tensor
    """Of no elements: for code that asks a layer for its dtype or device."""
    scale: Tensor
    bias: Tensor | None
    zero: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight_OI = layer.weight.detach().float()
        scale_O = rows.scales(weight_OI)
        self.register_buffer("weight_OI", (weight_OI / scale_O).round_().to(torch.int8))
        self.register_buffer("weight", layer.weight.detach().new_empty(0), persistent=False)
        self.register_buffer("scale", scale_O.flatten())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32), persistent=False)
        self._packed: Tensor | None = None

    @torch.no_grad()
    def forward(self, x_BI: Tensor) -> Tensor:
        x_NI = x_BI.reshape(-1, self.in_features)
        x_NI = x_NI if x_NI.dtype == torch.float32 else x_NI.float()
        bytes_NI, scale_N1 = rows.round_rows(x_NI)
        y_NO = (self._fast if can_multiply_bytes() else self._plain)(bytes_NI)
        y_NO = rows.scale_rows_(y_NO, scale_N1, self.bias)
        return y_NO.to(x_BI.dtype).view(*x_BI.shape[:-1], self.out_features)

    def _fast(self, bytes_NI: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.weight_OI, None)
        y_NO: Tensor = torch.ops.onednn.qlinear_pointwise(
            bytes_NI, 1.0, rows.SHIFT, self._packed, self.scale, self.zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y_NO

    def _plain(self, bytes_NI: Tensor) -> Tensor:
        """The same numbers: products of bytes, and sums of a thousand of them, are exact in float32."""
        return F.linear(bytes_NI.float() - rows.SHIFT, self.weight_OI.float()) * self.scale

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class BFloat16Linear(nn.Module):
    """A linear layer whose weight is bfloat16; it gives what it gets. It has no gradient."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("weight", layer.weight.detach().bfloat16())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())

    @torch.no_grad()
    def forward(self, x_BI: Tensor) -> Tensor:
        y_BO = F.linear(x_BI.bfloat16(), self.weight).to(x_BI.dtype)
        return y_BO if self.bias is None else y_BO.add_(self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def bfloat16(model: nn.Module) -> nn.Module:
    """A copy of `model` for inference on a CPU whose linear layers multiply in bfloat16; otherwise like `int8`."""
    if not can_multiply_bfloat16():
        _warn("bfloat16 (AVX512_BF16)")
    return _multiplying(model, "bfloat16", BFloat16Linear)


def int8(model: nn.Module) -> nn.Module:
    """A copy of `model` for inference on a CPU whose linear layers multiply in int8; `model` stays as it is.

    Embeddings, norms, recurrences and layers whose weight others read keep their precision; attention of rankwise's
    own models runs in bfloat16 where the processor multiplies it faster. The copy is made in milliseconds and cannot be
    saved: save the model, and quantize what was loaded.
    """
    if not can_multiply_bytes():
        _warn("int8 (VNNI)")
    return _multiplying(model, "int8", Int8Linear)


def _warn(what: str) -> None:
    warnings.warn(
        f"This processor has no instructions for {what}, or torch no oneDNN to use them: such a model is smaller here, "
        "but not faster.",
        RuntimeWarning,
        stacklevel=3,
    )


def _multiplying(model: nn.Module, what: str, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A copy of `model` with every linear layer that can be made anew by `make`."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise RankwiseError(
                f"{what} needs a model on the CPU, but {name} is on {parameter.device} instead. Move it: model.cpu()."
            )
    read = readers(model)
    layers = {id(m): m for m in model.modules() if type(m) is nn.Linear and m.weight.numel() and id(m) not in read}
    if not layers:
        raise RankwiseError(
            f"{what} needs a model with linear layers, but {type(model).__name__} has none that can be."
        )
    # what is already copied, `deepcopy` takes as it is: so tied layers stay one
    copies: dict[int, object] = {key: make(layer) for key, layer in layers.items()}
    quantized: nn.Module = copy.deepcopy(model, copies)
    if can_multiply_bfloat16():
        for module in quantized.modules():
            if hasattr(module, "inference_dtype"):
                module.inference_dtype = torch.bfloat16  # type: ignore[assignment]
    return quantized.eval()


def can_multiply_bytes() -> bool:
    """Whether this processor and this torch have fast products of bytes."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.onednn, "qlinear_pointwise") and _has_vnni()


def can_multiply_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def _has_vnni() -> bool:
    # without these instructions oneDNN may saturate sums of two products
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())
