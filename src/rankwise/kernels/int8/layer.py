"""A linear layer that multiplies bytes, four times as many at once as floats.

Weights are rounded per output, inputs per row as they come (a row is one token), both symmetrically:

    y = s_x s_W (round(x / s_x) round(W / s_W)^T) + b,    s = max |.| / 127

A scale per row keeps tokens apart: what a token gets does not depend on its neighbours, later ones least of all, so a
text fed piece by piece gives what it gives in one piece.

Shapes: B = any batch dimensions, N = rows (B flat), I = inputs, O = outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.int8 import SHIFT, round_rows, scale_rows_, scales
from rankwise.lazy import lazy_weight


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8. It has no gradient."""

    weight_OI: Tensor
    scale: Tensor
    bias: Tensor | None
    zero: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight_OI = layer.weight.detach().float()
        scale_O = scales(weight_OI)
        self.register_buffer("weight_OI", (weight_OI / scale_O).round_().to(torch.int8))
        self.dtype = layer.weight.dtype
        self.register_buffer("scale", scale_O.flatten())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32), persistent=False)
        self._packed: Tensor | None = None
        """The weight as oneDNN lays it out, once it was needed."""

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
        bytes_NI, scale_N1 = round_rows(x_NI)
        y_NO = (self._fast if can_multiply_bytes() else self._plain)(bytes_NI)
        y_NO = scale_rows_(y_NO, scale_N1, self.bias)
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
        # torch copies no packed weight, and writes none
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_multiply_bytes() -> bool:
    """Whether this processor and this torch have fast products of bytes."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.onednn, "qlinear_pointwise") and _has_vnni()


def _has_vnni() -> bool:
    # without these instructions oneDNN may saturate sums of two products
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())
