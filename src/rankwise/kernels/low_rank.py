"""Low-rank layers that read the same input, as two products: the first factors together, then the second factors.

A decoder computes q, k and v of the same input, and gate and up. Each of them at low rank is a pair of products, and a
GPU that decodes a few tokens spends as long on starting many small products as on reading their weights. Here the first
factors of a group are stacked into one matrix, and all second factors are one launch.

Shapes: B = any batch dimensions, M = their product, I = inputs, R = ranks of all parts together, O = outputs of all
parts together, N = rows of second factors that are stored, which are fewer than O with pivots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankwise.kernels.device import HAS_TRITON, on

ALIGNMENT = 8
"""Ranks are padded with zeros to a multiple of this, so that every row of a factor starts at a multiple of 16 bytes."""
MOST_ROWS = 64
"""With more rows than this, the products of cuBLAS are as fast."""
TILE, LARGE_TILE = 16, 64
"""Rows of second factors that one program multiplies by a single row of input, and by several."""


class Part(NamedTuple):
    """One layer of a group: W = P Q, or with `places_O` W = [1; P] Q with its rows in the order of `places_O`."""

    q_RI: Tensor
    p_NR: Tensor
    places_O: Tensor | None = None
    """Of a pivot layout: the position of each output in [Q x; P Q x]."""


class LowRankGroup(nn.Module):
    """Low-rank layers that read the same input: y = [P1 Q1 x, P2 Q2 x, ...] + bias. For inference alone.

    Args:
        parts: the factors of each layer.
        bias_O: the biases of all layers, one after the other.
    """

    def __init__(self, parts: Sequence[Part], bias_O: Tensor | None = None) -> None:
        super().__init__()
        self.ranks = [len(part.q_RI) + -len(part.q_RI) % ALIGNMENT for part in parts]
        self.rows = [len(part.p_NR) for part in parts]
        self.outputs = [len(part.p_NR if part.places_O is None else part.places_O) for part in parts]
        more = [rank - len(part.q_RI) for rank, part in zip(self.ranks, parts, strict=True)]
        q_RI = torch.cat([F.pad(part.q_RI.detach(), (0, 0, 0, n)) for n, part in zip(more, parts, strict=True)])
        p = torch.cat([F.pad(part.p_NR.detach(), (0, n)).flatten() for n, part in zip(more, parts, strict=True)])
        self.q_RI, self.p = nn.Parameter(q_RI, requires_grad=False), nn.Parameter(p, requires_grad=False)
        self.bias = None if bias_O is None else nn.Parameter(bias_O.detach(), requires_grad=False)
        for name, size in (("tiles", TILE), ("large_tiles", LARGE_TILE)):
            tiles = torch.tensor(_tiles(self.ranks, self.rows, size), dtype=torch.int32, device=q_RI.device)
            self.register_buffer(name, tiles.view(-1, 5), persistent=False)
        self.register_buffer("targets", _targets(parts, self.ranks), persistent=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        """The outputs of all layers, one after the other."""
        if self._has_plain_products(x_BI):
            outputs = self.outputs_of(x_BI)
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        y_BO: Tensor = torch.ops.rankwise.low_rank_group(
            x_BI, self.q_RI, self.p, self.tiles, self.large_tiles, self.targets, self.bias, self.ranks, self.rows,
            sum(self.outputs),
        )  # fmt: skip
        return y_BO

    def outputs_of(self, x_BI: Tensor) -> tuple[Tensor, ...]:
        """The outputs of each layer."""
        if not self._has_plain_products(x_BI):
            return torch.split(self(x_BI), self.outputs, -1)
        # in two dimensions: parts of h with more would be multiplied as batches
        h_MR = F.linear(x_BI.reshape(-1, x_BI.shape[-1]), self.q_RI)
        factors = second_factors(self.p, self.ranks, self.rows)
        biases = [None] * len(factors) if self.bias is None else torch.split(self.bias, self.rows)
        parts = zip(torch.split(h_MR, self.ranks, -1), factors, biases, strict=True)
        return tuple(F.linear(h, p, bias).view(*x_BI.shape[:-1], len(p)) for h, p, bias in parts)

    def _has_plain_products(self, x_BI: Tensor) -> bool:
        """Whether cuBLAS is as fast as our kernels: a compiler can fuse its products with what follows."""
        num_rows = x_BI.shape[:-1].numel()
        return self.targets is None and (num_rows > MOST_ROWS or (num_rows > 1 and len(self.ranks) == 1))

    def extra_repr(self) -> str:
        return f"in_features={self.q_RI.shape[1]}, ranks={self.ranks}, outputs={self.outputs}"


def _tiles(ranks: Sequence[int], rows: Sequence[int], size: int) -> list[list[int]]:
    """What each program of the second product multiplies: where its rows start in `p`, its first row, the number of
    its rows, the first component and the number of components."""
    tiles = []
    weights = first_row = first_rank = 0
    for rank, count in zip(ranks, rows, strict=True):
        for row in range(0, count, size):
            tiles.append([weights + row * rank, first_row + row, min(size, count - row), first_rank, rank])
        weights, first_row, first_rank = weights + rank * count, first_row + count, first_rank + rank
    return tiles


def _targets(parts: Sequence[Part], ranks: Sequence[int]) -> Tensor | None:
    """With pivots, the output that each stored row gives, then the output that each component is; -1 if it is none."""
    if all(part.places_O is None for part in parts):
        return None
    device = parts[0].q_RI.device
    rows, components, start = [], [], 0
    for part, rank in zip(parts, ranks, strict=True):
        own = torch.full((rank,), -1, device=device)
        if part.places_O is None:
            rows.append(torch.arange(start, start + len(part.p_NR), device=device))
            start += len(part.p_NR)
        else:
            outputs = part.places_O.long().argsort() + start
            own[: len(part.q_RI)] = outputs[: len(part.q_RI)]
            rows.append(outputs[len(part.q_RI) :])
            start += len(part.places_O)
        components.append(own)
    return torch.cat(rows + components).to(torch.int32)


# the schema is written out, because torch 2.6 does not infer it from `list[int]`
@torch.library.custom_op(
    "rankwise::low_rank_group",
    mutates_args=(),
    schema="(Tensor x_BI, Tensor q_RI, Tensor p, Tensor tiles, Tensor large_tiles, Tensor? targets, Tensor? bias_O, "
    "int[] ranks, int[] rows, int num_outputs) -> Tensor",
)
def low_rank_group(
    x_BI: Tensor,
    q_RI: Tensor,
    p: Tensor,
    tiles: Tensor,
    large_tiles: Tensor,
    targets: Tensor | None,
    bias_O: Tensor | None,
    ranks: list[int],
    rows: list[int],
    num_outputs: int,
) -> Tensor:
    """`low_rank_group_reference`, by fewer kernels if there are few rows and they are on a GPU."""
    num_rows = x_BI.shape[:-1].numel()
    if not (x_BI.is_cuda and HAS_TRITON and 0 < num_rows <= MOST_ROWS and x_BI.dtype != torch.float64 and len(q_RI)):
        return low_rank_group_reference(x_BI, q_RI, p, tiles, large_tiles, targets, bias_O, ranks, rows, num_outputs)
    from rankwise.kernels.low_rank_kernels import second_of_rows, single_row

    with on(x_BI):
        if num_rows == 1:
            y = single_row(x_BI.flatten(), q_RI, p, tiles, targets, bias_O, num_outputs)
        else:
            h_MR = F.linear(x_BI.reshape(num_rows, -1), q_RI)
            y = second_of_rows(h_MR, p, large_tiles, targets, bias_O, num_outputs)
    return y.view(*x_BI.shape[:-1], num_outputs)


@low_rank_group.register_fake
def _(x_BI: Tensor, *others: Any) -> Tensor:
    return x_BI.new_empty(*x_BI.shape[:-1], others[-1])


def low_rank_group_reference(
    x_BI: Tensor,
    q_RI: Tensor,
    p: Tensor,
    tiles: Tensor,
    large_tiles: Tensor,
    targets: Tensor | None,
    bias_O: Tensor | None,
    ranks: list[int],
    rows: list[int],
    num_outputs: int,
) -> Tensor:
    """The outputs of all parts in plain PyTorch: one product with the first factors, one with each second factor."""
    h_BR = F.linear(x_BI, q_RI)
    parts = zip(torch.split(h_BR, ranks, -1), second_factors(p, ranks, rows), strict=True)
    y_BN = torch.cat([F.linear(h, weights) for h, weights in parts], -1)
    if targets is not None:
        # where each output stands; index -1 is a place behind the last output, for components that are none
        sources = torch.empty(num_outputs + 1, dtype=torch.long, device=x_BI.device)
        sources[targets.long()] = torch.arange(len(targets), device=x_BI.device)
        y_BN = torch.cat([y_BN, h_BR], -1).index_select(-1, sources[:num_outputs])
    return y_BN if bias_O is None else y_BN + bias_O


def second_factors(p: Tensor, ranks: Sequence[int], rows: Sequence[int]) -> list[Tensor]:
    """The second factor of each part, which are stored one after the other."""
    sizes = [rank * count for rank, count in zip(ranks, rows, strict=True)]
    return [part.view(count, rank) for part, rank, count in zip(torch.split(p, sizes), ranks, rows, strict=True)]
