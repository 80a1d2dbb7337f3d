"""Gated layers: what a gated matrix is used for. Any matrix x any gate, composed.

Layers that share a matrix are tied: they share its parameters, its gate and its one entry in the books.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from rankwise.core.exports import Export
from rankwise.core.matrices import GatedMatrix
from rankwise.modules import Pair


class GatedLayer(nn.Module, ABC):
    """A layer over a gated matrix."""

    matrix: GatedMatrix

    @property
    def weight(self) -> Tensor:
        """The matrix as the gate stands, for code that reads `layer.weight`."""
        return self.matrix.weight()

    @abstractmethod
    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        """The layer of the compact model that takes this one's place; `memo` is that of the copy being made."""


class GatedLinear(GatedLayer):
    """y = x W^T + bias."""

    def __init__(self, matrix: GatedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self.out_features, self.in_features = matrix.shape

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias)

    def pair(self) -> Pair | None:
        """See `rankwise.modules.pair_of`."""
        return self.matrix.pair() if self.bias is None else None

    def whole(self) -> Tensor | None:
        """See `rankwise.modules.pair_of`."""
        return self.matrix.whole() if self.bias is None else None

    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        return export.as_linear(copy.deepcopy(self.bias, memo))


class GatedEmbedding(GatedLayer):
    """Rows of W, by index, scaled as the table did that stood here."""

    def __init__(self, matrix: GatedMatrix, padding_idx: int | None, scaling: nn.Embedding | None = None) -> None:
        super().__init__()
        self.matrix = matrix
        self.scaling = scaling
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = matrix.shape

    def forward(self, index: Tensor) -> Tensor:
        rows = self.matrix.rows(index, self.padding_idx)
        if self.scaling is None:
            return rows
        scale: Tensor = self.scaling(torch.zeros(1, dtype=torch.long, device=rows.device))
        return rows * scale[0].to(rows.dtype)

    def plain(self, export: Export, memo: dict[int, object]) -> nn.Module:
        return export.as_embedding(self.padding_idx, copy.deepcopy(self.scaling, memo))
