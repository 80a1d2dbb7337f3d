"""On which device a kernel is launched, and whether our own kernels can run at all."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def on(tensor: Tensor) -> Any:
    """A context that makes the device of `tensor` the current one, to which Triton launches kernels."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def can_fuse(x: Tensor) -> bool:
    """Whether Triton kernels can compute on `x`; not under `torch.compile`, which fuses by itself."""
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def infers_on_cpu(x: Tensor) -> bool:
    """Whether `x` is on the CPU and is used for inference: no gradients, no autocast, no compiler."""
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
