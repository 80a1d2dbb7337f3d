"""What a gated matrix becomes: plain parameters, and the plain modules that use them.

Paper: section 4.4 "Inference". One export serves every use of its matrix, so tied layers stay tied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rankwise.core.pivot import choose_rows
from rankwise.modules import (
    LowRankEmbedding,
    LowRankHead,
    PivotLinear,
    SelectedLinear,
    around,
    embedding,
    joined,
    linear,
)


class Export(ABC):
    """The parameters of an exported matrix."""

    @abstractmethod
    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        """A module that computes x W^T + bias."""

    @abstractmethod
    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        """A module that looks up rows of W, and scales them as `like` does."""


@dataclass
class DenseExport(Export):
    """One plain matrix."""

    weight_OI: nn.Parameter

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        return linear(self.weight_OI, bias)

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        return embedding(self.weight_OI, padding_idx, like)


@dataclass
class LowRankExport(Export):
    """P and Q, with the gate's values absorbed into Q."""

    p_OK: nn.Parameter
    q_KI: nn.Parameter
    table: LowRankEmbedding | None = field(default=None, init=False)
    """The embedding made of this matrix, to which output layers are tied. Embeddings are asked for first."""

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        if self.table is None:
            return joined(linear(self.q_KI, None), linear(self.p_OK, bias))
        words, projection = self.table
        assert isinstance(words, nn.Embedding) and isinstance(projection, nn.Linear)
        return LowRankHead(words, projection, bias)

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        if self.table is None:
            q_IK = nn.Parameter(self.q_KI.detach().t().contiguous(), self.q_KI.requires_grad)
            self.table = LowRankEmbedding(embedding(self.p_OK, padding_idx, like), linear(q_IK, None))
            return self.table
        projection = self.table[1]
        assert isinstance(projection, nn.Linear)
        return joined(embedding(self.p_OK, padding_idx, like), around(projection))


@dataclass
class PivotExport(Export):
    """Rows of W and coefficients of the others; columns, where W is a table of words, which may be many.

    P and Q are in the precision to compute in; what is made of them has the dtype of `like`. Uses share parameters,
    and each has its places, because transformers knows tied parameters but no tied buffers.
    """

    p_OK: Tensor
    q_KI: Tensor
    like: nn.Parameter
    words: nn.Embedding | None = field(default=None, init=False)
    """The first embedding made of this matrix, to which output layers are tied. Embeddings are asked for first."""
    made: tuple[nn.Parameter, nn.Parameter, Tensor] | None = field(default=None, init=False)
    """Rows (or columns), coefficients and places, once the first use has been asked for."""

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        if self.words is not None:
            return LowRankHead(self.words, self._pivot(None), bias)
        if self.made is None:
            places, chosen, coefficients = choose_rows(self.p_OK)
            rows_KI = self.p_OK[chosen] @ self.q_KI
            self.made = (self._parameter(rows_KI), self._parameter(coefficients), places)
        return joined(linear(self.made[0], None), self._pivot(bias))

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        if self.made is None:
            places, chosen, coefficients = choose_rows(self.q_KI.t())
            columns_OK = self.p_OK @ self.q_KI[:, chosen]
            self.made = (self._parameter(columns_OK), self._parameter(coefficients), places)
        words = embedding(self.made[0], padding_idx, like)
        self.words = self.words or words
        return joined(words, self._pivot(None))

    def _pivot(self, bias: nn.Parameter | None) -> PivotLinear:
        assert self.made is not None
        _, coefficients, places = self.made
        return PivotLinear(coefficients, places.clone(), bias)

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        tensor = tensor.detach().to(self.like.dtype, memory_format=torch.contiguous_format)
        return nn.Parameter(tensor, self.like.requires_grad)


@dataclass
class SelectedExport(Export):
    """The columns of the input features that are kept."""

    weight_OK: nn.Parameter
    kept_I: Tensor

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        return SelectedLinear(self.weight_OK, self.kept_I.clone(), bias)

    def as_embedding(self, padding_idx: int | None, like: nn.Embedding | None = None) -> nn.Module:
        raise NotImplementedError("an embedding has no input features to prune")
