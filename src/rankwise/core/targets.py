"""Targets: where a compact model will run, and which ranks are not slower than dense matrices there.

The numbers of "cuda" were measured on an H200 with decoders of width 4096 (`benchmarks/gpu_decoder.py`). Odd ranks are
3.4 times slower than dense at prefill; multiples of 16 and of 64 are faster. A pair is two products instead of one:
extrapolated from half and 70% of the dense parameters, it is as fast as dense between 70% (token by token) and 100%
(prefill).

Those of "cpu", "onnx" and "openvino" were measured on a core of an AMD EPYC with layers of 768 to 3072 features
(`benchmarks/targets.py`): multiples of 8 gain a tenth in torch with many tokens and 1 to 4% in the engines, and a pair
is faster than dense up to 95% of its parameters, in OpenVINO with many tokens up to 90%. Matrices of a full rank below
64 take any rank, as all do in the paper: `rank_multiple=1`.

"size" takes the multiples of "cpu", which cost no quality (docs/log/one-shot.md): more than half of the time in which a
GPU refines a model of odd ranks goes into products that do not suit it (docs/log/speed-gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rankwise.core.placement import device_of
from rankwise.errors import RankwiseError, nearest


@dataclass(frozen=True)
class Target:
    """Where a compact model will run, and the ranks and layout that are fast there."""

    name: str
    layout: Literal["pair", "pivot"] = "pair"
    """How a matrix of low rank is stored, unless the method's `layout` is set."""
    alignment: int = 1
    """Ranks are multiples of at least this number, if matrices are large enough for it."""
    largest_multiple: int = 1
    """Ranks of the largest matrices are multiples of this number."""
    faster_below: float = 1.0
    """A pair is faster than the dense matrix only below this share of its parameters; above it, dense is exported."""

    def rank_multiple(self, full_rank: int) -> int:
        """The multiple for the ranks of a matrix: a power of two that is small against its full rank."""
        most = min(self.largest_multiple, max(self.alignment, full_rank // 32), full_rank // 4)
        return 1 << max(most.bit_length() - 1, 0)

    def dense_from(self, dense: int) -> int | None:
        """The parameters from which a pair is not faster; None if that is the size of the dense matrix."""
        return None if self.faster_below >= 1 else max(1, int(self.faster_below * dense))


TARGETS = {
    target.name: target
    for target in (
        Target("cuda", alignment=8, largest_multiple=64, faster_below=0.8),
        Target("cpu", largest_multiple=8),
        Target("onnx", largest_multiple=8),
        Target("openvino", largest_multiple=8, faster_below=0.9),
        Target("size", layout="pivot", largest_multiple=8),
    )
}


def device_target(device: torch.device) -> Target:
    """The target for models on `device`: "cuda" for GPUs, "cpu" for everything else."""
    return TARGETS.get(device.type, TARGETS["cpu"])


def find_target(target: str | Target | None, model: nn.Module) -> Target:
    """The target of that name, or by default the one for the device that `model` is on."""
    if isinstance(target, Target):
        return target
    if target is None:
        return TARGETS["cpu"] if next(model.parameters(), None) is None else device_target(device_of(model))
    if not isinstance(target, str) or target not in TARGETS:
        names = ", ".join(TARGETS)
        raise RankwiseError(
            f"`target` must be one of {names}, but is {target!r} instead.{nearest(str(target), TARGETS)} Leave it out "
            "to compress for the device that the model is on."
        )
    return TARGETS[target]
