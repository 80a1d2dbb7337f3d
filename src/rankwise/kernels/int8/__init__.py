"""What stands around a product of bytes: rows rounded on the way in, rows scaled on the way out."""

from __future__ import annotations

from torch import Tensor

from rankwise.kernels.int8 import cpu, reference
from rankwise.kernels.int8.reference import SHIFT, scales

__all__ = ["SHIFT", "round_rows", "scale_rows_", "scales"]


def round_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.round_rows`."""
    run = cpu.round_rows if cpu.can_run(x_NI) else reference.round_rows
    return run(x_NI)


def scale_rows_(y_NO: Tensor, scale_N1: Tensor, bias_O: Tensor | None) -> Tensor:
    """`reference.scale_rows_`."""
    run = cpu.scale_rows_ if cpu.can_run(y_NO) else reference.scale_rows_
    return run(y_NO, scale_N1, bias_O)
