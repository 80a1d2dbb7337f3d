"""What a gated matrix becomes: plain parameters, and the plain modules that use them.

Paper: section 4.4 "Inference". One export serves every use of its matrix, so tied layers stay tied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor, nn

from rankwise.modules import LowRankHead, SelectedLinear, embedding, linear


class Export(ABC):
    """The parameters of an exported matrix."""

    @abstractmethod
    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        """A module that computes x W^T + bias."""

    @abstractmethod
    def as_embedding(self, padding_idx: int | None) -> nn.Module:
        """A module that looks up rows of W."""


@dataclass
class DenseExport(Export):
    """One plain matrix."""

    weight_OI: nn.Parameter

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        return linear(self.weight_OI, bias)

    def as_embedding(self, padding_idx: int | None) -> nn.Module:
        return embedding(self.weight_OI, padding_idx)


@dataclass
class LowRankExport(Export):
    """P and Q, with the gate's values absorbed into Q."""

    p_OK: nn.Parameter
    q_KI: nn.Parameter
    table: nn.Sequential | None = field(default=None, init=False)
    """The embedding made of this matrix, to which output layers are tied. Embeddings are asked for first."""

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        if self.table is None:
            return nn.Sequential(linear(self.q_KI, None), linear(self.p_OK, bias))
        words, projection = self.table
        assert isinstance(words, nn.Embedding) and isinstance(projection, nn.Linear)
        return LowRankHead(words, projection, bias)

    def as_embedding(self, padding_idx: int | None) -> nn.Module:
        if self.table is None:
            q_IK = nn.Parameter(self.q_KI.detach().t().contiguous(), self.q_KI.requires_grad)
            self.table = nn.Sequential(embedding(self.p_OK, padding_idx), linear(q_IK, None))
            return self.table
        return nn.Sequential(embedding(self.p_OK, padding_idx), self.table[1])


@dataclass
class SelectedExport(Export):
    """The columns of the input features that are kept."""

    weight_OK: nn.Parameter
    kept_I: Tensor

    def as_linear(self, bias: nn.Parameter | None) -> nn.Module:
        return SelectedLinear(self.weight_OK, self.kept_I.clone(), bias)

    def as_embedding(self, padding_idx: int | None) -> nn.Module:
        raise NotImplementedError("an embedding has no input features to prune")
