"""Targets: where a compact model will run, and what a low rank must be there so that it is not slower than dense.

A row of `TARGETS` per target. Measured on an H200 with decoders of width 4096: odd ranks make them 3.4 times slower
than dense ones at prefill, multiples of 16 and of 64 make them faster. A pair is two products instead of one: times at
half and at 70% of the dense parameters, drawn on in a line, meet the dense ones between 70% (token by token) and 100%
(prefill). `benchmarks/gpu_decoder.py` times it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rankwise.errors import RankwiseError, nearest


@dataclass(frozen=True)
class Target:
    """What a place to run wants of a model."""

    name: str
    layout: Literal["pair", "pivot"] = "pair"
    """How a matrix of low rank is stored, unless one is asked for."""
    alignment: int = 1
    """Ranks are multiples of at least this number, where matrices are large enough for it."""
    largest_multiple: int = 1
    """And of this one in the largest matrices."""
    pays_below: float = 1.0
    """A pair of this share of the dense parameters, or of more, is slower than the dense matrix, and becomes one."""

    def rank_multiple(self, full_rank: int) -> int:
        """The multiple at which a matrix keeps its ranks: a power of two, and a small step against the full rank."""
        most = min(self.largest_multiple, max(self.alignment, full_rank // 32), full_rank // 4)
        return 1 << max(most.bit_length() - 1, 0)

    def dense_from(self, dense: int) -> int | None:
        """Parameters from which a pair does not pay; None where it does up to those of the dense matrix."""
        return None if self.pays_below >= 1 else max(1, int(self.pays_below * dense))


TARGETS = {
    target.name: target
    for target in (
        Target("cuda", alignment=8, largest_multiple=64, pays_below=0.8),
        Target("cpu"),
        Target("size", layout="pivot"),
    )
}


def target_of(device: torch.device) -> Target:
    """The target of models that run on `device`; others than GPUs are like a CPU."""
    return TARGETS.get(device.type, TARGETS["cpu"])


def find_target(target: str | Target | None, model: nn.Module) -> Target:
    """The target of that name; None: where `model` is."""
    if isinstance(target, Target):
        return target
    if target is None:
        parameter = next(model.parameters(), None)
        return TARGETS["cpu"] if parameter is None else target_of(parameter.device)
    if target not in TARGETS:
        names = ", ".join(TARGETS)
        raise RankwiseError(
            f"`target` must be one of {names}, but is {target!r} instead.{nearest(str(target), TARGETS)} Leave it out "
            "to compress for the device that the model is on."
        )
    return TARGETS[target]
