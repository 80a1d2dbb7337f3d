"""Where a kernel is launched, and whether."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def on(tensor: Tensor) -> Any:
    """A context in which kernels go to the device of `tensor`: Triton takes the current one, which need not be it."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def can_fuse(x: Tensor) -> bool:
    """Whether what reads `x` can run by kernels of our own; a compiler fuses by itself."""
    return x.is_cuda and HAS_TRITON and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def infers_on_cpu(x: Tensor) -> bool:
    """Whether what is made of `x` needs no gradient, no compiler and no other device."""
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
