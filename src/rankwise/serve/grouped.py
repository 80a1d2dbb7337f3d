"""Products of low-rank matrices that read the same input, such as those of queries, keys and values.

Shapes: B = any batch dimensions, I = inputs, R = rows of all first factors, K = rank of one part, O = its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.low_rank import LowRankGroup, Part

Factor = Tensor | nn.Module
"""A matrix W, or a module that gives x W^T."""


class Second(NamedTuple):
    """The second factor of one part."""

    rows: int
    """How many rows of the stacked first factors are this part's."""
    p_OK: Factor | None = None
    """None: the rows are the matrix itself, which is dense. With `places_O`: its O - K rows that are no unit rows."""
    places_O: Tensor | None = None
    """Where each output stands in [first product; second product]: see `rankwise.modules.PivotLinear`."""


def grouped_pair(x_BI: Tensor, q_RI: Factor, parts: Sequence[Second], bias: Tensor | None = None) -> Tensor:
    """The outputs of all parts, one after the other: each is P (Q x), and their Qs are one product."""
    z_BR = product(x_BI, q_RI)
    if len(parts) == 1:
        return second_product(z_BR, parts[0], bias)
    pieces = torch.split(z_BR, [part.rows for part in parts], -1)
    y_BO = torch.cat([second_product(z_BK, part) for z_BK, part in zip(pieces, parts, strict=True)], -1)
    return y_BO if bias is None else y_BO + bias


def second_product(z_BK: Tensor, part: Second, bias: Tensor | None = None) -> Tensor:
    """The product with the second factor of one part."""
    if part.p_OK is not None and part.places_O is None:
        return product(z_BK, part.p_OK, bias)
    if part.p_OK is not None and part.places_O is not None:
        z_BK = torch.cat([z_BK, product(z_BK, part.p_OK)], -1).index_select(-1, part.places_O)
    return z_BK if bias is None else z_BK + bias


def product(x: Tensor, factor: Factor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias."""
    if isinstance(factor, Tensor):
        return F.linear(x, factor, bias)
    y: Tensor = factor(x)
    return y if bias is None else y + bias


def fused_group(q_RI: Tensor, parts: Sequence[Second]) -> LowRankGroup:
    """The same products by the kernels for a GPU, with weights of their own; a dense part is one of pivots alone."""
    firsts = torch.split(q_RI.detach(), [part.rows for part in parts])
    fused = []
    for q_KI, part in zip(firsts, parts, strict=True):
        if part.p_OK is None:
            fused.append(Part(q_KI, q_KI.new_empty(0, part.rows), torch.arange(part.rows, device=q_KI.device)))
        else:
            assert isinstance(part.p_OK, Tensor)
            fused.append(Part(q_KI, part.p_OK, part.places_O))
    return LowRankGroup(fused)
